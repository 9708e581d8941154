// Dead letters: how many there are, and for the admin which, with a button that sends one again.

import { explain, pageOf } from "../api.js";
import { letters, requeueButton } from "../dead.js";
import { el, fill, table, toast } from "../dom.js";
import { count } from "../format.js";

export class DeadLetters {
  constructor() {
    this._number = -1;
    this._badge = el("span.badge.bad");
    this._body = el("div.scroll");
    this.node = el(
      "section.card.stack.dead",
      { hidden: true, aria: { label: "Dead letters" } },
      el("div.row", el("h2", "Dead letters"), this._badge),
      this._body,
    );
  }

  show(picture) {
    if (picture.num_dead === this._number) return;
    this._number = picture.num_dead;
    this.node.hidden = !this._number;
    this._badge.textContent = count(this._number);
    if (this._number) this._read();
  }

  async _read() {
    try {
      const found = await letters({ limit: 50 });
      if (!found) {
        fill(this._body, el("p.dim", "The admin key shows them, and sends them again."));
        return;
      }
      const row = letter =>
        el(
          "tr",
          { data: { letter: letter.id } },
          el(
            "td",
            letter.uid ? el("a.mono", { href: pageOf(letter.uid) }, letter.uid) : el("span.dim", "about no request"),
          ),
          el("td", letter.stage),
          el("td.number", letter.deaths ? count(letter.deaths) : ""),
          el("td", letter.error),
          el("td", new Date(letter.ms).toLocaleString("en-GB")),
          el("td", letter.uid && requeueButton(letter, uid => toast(`Sent again as ${uid}`), { class: "tiny" })),
        );
      const last = el("span.hidden-text", "what to do");
      fill(
        this._body,
        table(["request", "stage", "deaths", "error", "when", last], found.dead.map(row)),
        found.next && el("p.dim.small", "These are the newest 50. minisgl dead ls has all."),
      );
    } catch (error) {
      fill(this._body, el("p.dim", explain(error)));
    }
  }
}
