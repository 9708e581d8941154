// What a request is as a whole: its title, its figures, its moments as a table, its siblings, and what was asked.

import { pageOf } from "../api.js";
import { el, fill, say, table } from "../dom.js";
import { clock, count, duration } from "../format.js";

const BADGES = { finished: "ok", failed: "bad", cancelled: "warn", running: "info" };
const FIGURES = [
  "Prompt",
  "Output",
  "First token",
  "Tokens/s",
  "Usual pause",
  "Longest pause",
  "Client's longest",
  "Preempted",
  "Taken over",
  "Took",
];
const SHOWN_ALREADY = new Set(
  "at_ms id what who n first_n count last_id last_at_ms longest_pause_ms longest_client_pause_ms".split(" "),
);

export class About {
  constructor(timeline, { onToken }) {
    this._timeline = timeline;
    this._onToken = onToken;
    this._moments = 0;
    this._state = el("span.badge");
    this._where = el("p.dim");
    this.title = el("div.stack", el("h1.row", "Request ", el("span.mono.uid", timeline.uid), this._state), this._where);
    this.error = el("p.notice.bad", { role: "alert", hidden: true });
    this._longest = 0;
    this._goLongest = el("button", { type: "button", class: "link", click: () => onToken(this._longest) });
    this._values = new Map(FIGURES.map(name => [name, el("dd.number", "-")]));
    this.facts = el(
      "dl.figures",
      [...this._values].map(([name, node]) => el("div", el("dt", name), node)),
    );
    const numbers = name => el("th.number", { scope: "col" }, name);
    this._rows = el("tbody");
    this._rowsBy = [];
    this.moments = el(
      "section.card.scroll",
      el("h2", "Moments"),
      table([numbers("time"), "what", "who", numbers("tokens"), "details"], this._rows, { id: "moments" }),
    );
    this.siblings = el("nav.card", { hidden: true, aria: { label: "Siblings" } });
    this._asked = el("div.stack");
    this.asked = el("details.card", el("summary", "What was asked"), this._asked);
    this._hasAsked = false;
  }

  show(nowMs) {
    const timeline = this._timeline;
    this._state.textContent =
      timeline.state === "finished" && timeline.end.reason ? `finished: ${timeline.end.reason}` : timeline.state;
    this._state.className = `badge ${BADGES[timeline.state] ?? "warn"}`;
    if (timeline.end?.kind === "failed") {
      this.error.hidden = false;
      this.error.textContent = `${timeline.end.status} ${timeline.end.code}: ${timeline.end.message}`;
    }
    this._showFacts(nowMs);
    this._showMoments();
    if (timeline.submitted && !this._hasAsked) this._showAsked(timeline.submitted);
  }

  _showFacts(nowMs) {
    const timeline = this._timeline;
    const [first, last] = [timeline.tokens[0], timeline.tokens.at(-1)];
    const rate =
      timeline.tokens.length > 1 && last.ms > first.ms
        ? ((timeline.tokens.length - 1) * 1000) / (last.ms - first.ms)
        : null;
    const longest = timeline.tokens
      .slice(1)
      .reduce((most, token) => (token.pauseMs > (most?.pauseMs ?? 0) ? token : most), null);
    const counted = kind => timeline.marks.filter(mark => mark.kind === kind).length;
    const cached = timeline.cachedTokens ? `, ${count(timeline.cachedTokens)} cached` : "";
    this._longest = longest?.n ?? 0;
    if (longest && !this._goLongest.isConnected) fill(this._values.get("Longest pause"), this._goLongest);
    say(this._goLongest, longest ? duration(longest.pauseMs) : "");
    this._goLongest.title = `Move to token ${this._longest}`;
    for (const [name, value] of [
      ["Prompt", timeline.promptTokens === null ? "-" : `${count(timeline.promptTokens)}${cached}`],
      ["Output", `${count(timeline.tokens.length)} tokens`],
      ["First token", first ? duration(first.ms - timeline.beganMs) : "-"],
      ["Tokens/s", rate === null ? "-" : rate.toPrecision(3)],
      ["Usual pause", timeline.tokens.length > 1 ? usual(timeline.usualPauseMs) : "-"],
      ["Client's longest", timeline.tokens.length > 1 ? duration(timeline.longestClientPauseMs) : "-"],
      ["Preempted", String(counted("preempted") || "never")],
      ["Taken over", String(counted("taken_over") || "never")],
      [
        "Took",
        `${duration((timeline.isOver ? timeline.lastMs : nowMs) - timeline.beganMs)}${timeline.isOver ? "" : " so far"}`,
      ],
    ])
      say(this._values.get(name), value);
    const { submitted } = timeline;
    const begun = new Date(timeline.beganMs);
    this._where.textContent = submitted
      ? `${submitted.endpoint}, model ${submitted.model || "default"}, ${begun.toLocaleDateString("en-GB")} ${clock(timeline.beganMs)}`
      : "";
  }

