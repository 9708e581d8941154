// Two answers side by side: a request and one that computes it again. It follows the new one as it comes.

import { pageOf } from "../api.js";
import { el, fill, table } from "../dom.js";
import { count } from "../format.js";
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
      const whole = timeline.textAt(timeline.tokens.length);
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
          [row("recorded", found.one), row("now", found.other)],
          { aria: { label: "The first difference" } },
        ),
    );
  }
}

function verdict(recorded, again, found) {
  if (found) {
    return [false, `The first difference is at token ${count(found.n)}: ${named(found.one)}, now ${named(found.other)}.`];
  }
  const [done, all] = [again.tokens.length, recorded.tokens.length];
  const made = `${count(done)} of ${count(all)} tokens`;
  if (!again.isOver) return [false, `${done ? "The same so far" : "Waiting for the first token"}: ${made}.`];
  if (again.state !== "finished")
    return [false, `It ended as ${again.state} after ${made}${again.error ? `: ${again.error.message}` : "."}`];
  if (done < all || !recorded.isOver) return [false, `The same so far: ${made}.`];
  if (recorded.state === "finished" && recorded.finish_reason !== again.finish_reason) {
    return [
      false,
      `All ${count(done)} tokens are the same. The recorded answer ended with ${recorded.finish_reason}, this one with ${again.finish_reason}.`,
    ];
  }
  return [true, `Identical: all ${count(all)} tokens are the same.`];
}

// What a token is called: its text, or its id if it has none that can be shown.
function named(token) {
  if (token === null) return "the end";
  const text = token.text || token.score?.text;
  return text ? `“${visible(text)}”` : `token id ${token.token}`;
}

function row(says, token) {
  const cells =
    token === null
      ? ["none", "the answer has ended", "", ""]
      : [
          String(token.token),
          visible(token.text || token.score?.text || ""),
          token.score ? token.score.logprob.toFixed(4) : "not asked for",
          token.who,
        ];
  return el(
    "tr",
    el("th", { scope: "row" }, says),
    cells.map(cell => el("td.mono", cell)),
  );
}

// Return the first difference of two answers: {n, one, other}, the tokens there, null where an answer has ended; null: they
// agree as far as both have got.
function difference(recorded, again) {
  const [one, other] = [recorded.tokens, again.tokens];
  const shared = Math.min(one.length, other.length);
  const differs = (token, at) => at < shared && token.token !== other[at].token && !token.missing && !other[at].missing;
  const hasEnded = (one.length > shared && again.isOver) || (other.length > shared && recorded.isOver);
  const at = one.findIndex(differs);
  if (at < 0 && !hasEnded) return null;
  const n = at < 0 ? shared : at;
  return { n: n + 1, one: one[n] ?? null, other: other[n] ?? null };
}
