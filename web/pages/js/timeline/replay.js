// Two answers side by side: a request and one that computes it again. It follows the new one as it comes.

import { pageOf } from "../api.js";
import { el, fill, table } from "../dom.js";
import { count } from "../format.js";
import { difference } from "./model.js";
import { short, visible } from "./state.js";

export class Comparison {
  constructor(recorded, again) {
    [this._recorded, this._again] = [recorded, again];
    this._verdict = el("p.notice", { role: "status" });
    this._texts = [el("div.answer"), el("div.answer")];
    this._table = el("div");
    const side = (says, timeline, text) =>
      el(
        "div.stack",
        el(
          "h3",
          says,
          " ",
          el("a.mono.small", { href: pageOf(timeline.uid), title: timeline.uid }, short(timeline.uid)),
        ),
        text,
      );
    this.node = el(
      "section.card.stack.comparison",
      { aria: { label: "Replay" } },
      el("h2", "Replay"),
      this._verdict,
      el("div.sides", side("Recorded", recorded, this._texts[0]), side("Now", again, this._texts[1])),
      this._table,
    );
  }

  show() {
    const found = difference(this._recorded, this._again);
    const both = [this._recorded, this._again];
    const [isSame, says] = verdict(this._recorded, this._again, found);
    this._verdict.textContent = says;
    this._verdict.className = `notice ${found ? "bad" : isSame ? "ok" : ""}`;
    both.forEach((timeline, index) => {
      const whole = timeline.textAt(timeline.n);
      if (!found) return fill(this._texts[index], whole);
      const [from, to] = [timeline.textAt(found.n - 1).length, timeline.textAt(found.n).length];
      return fill(
        this._texts[index],
        whole.slice(0, from),
        el("mark.differs", whole.slice(from, to)),
        el("span.dim", whole.slice(to)),
      );
    });
    fill(
      this._table,
      found &&
        table(
          ["", "token", "text", "log-probability", "engine"],
          [row("recorded", found.one, this._recorded), row("now", found.other, this._again)],
          { aria: { label: "The first difference" } },
        ),
    );
  }
}

function verdict(recorded, again, found) {
  if (found) {
    const texts = [
      [found.one, recorded],
      [found.other, again],
    ].map(([token, timeline]) => named(token, timeline));
    return [false, `The first difference is at token ${count(found.n)}: ${texts.join(", now ")}.`];
  }
  const made = `${count(again.n)} of ${count(recorded.n)} tokens`;
  if (!again.isOver) return [false, `${again.n ? "The same so far" : "Waiting for the first token"}: ${made}.`];
  if (again.state !== "finished")
    return [false, `It ended as ${again.state} after ${made}${again.end.message ? `: ${again.end.message}` : "."}`];
  if (again.n < recorded.n || !recorded.isOver) return [false, `The same so far: ${made}.`];
  if (recorded.state === "finished" && recorded.end.reason !== again.end.reason) {
    return [
      false,
      `All ${count(again.n)} tokens are the same. The recorded answer ended with ${recorded.end.reason}, this one with ${again.end.reason}.`,
    ];
  }
  return [true, `Identical: all ${count(recorded.n)} tokens are the same.`];
}

// What a token is called: its text, or its id if it has none that can be shown.
function named(token, timeline) {
  if (token === null) return "the end";
  const text = timeline.at(token.n).added || token.score?.text;
  return text ? `“${visible(text)}”` : `token id ${token.token}`;
}

function row(says, token, timeline) {
  const cells =
    token === null
      ? ["none", "the answer has ended", "", ""]
      : [
          String(token.token),
          visible(timeline.at(token.n).added || token.score?.text || ""),
          token.score ? token.score.logprob.toFixed(4) : "not asked for",
          `${token.engine} epoch ${token.epoch}`,
        ];
  return el(
    "tr",
    el("th", { scope: "row" }, says),
    cells.map(cell => el("td.mono", cell)),
  );
}