  _showMoments() {
    const { moments } = this._timeline;
    for (let index = Math.max(this._moments - 1, 0); index < moments.length; index += 1) {
      this._rowsBy[index] ??= new MomentRow(this._rows, this._onToken);
      this._rowsBy[index].show(moments[index]);
    }
    this._moments = moments.length;
  }

  _showAsked(submitted) {
    this._hasAsked = true;
    const base = this._timeline.uid.split(".")[0];
    if (submitted.siblings > 1) {
      this.siblings.hidden = false;
      fill(
        this.siblings,
        el("h2", `${submitted.siblings} siblings of one body`),
        el(
          "ul.chips",
          Array.from({ length: submitted.siblings }, (_, index) => {
            const uid = `${base}.${index}`;
            return el(
              "li",
              el(
                "a.mono",
                { href: pageOf(uid), aria: { current: uid === this._timeline.uid ? "page" : null } },
                `.${index}`,
              ),
            );
          }),
        ),
      );
    }
    const said = Object.entries(submitted.sampling).filter(
      ([, value]) => value !== null && !(Array.isArray(value) && !value.length),
    );
    const labels = Object.entries(submitted.labels ?? {});
    fill(
      this._asked,
      prompted(submitted),
      facts("Sampling", said),
      labels.length > 0 && facts("Labels", labels),
      submitted.constraint && facts("The answer must be", [[submitted.constraint.kind, submitted.constraint.text]]),
    );
  }
}

// A moment as a row. The row of tokens that still come changes its texts and stays the same node.
class MomentRow {
  constructor(table, onToken) {
    this._first = 0;
    this._go = el("button", { type: "button", class: "link", title: "Move there", click: () => onToken(this._first) });
    this._cells = ["number", "", "", "number", "details"].map(kind => el("td", { class: kind }));
    this._row = el("tr", this._cells);
    table.append(this._row);
  }

  show(moment) {
    this._first = moment.first_n ?? moment.n;
    const details = Object.entries(moment)
      .filter(([name, value]) => !SHOWN_ALREADY.has(name) && typeof value !== "object") // none that holds others
      .map(([name, value]) => `${name}=${plain(value)}`);
    if (moment.what === "tokens" && moment.last_id !== moment.id) {
      const [longest, client] = [moment.longest_pause_ms, moment.longest_client_pause_ms].map(duration);
      const seen = client === longest ? "" : ` (for the client ${client})`;
      details.unshift(`until ${duration(moment.last_at_ms)}, longest pause ${longest}${seen}`);
    }
    const [at, what, who, tokens, more] = this._cells;
    say(at, moment.at_ms ? duration(moment.at_ms) : "0");
    say(what, moment.what.replace("_", " "));
    say(who, moment.who);
    const numbers = this._first === moment.n ? String(moment.n) : `${this._first} to ${moment.n}`;
    if (moment.n > 0 && !this._go.isConnected) fill(tokens, this._go);
    say(moment.n > 0 ? this._go : tokens, numbers);
    say(more, details.join("  "));
    this._row.dataset.moment = JSON.stringify(moment, (_, value) =>
      typeof value === "bigint" ? String(value) : value,
    );
  }
}

// The clock counts milliseconds.
function usual(ms) {
  return ms ? duration(ms) : "under 1 ms";
}

function prompted(submitted) {
  if (submitted.messages?.length) {
    return el(
      "div.stack",
      submitted.messages.map(message =>
        el("div.message", el("h3", String(message.role ?? "")), el("div.answer", plain(message.content ?? message))),
      ),
    );
  }
  if (submitted.prompt_ids?.length) return el("div.answer.mono", submitted.prompt_ids.join(" "));
  return el("div.answer", submitted.prompt ?? "");
}

function facts(name, entries) {
  return el(
    "div",
    el("h3", name),
    el(
      "dl.facts",
      entries.flatMap(([key, value]) => [el("dt", key), el("dd.mono", plain(value))]),
    ),
  );
}

function plain(value) {
  return typeof value === "string"
    ? value
    : JSON.stringify(value, (_, each) => (typeof each === "bigint" ? String(each) : each));
}
