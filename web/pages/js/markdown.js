// Markdown of a model as elements. marked only takes the text apart; the elements are made here, one by one, from a list
// of kinds. No HTML is ever parsed: tags of a model appear as the text that they are. Links lead only to http, https and
// mailto, and pictures are links too, because loading one would tell its server that somebody reads.
//
//   const view = markdown();  view.element;  view.show(text, whole)
//        shows a text that grows: blocks that stay the same stay in place. Until the text is *whole*, only its end is
//        read again, so that a long answer costs no more with each token; links that are defined elsewhere in it appear
//        at last.

import { button, copy, el } from "./dom.js";
import { Lexer } from "../vendor/marked-18.2.1.js";

const SAFE = /^(https?:|mailto:)/i;
const MOST_DEPTH = 40; // of lists in quotes in lists: deeper ones are shown as text
const REREAD = 4; // tokens at the end that more text may change: the last block, one before it, and the lines between
const OPTIONS = { gfm: true, breaks: true };

export function markdown() {
  const element = el("div.markdown");
  let blocks = []; // [source, element] of each block
  let before = "",
    known = []; // the text that was shown, and all its tokens
  function read(text, whole) {
    const kept = whole || before === null || !text.startsWith(before) ? [] : known.slice(0, -REREAD);
    const from = kept.reduce((sum, token) => sum + token.raw.length, 0);
    known = kept.length ? [...kept, ...parts(text.slice(from))] : parts(text);
    const length = known.reduce((sum, token) => sum + token.raw.length, 0);
    before = length === text.length ? text : null; // a carriage return is in no token
    return known.filter(token => token.type !== "space" && token.type !== "def");
  }
  return {
    element,
    show(text, whole = true) {
      if (text === before && !whole) return;
      const tokens = read(text, whole);
      const defined = whole && known.some(token => token.type === "def"); // the blocks before it knew no such link
      const keep = defined ? 0 : tokens.findIndex((token, at) => blocks[at]?.[0] !== token.raw);
      const from = keep < 0 ? tokens.length : keep;
      for (const [, old] of blocks.slice(from)) old.remove();
      blocks = blocks.slice(0, from);
      for (const token of tokens.slice(from)) {
        const made = block(token, 0);
        const node = made instanceof Element ? made : el("p", made);
        element.append(node);
        blocks.push([token.raw, node]);
      }
    },
  };
}

function parts(text) {
  try {
    return new Lexer(OPTIONS).lex(text);
  } catch {
    // marked gives up on some texts that nest very deeply
    return [{ type: "text", raw: text, text }];
  }
}

function block(token, depth) {
  if (depth > MOST_DEPTH) return token.raw;
  const inside = () => blocks(token.tokens, depth + 1);
  switch (token.type) {
    case "heading":
      return el(`h${Math.min(6, token.depth + 2)}`, inline(token.tokens, depth + 1));
    case "paragraph":
      return el("p", inline(token.tokens, depth + 1));
    case "blockquote":
      return el("blockquote", inside());
    case "code":
      return code(token);
    case "hr":
      return el("hr");
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "text":
      return token.tokens ? el("span", inline(token.tokens, depth + 1)) : el("span", token.text);
    case "checkbox":
      return el("span", token.checked ? "☑ " : "☐ ");
    case "space":
    case "def":
      return null;
    default:
      return el("p.source", token.raw); // html, and kinds that a later marked may have
  }
}

const blocks = (tokens, depth) => (tokens ?? []).map(token => block(token, depth)).filter(Boolean);

function list(token, depth) {
  const items = token.items.map(item => {
    const boxed = item.tokens?.some(
      inner => inner.type === "checkbox" || inner.tokens?.some(deep => deep.type === "checkbox"),
    );
    return el(
      "li",
      { class: item.task ? "task" : null },
      item.task && !boxed ? (item.checked ? "☑ " : "☐ ") : null,
      blocks(item.tokens, depth + 1),
    );
  });
  return token.ordered
    ? el("ol", { start: Number.isSafeInteger(token.start) ? token.start : 1 }, items)
    : el("ul", items);
}

function table(token, depth) {
  const cell = (tag, { tokens, align }) => el(tag, { class: align ? `to-${align}` : null }, inline(tokens, depth + 1));
  const head = el(
    "tr",
    token.header.map(each => cell("th", each)),
  );
  const rows = token.rows.map(row =>
    el(
      "tr",
      row.map(each => cell("td", each)),
    ),
  );
  return el(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "Table" },
    el("table.table", el("thead", head), el("tbody", rows)),
  );
}

function code(token) {
  const language = (token.lang ?? "").split(/\s/)[0];
  return codeBlock(token.text, language);
}

/** A block of source with a button that copies it. */
export function codeBlock(text, language = "") {
  return el(
    "figure.code",
    el("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, el("code", text)),
    button("Copy this code", { icon: "copy", text: false, class: "tiny", click: () => copy(text) }),
  );
}

function inline(tokens, depth) {
  if (depth > MOST_DEPTH) return (tokens ?? []).map(token => token.raw);
  return (tokens ?? []).flatMap(token => piece(token, depth + 1));
}

function piece(token, depth) {
  switch (token.type) {
    case "text":
      return token.tokens ? inline(token.tokens, depth) : [characters(token.text)];
    case "escape":
      return [token.text];
    case "strong":
      return [el("strong", inline(token.tokens, depth))];
    case "em":
      return [el("em", inline(token.tokens, depth))];
    case "del":
      return [el("del", inline(token.tokens, depth))];
    case "codespan":
      return [el("code", token.text)];
    case "br":
      return [el("br")];
    case "checkbox":
      return [token.checked ? "☑ " : "☐ "];
    case "link":
      return [link(token.href, inline(token.tokens, depth), token.raw)];
    case "image":
      return [link(token.href, [`picture: ${token.text || token.href}`], token.raw)];
    default:
      return [token.raw];
  }
}

function link(href, children, raw) {
  if (!SAFE.test(href)) return el("span", raw);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, children);
}

// Names of characters in Markdown, `&amp;` and `&#8211;`; the few that models write. Others stay as they are.
const NAMED = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  mdash: "—",
  ndash: "–",
  hellip: "…",
  times: "×",
  copy: "©",
  deg: "°",
};

function characters(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/gi, (whole, decimal, hexadecimal, name) => {
    if (name) return NAMED[name] ?? whole;
    const number = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return number > 0 && number <= 0x10ffff && !(number >= 0xd800 && number <= 0xdfff)
      ? String.fromCodePoint(number)
      : whole;
  });
}
