// The tokens of an answer, each coloured by its probability. A tip tells its log-probability and the alternatives: under
// the pointer, or for the keyboard with the arrow keys.

import { el, fill } from "../dom.js";
import { percent } from "../format.js";

const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1]; // from this probability on: .p0, .p1 ..; below all: .p5
const tip = el("div.tip.tokens-tip", { role: "status", hidden: true });

export function tokenView(tokens) {
  const pieces = tokens.map((token, at) =>
    el("span", { class: `token p${level(token.logprob)}`, data: { at } }, visible(token.text)),
  );
  const element = el(
    "div.tokens",
    { tabindex: 0, role: "group", "aria-label": `${tokens.length} tokens. The arrow keys move from one to the next.` },
    pieces,
  );
  let current = -1;

  function show(at) {
    pieces[current]?.classList.remove("current");
    current = at;
    if (at < 0) {
      tip.hidden = true;
      return;
    }
    pieces[at].classList.add("current");
    fill(tip, about(tokens[at]));
    if (!tip.isConnected) document.body.append(tip);
    tip.hidden = false;
    place(pieces[at]);
  }
  const under = event => Number(event.target.closest?.(".token")?.dataset.at ?? -1);
  element.addEventListener("pointerover", event => show(under(event)));
  element.addEventListener("pointerleave", () => show(-1));
  element.addEventListener("blur", () => show(-1));
  element.addEventListener("focus", () => {
    if (current < 0 && element.matches(":focus-visible")) show(0);
  });
  element.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (step === undefined || !pieces.length) return;
    event.preventDefault();
    show(Math.min(pieces.length - 1, Math.max(0, current + step)));
    pieces[current].scrollIntoView({ block: "nearest" });
  });
  return element;
}

const level = logprob =>
  logprob === null
    ? 5
    : (LEVELS.findIndex(least => Math.exp(logprob) >= least) + LEVELS.length + 1) % (LEVELS.length + 1);
const visible = text => text.replaceAll("\n", "↵\n") || "∅";
const quoted = text => JSON.stringify(text);
const share = logprob => (logprob === null ? "" : logprob > Math.log(1e-4) ? percent(Math.exp(logprob)) : "< 0.01 %");

function about(token) {
  const others = token.top.length ? token.top : [token];
  const chosen = others.some(other => other.text === token.text) ? others : [token, ...others];
  return [
    el(
      "div.row",
      el("strong.mono", quoted(token.text)),
      el("span.dim.number", `log-probability ${token.logprob?.toFixed(4) ?? "unknown"}`),
    ),
    el(
      "table",
      el(
        "tbody",
        chosen.map(({ text, logprob }) => {
          const bar = el("span.share");
          bar.style.width = `${Math.max(1, 100 * Math.exp(logprob))}%`;
          return el(
            "tr",
            { class: text === token.text ? "chosen" : null },
            el("td.mono", quoted(text)),
            el("td.number", share(logprob)),
            el("td.shares", bar),
          );
        }),
      ),
    ),
  ];
}

function place(piece) {
  const at = piece.getClientRects()[0] ?? piece.getBoundingClientRect(),
    { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${at.bottom + height + 8 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
}
addEventListener(
  "scroll",
  () => {
    tip.hidden = true;
  },
  { capture: true, passive: true },
);
