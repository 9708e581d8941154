// What owners have used since midnight UTC: the admin sees all owners, a key its own.

import { call } from "../api.js";
import { el, fill, table } from "../dom.js";
import { count } from "../format.js";

const REFRESH_MS = 10_000;
const MOST = 20;
const FIGURES = ["requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens"];

export class UsageToday {
  constructor() {
    this._askedAt = -REFRESH_MS;
    this._body = el("div.scroll", { role: "group", tabindex: "0", aria: { label: "Usage today, by owner" } });
    const head = el("div.row", el("h2", "Usage today"), el("span.dim.small", "since midnight UTC"));
    this.node = el("section.card.stack.usage", { hidden: true, aria: { label: "Usage today" } }, head, this._body);
  }

  // The page calls this for each picture, and there are none while it is hidden.
  async show() {
    const now = performance.now();
    if (now - this._askedAt < REFRESH_MS) return;
    this._askedAt = now;
    try {
      this._draw((await call("/v1/usage?days=1")).data);
    } catch {
      /* the pictures say what is wrong */
    }
  }

  _draw(data) {
    const sums = Object.create(null); // owner -> figures of all models
    for (const one of data)
      sums[one.owner] = FIGURES.map((name, at) => one[name] + (sums[one.owner]?.[at] ?? 0));
    const tokens = ([, figures]) => figures[2] + figures[4];
    const owners = Object.entries(sums).sort((one, other) => tokens(other) - tokens(one));
    const numbers = figures => figures.map(figure => el("td.number", count(figure)));
    const rows = owners.slice(0, MOST).map(([owner, figures]) => el("tr", el("td", shown(owner)), numbers(figures)));
    const heads = FIGURES.map(name => el("th.number", { scope: "col" }, name.replace("_tokens", "")));
    const rest = owners.length > MOST && el("p.dim.small", "These used the most tokens. GET /v1/usage has all.");
    fill(this._body, table(["owner", ...heads], rows), rest);
    this.node.hidden = !owners.length;
  }
}

// The owner of a key without a name is its hash.
const shown = owner => (/^[0-9a-f]{32}$/.test(owner) ? owner.slice(0, 8) : owner || el("span.dim", "none"));
