// The cursor of the timeline as a slider, with buttons: a step, the ends, and playing at the speed of the request.

import { button, el, fill, icon, ticked } from "../dom.js";
import { pauseOf } from "./model.js";

const LONGEST_WAIT_MS = 2000; // while it plays

export class Slider {
  constructor({ onMove }) {
    this._onMove = onMove;
    this._n = 0;
    this._timeline = null;
    this._playing = 0;
    this._range = el("input", {
      type: "range",
      id: "token",
      min: 0,
      max: 0,
      step: 1,
      value: 0,
      input: () => {
        this._stop();
        onMove(Number(this._range.value));
      },
    });
    this._label = el("output.number.small", { for: "token" });
    const go = (label, drawing, where) =>
      button(label, {
        icon: drawing,
        text: false,
        class: "tiny",
        click: () => {
          this._stop();
          onMove(where());
        },
      });
    this._play = button("Play", { icon: "play", text: false, class: "tiny", click: () => this._toggle() });
    this.node = el(
      "div.slider",
      el("label.hidden-text", { for: "token" }, "Token"),
      el(
        "div.row",
        go("Token before", "left", () => this._n - 1),
        this._play,
        go("Next token", "right", () => this._n + 1),
      ),
      this._range,
      this._label,
      el("p.dim.small.hint", ticked("`←` `→` move by a token, with `Shift` by ten, `+` `-` `0` zoom", "kbd")),
    );
  }

  show(timeline, state) {
    this._timeline = timeline;
    this._n = state.n;
    this._range.max = timeline.tokens.length;
    this._range.value = state.n;
    const { token } = state;
    this._label.textContent = `token ${state.n} of ${timeline.tokens.length}`;
    this._range.setAttribute(
      "aria-valuetext",
      token
        ? `token ${state.n} of ${timeline.tokens.length}, “${state.added}”, ${pauseOf(token)}`
        : "before the first token",
    );
  }

  _toggle() {
    if (this._playing) return this._stop();
    if (this._n >= this._timeline.tokens.length) this._onMove(0);
    return this._next();
  }

  _next() {
    const token = this._timeline.tokens[this._n];
    if (!token) return this._stop();
    this._setIcon("pause", "Pause");
    this._playing = setTimeout(
      () => {
        this._onMove(this._n + 1);
        this._next();
      },
      Math.min(token.n > 1 ? token.pause_ms : 0, LONGEST_WAIT_MS),
    );
    return undefined;
  }

  _stop() {
    clearTimeout(this._playing);
    this._playing = 0;
    this._setIcon("play", "Play");
  }

  _setIcon(name, label) {
    if (this._play.getAttribute("aria-label") === label) return;
    fill(this._play, icon(name));
    this._play.title = label;
    this._play.setAttribute("aria-label", label);
  }
}
