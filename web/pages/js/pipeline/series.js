// Figures of the engines over the last minutes, as lines on a canvas. The last values are text beside the names.

import { nice, onLook, prepared } from "../canvas.js";
import { el, everyFrame, tabs } from "../dom.js";
import { count, known, percent, short } from "../format.js";
import { SERIES_MS } from "./model.js";

const HIGH = 150,
  BOTTOM = 18;
const COLOURS = 6; // classes series-1 .. in pipeline.css
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]]; // lines differ not by their colour alone
const WHAT = [
  { name: "Tokens/s", figure: "output_tokens_per_s", says: short },
  { name: "Prompt tokens/s", figure: "prompt_tokens_per_s", says: short },
  { name: "Running", figure: "running", says: count },
  { name: "Waiting", figure: "waiting", says: count },
  { name: "Pages used", figure: "cache_used", says: percent },
  { name: "Cache hits", figure: "prefix_hits", says: percent },
];

export class SeriesChart {
  constructor() {
    this._what = WHAT[0];
    this._pipeline = null;
    this._at = null; // x of the pointer
    this._canvas = el("canvas", { role: "img", aria: { label: "No figures yet" } });
    this._plot = el("div.plot", this._canvas);
    this._ink = el("span.ink");
    this._legend = el("ul.kinds.small");
    this._swatches = new Map();
    const choose = at => {
      this._what = WHAT[at];
      this._draw();
    };
    this.node = el(
      "section.card.stack.series",
      { aria: { label: "Since you opened this page" } },
      el(
        "div.row",
        el("h2", "Since you opened this page"),
        el("span.grow"),
        tabs(
          "Figure",
          WHAT.map(what => what.name),
          choose,
        ),
      ),
      this._plot,
      this._legend,
      this._ink,
    );
    this._draw = everyFrame(() => this._drawNow());
    onLook(this._plot, this._draw);
    this._plot.addEventListener("pointermove", event => {
      this._at = event.clientX - this._plot.getBoundingClientRect().left;
      this._draw();
    });
    this._plot.addEventListener("pointerleave", () => {
      this._at = null;
      this._draw();
    });
  }

  show(pipeline) {
    this._pipeline = pipeline;
    this._draw();
  }

  _drawNow() {
    const series = this._pipeline?.series;
    const width = this._plot.clientWidth;
    if (!series || !width) return;
    const pen = prepared(this._canvas, width, HIGH);
    const nowMs = this._pipeline.picture.at_ms;
    const values = [...series.values()].map(each => each[this._what.figure]);
    const most = niceTop(
      values.reduce((top, each) => each.reduce((so, value) => Math.max(so, value ?? 0), top), 0),
      this._what.says === percent,
    );
    this._drawGrid(pen, width, most);
    const x = ms => width - ((nowMs - ms) / SERIES_MS) * width;
    const y = value => HIGH - BOTTOM - (value / most) * (HIGH - BOTTOM - 12);
    const said = [];
    let index = 0;
    for (const [engine, each] of series) {
      const swatch = this._swatch(engine, index);
      pen.strokeStyle = getComputedStyle(swatch.firstChild).backgroundColor;
      pen.lineWidth = 2;
      pen.setLineDash(DASHES[Math.floor(index / COLOURS) % DASHES.length]);
      line(pen, each.times, each[this._what.figure], x, y);
      const place =
        this._at === null
          ? each.times.length - 1
          : nearest(each.times, nowMs - ((width - this._at) / width) * SERIES_MS);
      const value = each[this._what.figure][place];
      said.push(`${engine} ${known(value, this._what.says)}`);
      swatch.lastChild.textContent = said.at(-1);
      index += 1;
    }
    if (this._at !== null) {
      pen.setLineDash([]);
      pen.strokeStyle = pen.fillStyle;
      pen.lineWidth = 1;
      pen.strokeRect(this._at, 0, 0, HIGH - BOTTOM);
    }
    for (const [engine, swatch] of this._swatches)
      if (!series.has(engine)) {
        swatch.remove();
        this._swatches.delete(engine);
      }
    this._canvas.setAttribute(
      "aria-label",
      `${this._what.name} over the last 5 minutes. Now: ${said.join(", ") || "no engine"}`,
    );
  }

  _swatch(engine, index) {
    if (!this._swatches.has(engine)) {
      const item = el("li.kind.number", el("span.swatch"), el("span"));
      this._swatches.set(engine, item);
      this._legend.append(item);
    }
    const item = this._swatches.get(engine);
    item.firstChild.className = `swatch line-${(index % COLOURS) + 1}`;
    return item;
  }

  _drawGrid(pen, width, most) {
    pen.fillStyle = pen.strokeStyle = getComputedStyle(this._ink).color;
    pen.lineWidth = 1;
    pen.globalAlpha = 0.25;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(HIGH - BOTTOM - share * (HIGH - BOTTOM - 12)) + 0.5;
      pen.strokeRect(0, y, width, 0);
    }
    pen.globalAlpha = 1;
    pen.fillText(this._what.says(most), 0, 10);
    for (const minute of [1, 2, 3, 4])
      pen.fillText(`-${minute} min`, width - ((minute * 60_000) / SERIES_MS) * width - 16, HIGH - 4);
    pen.fillText("now", width - 24, HIGH - 4);
  }
}

function line(pen, times, values, x, y) {
  pen.beginPath();
  let isOpen = false;
  values.forEach((value, index) => {
    if (value === null || (index && times[index] - times[index - 1] > 5000)) isOpen = false;
    if (value === null) return;
    if (isOpen) pen.lineTo(x(times[index]), y(value));
    else pen.moveTo(x(times[index]), y(value));
    isOpen = true;
  });
  pen.stroke();
}

function nearest(times, ms) {
  let best = 0;
  times.forEach((each, index) => {
    if (Math.abs(each - ms) < Math.abs(times[best] - ms)) best = index;
  });
  return best;
}

function niceTop(most, isShare) {
  if (isShare) return most > 0.5 ? 1 : most > 0.1 ? 0.5 : 0.1;
  return nice(Math.max(most, 1));
}
