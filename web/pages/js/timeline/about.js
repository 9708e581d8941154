// What a request is as a whole: its title, its figures, its moments as a table, its siblings, and what was asked.

import { pageOf } from "../api.js";
import { el, figures, fill, say, table } from "../dom.js";
import { BADGES, clock, count, duration } from "../format.js";

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
    this._open = el("a.button", { hidden: true, href: `/?response=resp_${timeline.uid}` }, "Open in the playground");
    const name = el("h1.row", "Request ", el("span.mono.uid", timeline.uid), this._state);
    this.title = el("div.stack", name, this._where, el("p", this._open));
    this.error = el("p.notice.bad", { role: "alert", hidden: true });
    this._longest = 0;
    this._goLongest = el("button", { type: "button", class: "link", click: () => onToken(this._longest) });
    this._figures = figures("dl.figures");
    this.facts = this._figures.node;
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
      timeline.state === "finished" && timeline.finish_reason ? `finished: ${timeline.finish_reason}` : timeline.state;
    this._state.className = `badge ${BADGES[timeline.state] ?? "warn"}`;
    const { error } = timeline;
    this.error.hidden = !error;
    say(this.error, error ? `${error.status} ${error.code}: ${error.message}` : "");
    this._showFacts(nowMs);
    this._showMoments();
    if (timeline.asked && !this._hasAsked) this._showAsked(timeline.asked);
  }

  _showFacts(nowMs) {
    const timeline = this._timeline;
    const [first, last] = [timeline.tokens[0], timeline.tokens.at(-1)];
    const rate =
      timeline.tokens.length > 1 && last.client_at_ms > first.client_at_ms
        ? ((timeline.tokens.length - 1) * 1000) / (last.client_at_ms - first.client_at_ms)
        : null;
    const later = timeline.tokens.slice(1);
    const longest = later.reduce((most, token) => (token.pause_ms > (most?.pause_ms ?? 0) ? token : most), null);
    const clientMs = later.reduce((most, token) => Math.max(most, token.client_pause_ms), 0);
    const counted = kind => timeline.marks.filter(({ what }) => what === kind).length;
    const cached = timeline.cachedTokens ? `, ${count(timeline.cachedTokens)} cached` : "";
    const drafted = timeline.tokens.filter(token => token.drafted).length;
    this._longest = longest?.n ?? 0;
    say(this._goLongest, longest ? duration(longest.pause_ms) : "");
    this._goLongest.title = `Move to token ${this._longest}`;
    this._figures.show([
      ["Prompt", timeline.prompt_tokens === null ? "-" : `${count(timeline.prompt_tokens)}${cached}`],
      ["Output", `${count(timeline.tokens.length)} tokens${drafted ? `, ${count(drafted)} drafted` : ""}`],
      ["First token", first ? duration(first.client_at_ms) : "-"],
      ["Tokens/s", rate === null ? "-" : rate < 100 ? rate.toPrecision(3) : count(Math.round(rate))],
      ["Usual pause", timeline.tokens.length > 1 ? usual(timeline.usualPauseMs) : "-"],
      ["Longest pause", longest ? this._goLongest : "-"],
      ["Client's longest", timeline.tokens.length > 1 ? duration(clientMs) : "-"],
      ["Preempted", String(counted("preempted") || "never")],
      ["Taken over", String(counted("taken_over") || "never")],
      ["Took", timeline.isOver ? duration(timeline.lastMs) : `${duration(nowMs)} so far`],
    ]);
    const begun = new Date(timeline.submitted_ms);
    this._where.textContent = timeline.endpoint
      ? `${timeline.endpoint}, model ${timeline.model || "default"}, ${begun.toLocaleDateString("en-GB")} ${clock(begun)}`
      : "";
    this._open.hidden = timeline.endpoint !== "/v1/responses" || !timeline.labels.store;
  }

  _showMoments() {
    const { moments } = this._timeline;
    for (let index = Math.max(this._moments - 1, 0); index < moments.length; index += 1) {
      this._rowsBy[index] ??= new MomentRow(this._rows, this._onToken);
      this._rowsBy[index].show(moments[index]);
    }
    this._moments = moments.length;
  }

  _showAsked(asked) {
    this._hasAsked = true;
    const base = this._timeline.uid.split(".")[0];
    if (asked.siblings > 1) {
      this.siblings.hidden = false;
      fill(
        this.siblings,
        el("h2", `${asked.siblings} siblings of one body`),
        el(
          "ul.chips",
          Array.from({ length: asked.siblings }, (_, index) => {
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
    const labels = Object.entries(this._timeline.labels);
    fill(
      this._asked,
      prompted(asked.body ? JSON.parse(asked.body) : asked),
      facts("Sampling", Object.entries(asked.sampling)),
      labels.length > 0 && facts("Labels", labels),
      asked.constraint && facts("The answer must be", [[asked.constraint.kind, asked.constraint.text]]),
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
    this._row.dataset.moment = JSON.stringify(moment);
  }
}

// The clock counts milliseconds.
function usual(ms) {
  return ms ? duration(ms) : "under 1 ms";
}

function prompted({ messages, prompt, prompt_ids: ids, input_ids: inputs, text }) {
  if (messages) {
    return el(
      "div.stack",
      messages.map(message =>
        el("div.message", el("h3", String(message.role ?? "")), el("div.answer", plain(message.content ?? message))),
      ),
    );
  }
  const asked = ids ?? inputs ?? prompt ?? text ?? "";
  return el("div.answer", { class: Array.isArray(asked) && "mono" }, Array.isArray(asked) ? asked.join(" ") : asked);
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

const plain = value => (typeof value === "string" ? value : JSON.stringify(value));
