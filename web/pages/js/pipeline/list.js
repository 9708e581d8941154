// The newest requests as a table of which only the visible rows exist. Filter and search work on the rows that are here, and
// are also sent to the server, which finds older ones. Scrolling to the end loads the next page.

import { call, explain, pageOf } from "../api.js";
import { button, el, everyFrame, say } from "../dom.js";
import { ago, BADGES, count, duration, known, short } from "../format.js";
import { Requests } from "./model.js";

const ROW = 36; // height in CSS pixels, as in pipeline.css
const SPARE = 4; // rows above and below the visible ones
const PAGE = 200;
const SEARCH_MS = 250;
const REFRESH_MS = 3000;
const MOST = 10_000;
const MOST_PAGES = 20; // that are read without a word of the user, when few requests match
const OPEN = ["queued", "tokenizing", "waiting", "running", "preempted"];
const FILTERS = [
  ["all", "all", null],
  ["open", "open: not ended", new Set(OPEN)],
  ["running", "running", new Set(["running"])],
  ["queued,tokenizing,waiting,preempted", "waiting", new Set(["queued", "tokenizing", "waiting", "preempted"])],
  ["finished", "finished", new Set(["finished"])],
  ["failed,unreadable", "failed", new Set(["failed", "unreadable"])],
  ["cancelled", "cancelled", new Set(["cancelled"])],
];
const COLUMNS = [
  ["request", "uid", (row, cell) => link(cell, row.uid)],
  ["state", "state", (row, cell) => badge(cell, row)],
  ["age", "number", (row, cell, nowMs) => words(cell, row.submitted_ms ? ago(nowMs - row.submitted_ms) : "-")],
  ["took", "number", (row, cell) => words(cell, known(row.took_ms, duration))],
  ["prompt", "number", (row, cell) => words(cell, known(row.prompt_tokens, count))],
  ["cached", "number", (row, cell) => words(cell, known(row.cached_tokens, count))],
  ["output", "number", (row, cell) => words(cell, count(row.output_tokens))],
  ["tokens/s", "number", (row, cell) => words(cell, known(row.tokens_per_s, short))],
  ["engine", "engine", (row, cell) => words(cell, row.engine)],
  ["endpoint", "endpoint", (row, cell) => words(cell, row.endpoint)],
];

export class RequestList {
  constructor() {
    this.requests = new Requests();
    this._shown = [];
    this._nowMs = 0;
    this._fresh = new Set(); // uids of the last picture
    this._next = undefined; // the cursor of the next page; undefined: none was asked for; null: there are no more
    this._loading = false;
    this._asked = 0;
    this._refreshedAt = 0;
    this._pages = 0; // read since the user scrolled or searched
    this._pool = [];
    this._more = button("Search older requests", {
      class: "tiny",
      hidden: true,
      click: () => {
        this._pages = 0;
        this._load();
      },
    });
    this._filter = el(
      "select",
      { id: "state", change: () => this._changed() },
      FILTERS.map(([value, says]) => el("option", { value }, says)),
    );
    this._search = el("input", {
      type: "search",
      id: "search",
      placeholder: "uid, model, label ..",
      autocomplete: "off",
      spellcheck: "false",
      input: () => {
        clearTimeout(this._typing);
        this._typing = setTimeout(() => this._changed(), SEARCH_MS);
      },
    });
    this._count = el("span.dim.small.number");
    this._space = el("div.space");
    this._body = el("div.body", { role: "rowgroup" }, this._space);
    this._view = el(
      "div.view",
      {
        tabindex: "0",
        role: "table",
        aria: { label: "Requests, the newest first" },
        scroll: () => {
          this._pages = 0;
          this._draw();
        },
      },
      el(
        "div.head",
        { role: "rowgroup" },
        el(
          "div.request",
          { role: "row" },
          COLUMNS.map(([name, kind]) => el("span", { class: kind, role: "columnheader" }, name)),
        ),
      ),
      this._body,
    );
    this._said = el("p.dim.small", { role: "status" });
    this.node = el(
      "section.card.stack.requests",
      { aria: { label: "Requests" } },
      el(
        "div.row",
        el("h2", "Requests"),
        this._count,
        el("span.grow"),
        el("label.hidden-text", { for: "state" }, "State"),
        this._filter,
        el("label.hidden-text", { for: "search" }, "Search"),
        this._search,
      ),
      this._view,
      el("div.row", this._said, this._more),
    );
    this._draw = everyFrame(() => this._drawNow());
    new ResizeObserver(() => this._draw()).observe(this._view);
  }

  // Show the requests of a picture. Older ones stay as they were last seen.
  show(picture) {
    this._nowMs = picture.at_ms;
    this._fresh = new Set(picture.requests.map(each => each.uid));
    this.requests.take(picture.requests, picture.at_ms);
    this._select();
    this._refresh();
  }

  // Load the newest requests that the filter lets through. What is here stays.
  async begin() {
    this._next = undefined;
    await this._load();
  }

  _changed() {
    this._pages = 0;
    this._view.scrollTop = 0;
    this._select();
    this.begin();
  }

  _select() {
    const [, , states] = FILTERS.find(([value]) => value === this._filter.value);
    this._shown = this.requests.matching(states, this._search.value);
    const words =
      this._shown.length === this.requests.size
        ? count(this.requests.size)
        : `${count(this._shown.length)} of ${count(this.requests.size)}`;
    say(this._count, words);
    this._draw();
  }

  _query(more = {}) {
    const query = new URLSearchParams({ limit: String(PAGE), ...more });
    if (this._filter.value !== "all") query.set("state", this._filter.value);
    if (this._search.value.trim()) query.set("search", this._search.value.trim());
    return `/v1/requests?${query}`;
  }

  async _load() {
    const mine = (this._asked += 1);
    this._pages += 1;
    this._loading = true;
    try {
      const page = await call(this._query(this._next ? { before: this._next } : {}));
      if (mine !== this._asked) return; // the filter changed meanwhile
      this._next = page.next;
      this.requests.take(page.requests);
      this._said.textContent =
        page.next === null && page.requests.length === 0 && !this._shown.length ? "No request matches." : "";
    } catch (error) {
      if (mine !== this._asked) return;
      this._pages = MOST_PAGES; // the user says when to try again
      this._said.textContent = explain(error);
    } finally {
      if (mine === this._asked) this._loading = false;
    }
    this._select();
  }

  // Requests that still run but are not among the newest are not in the pictures: ask for those that are visible.
  async _refresh() {
    const now = performance.now();
    const [first, last] = this._range();
    const visible = this._shown.slice(first, last);
    const isOld = visible.some(row => OPEN.includes(row.state) && !this._fresh.has(row.uid));
    if (!isOld || now - this._refreshedAt < REFRESH_MS) return;
    this._refreshedAt = now;
    const above = this._shown[first - 1];
    try {
      const query = this._query({
        limit: String(Math.min(PAGE, Math.max(visible.length, 1))),
        ...(above ? { before: above.uid } : {}),
      });
      const page = await call(query.replace(/&state=[^&]*/, ""));
      this.requests.take(page.requests);
      this._select();
    } catch {
      /* the pictures say what is wrong */
    }
  }

  _range() {
    const first = Math.max(0, Math.floor(this._view.scrollTop / ROW) - SPARE);
    return [first, Math.min(this._shown.length, first + Math.ceil(this._view.clientHeight / ROW) + 2 * SPARE)];
  }

  _drawNow() {
    const [first, last] = this._range();
    const height = `${this._shown.length * ROW}px`;
    if (this._space.style.height !== height) this._space.style.height = height;
    this._view.setAttribute("aria-rowcount", String(this._shown.length + 1));
    while (this._pool.length < last - first) {
      const cells = COLUMNS.map(([, kind]) => el("span", { class: kind, role: "cell" }));
      const node = el("div.request", { role: "row" }, cells);
      this._pool.push({ node, cells });
      this._body.append(node);
    }
    this._pool.forEach(({ node, cells }, index) => {
      const place = first + ((((index - first) % this._pool.length) + this._pool.length) % this._pool.length); // a row keeps its node while it is visible
      const row = place < last ? this._shown[place] : null;
      node.hidden = !row;
      if (!row) return;
      node.style.transform = `translateY(${place * ROW}px)`;
      node.setAttribute("aria-rowindex", String(place + 2));
      COLUMNS.forEach(([, , show], column) => show(row, cells[column], this._nowMs || Date.now()));
    });
    const isAtEnd = last >= this._shown.length - PAGE / 4;
    const wants = isAtEnd && this._next && !this._loading && this.requests.size < MOST;
    this._more.hidden = !(wants && this._pages >= MOST_PAGES);
    if (wants && this._pages < MOST_PAGES) this._load();
  }
}

// Cells keep their nodes: only texts change, which is what a browser does fastest.

function words(cell, text) {
  const node = cell.firstChild ?? cell.appendChild(document.createTextNode(""));
  if (node.data !== text) node.data = text;
}

function link(cell, uid) {
  const node = cell.firstChild ?? cell.appendChild(el("a.mono"));
  if (node.textContent === uid) return;
  words(node, uid);
  node.href = pageOf(uid);
}

function badge(cell, row) {
  const node = cell.firstChild ?? cell.appendChild(el("span"));
  const kind = `badge ${BADGES[row.state] ?? ""}`;
  if (node.className !== kind) node.className = kind;
  words(node, `${row.state}${row.reason ? ` ${row.reason}` : ""}`);
}
