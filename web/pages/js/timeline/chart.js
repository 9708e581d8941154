// The chart of a request: a Gantt chart over time, and below it the pause before each token. It draws on canvases, so that
// thousands of tokens cost one path for each colour. What it shows is also in the table of moments, as text.
//
//   const chart = new Chart({onPick})   chart.node   chart.show(timeline, nowMs, steps)   chart.moveTo(n)   chart.zoom(factor)

import { nice, onLook, prepared } from "../canvas.js";
import { button, el, everyFrame, fill } from "../dom.js";
import { duration } from "../format.js";
import { barsOf, PAUSE_CLASSES, pauseClass, pauseOf } from "./model.js";

const LANE = 30,
  BAR = 16,
  AXIS = 22,
  TOP = 6,
  PAUSES = 60,
  DRAFTED = 4; // height of the marks above tokens that were drafted
const NARROW = 640; // below it the name of a lane is above its bars, not beside them
const KINDS = [
  ["tokenize", "queue and tokenizer"],
  ["wait", "waits"],
  ["prefill", "prefill"],
  ["chunk", "prefill step"],
  ["decode", "generates"],
  ["pause-0", `pause: ${PAUSE_CLASSES[0].says}`],
  ["pause-1", PAUSE_CLASSES[1].says],
  ["pause-2", PAUSE_CLASSES[2].says],
  ["pause-3", PAUSE_CLASSES[3].says],
  ["draft", "drafted, and right"],
  ["preempted", "preempted"],
  ["gone", "engine gone"],
  ["detokenize", "becomes text"],
];
const LANES = { way: "queue and waits", reply: "detokenize, reply" };

export class Chart {
  constructor({ onPick }) {
    this._onPick = onPick;
    this._timeline = null;
    this._bars = [];
    this._from = this._to = 0; // the time that is visible, in ms since the submit
    this._zoom = 1;
    this._n = 0;
    this._swatches = KINDS.map(([kind, says]) => [kind, el("li.kind", el("span", { class: ["swatch", kind] }), says)]);
    this._gantt = el("canvas", { role: "img", aria: { label: "Chart of the request over time" } });
    this._pauses = el("canvas", { role: "img", aria: { label: "Pause before each token" } });
    this._cursor = el("div.cursor", { aria: { hidden: "true" } });
    this._ganttBox = el("div.plot", this._gantt, this._cursor);
    this._notch = el("div.cursor", { aria: { hidden: "true" } });
    this._pausesBox = el("div.plot.pauses", this._pauses, this._notch);
    this._tip = el("div.tip", { hidden: true });
    this._ink = el("span.ink");
    this._line = el("span.rule");
    this._range = el("span.dim.small.number");
    this.node = el(
      "section.card.chart",
      { aria: { label: "Timeline" } },
      el(
        "div.row",
        el("h2", "Timeline"),
        this._range,
        el("span.grow"),
        button("−", { class: "tiny", title: "Zoom out", "aria-label": "Zoom out", click: () => this.zoom(0.5) }),
        button("+", { class: "tiny", title: "Zoom in", "aria-label": "Zoom in", click: () => this.zoom(2) }),
        button("All", { class: "tiny", title: "Show all of it", click: () => this.zoom(0) }),
      ),
      this._ganttBox,
      this._pausesBox,
      el(
        "ul.kinds.small",
        this._swatches.map(([, item]) => item),
      ),
      this._ink,
      this._line,
      this._tip,
    );
    this._draw = everyFrame(() => this._drawNow());
    onLook(this._ganttBox, this._draw);
    this._listen(
      this._ganttBox,
      x => this._tokenAtTime(this._timeAt(x)),
      (x, y) => this._tellTime(x, y),
    );
    this._listen(
      this._pausesBox,
      x => this._tokenAtPlace(x),
      x => this._tellPause(x),
    );
    this._ganttBox.addEventListener(
      "wheel",
      event => {
        if (!event.ctrlKey) return; // a plain wheel scrolls the page
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 1.5 : 1 / 1.5, this._timeAt(event.offsetX));
      },
      { passive: false },
    );
  }

  show(timeline, nowMs, steps) {
    this._timeline = timeline;
    this._bars = barsOf(timeline, nowMs, steps);
    this._usualMs = timeline.usualPauseMs;
    this._engines = [...new Set(this._bars.map(bar => bar.lane))].filter(lane => !LANES[lane]);
    const all = this._whole();
    if (this._zoom === 1) [this._from, this._to] = all;
    else if (this._from > all[1]) this._around((all[0] + all[1]) / 2);
    this._draw();
  }

  moveTo(n) {
    this._n = n;
    const token = this._timeline?.tokens[n - 1];
    if (token && this._zoom > 1 && (token.at_ms < this._from || token.at_ms > this._to)) this._around(token.at_ms);
    this._place();
  }

  // Show less of the time (*factor* > 1) or more around a moment; 0 shows all.
  zoom(factor, aroundMs = null) {
    const [from, to] = this._whole();
    const centre = aroundMs ?? this._timeline?.tokens[this._n - 1]?.at_ms ?? (this._from + this._to) / 2;
    this._zoom = factor ? Math.max(1, Math.min(this._zoom * factor, Math.max((to - from) / 20, 1))) : 1;
    this._around(centre);
  }

  _whole() {
    const timeline = this._timeline;
    const to = this._bars.reduce((latest, bar) => Math.max(latest, bar.to_ms), timeline.lastMs);
    return [0, Math.max(to * 1.01, 10)];
  }

  _around(ms) {
    const [from, to] = this._whole();
    const width = (to - from) / this._zoom;
    this._from = Math.max(from, Math.min(ms - width / 2, to - width));
    this._to = this._from + width;
    this._draw();
  }

  _listen(box, pick, tell) {
    let held = false;
    const take = event => {
      const at = box.getBoundingClientRect();
      const n = pick(event.clientX - at.left);
      if (n !== null) this._onPick(n);
    };
    box.addEventListener("pointerdown", event => {
      held = true;
      box.setPointerCapture(event.pointerId);
      take(event);
    });
    box.addEventListener("pointerup", () => {
      held = false;
    });
    box.addEventListener("pointermove", event => {
      if (held) take(event);
      const at = box.getBoundingClientRect();
      const says = tell(event.clientX - at.left, event.clientY - at.top);
      this._tip.hidden = !says;
      if (!says) return;
      fill(
        this._tip,
        says.map(line => el("div", line)),
      );
      this._tip.style.left = `${Math.min(event.clientX + 14, innerWidth - this._tip.offsetWidth - 8)}px`;
      this._tip.style.top = `${Math.min(event.clientY + 16, innerHeight - this._tip.offsetHeight - 8)}px`;
    });
    box.addEventListener("pointerleave", () => {
      this._tip.hidden = true;
    });
  }

  // Where things are

  get _isNarrow() {
    return this._ganttBox.clientWidth < NARROW;
  }
  get _left() {
    return this._isNarrow ? 0 : 172;
  }
  get _laneHeight() {
    return this._isNarrow ? LANE + 14 : LANE;
  }
  get _lanes() {
    return ["way", ...(this._engines ?? []), "reply"];
  }

  _x(ms) {
    return this._left + ((ms - this._from) / (this._to - this._from)) * (this._ganttBox.clientWidth - this._left - 1);
  }

  _timeAt(x) {
    return this._from + ((x - this._left) / (this._ganttBox.clientWidth - this._left - 1)) * (this._to - this._from);
  }

  _barTop(lane) {
    return TOP + lane * this._laneHeight + (this._isNarrow ? 14 : 0) + (LANE - BAR) / 2 - 2;
  }

  _tokenAtTime(ms) {
    const tokens = this._timeline?.tokens ?? [];
    let [low, high] = [0, tokens.length]; // how many tokens there were then
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tokens[middle].at_ms <= ms) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  _tokenAtPlace(x) {
    const count = this._timeline?.tokens.length ?? 0;
    if (!count) return null;
    return Math.max(
      1,
      Math.min(count, Math.ceil(((x - this._left) / (this._pausesBox.clientWidth - this._left)) * count)),
    );
  }

  _tellTime(x, y) {
    if (!this._timeline || x < this._left) return null;
    const lane = Math.floor((y - TOP) / this._laneHeight);
    const ms = this._timeAt(x);
    const slack = ((this._to - this._from) / this._ganttBox.clientWidth) * 3;
    const here = this._bars.filter(
      bar => bar.lane === this._lanes[lane] && bar.from_ms - slack <= ms && ms <= bar.to_ms + slack,
    );
    const bar = here.findLast(each => each.kind === "chunk") ?? here[0];
    const token = this._timeline.tokens[this._tokenAtTime(ms) - 1];
    const lines = [`${duration(ms)} after submit`];
    if (bar) lines.push(bar.says, `${duration(bar.to_ms - bar.from_ms)}`);
    if (token && bar?.kind === "decode") lines.push(`token ${token.n}, ${pauseOf(token)}`);
    return lines;
  }

  _tellPause(x) {
    const token = x < this._left ? null : this._timeline?.tokens[(this._tokenAtPlace(x) ?? 0) - 1];
    if (!token) return null;
    return [`token ${token.n}`, token.missing ? "missing in the log" : pauseOf(token), ...(token.drafted ? ["drafted, and right"] : [])];
  }

  // Drawing

  _drawNow() {
    if (!this._timeline || !this._ganttBox.clientWidth) return;
    const colours = Object.fromEntries(
      this._swatches.map(([kind, item]) => [kind, getComputedStyle(item.firstChild).backgroundColor]),
    );
    colours.ink = getComputedStyle(this._ink).color;
    colours.rule = getComputedStyle(this._line).color;
    const kinds = new Set(this._bars.map(bar => bar.kind));
    const classes = new Set(this._timeline.tokens.map(token => pauseClass(token.pause_ms, this._usualMs)));
    if (this._timeline.tokens.some(token => token.drafted)) kinds.add("draft");
    for (const [kind, item] of this._swatches)
      item.hidden = !(kind.startsWith("pause-") ? classes.has(Number(kind[6])) : kinds.has(kind));
    this._range.textContent = `${since(this._from)} to ${since(this._to)} after submit`;
    this._drawGantt(colours);
    this._drawPauses(colours);
    this._place();
  }

  _drawGantt(colours) {
    const height = TOP + this._lanes.length * this._laneHeight + AXIS;
    const pen = prepared(this._gantt, this._ganttBox.clientWidth, height);
    this._gantt.setAttribute("aria-label", this._summary());
    this._drawAxis(pen, colours, height);
    this._lanes.forEach((lane, index) => {
      pen.fillStyle = colours.ink;
      const y = this._isNarrow ? TOP + index * this._laneHeight + 11 : this._barTop(index) + BAR - 4;
      pen.fillText(LANES[lane] ?? lane, 0, y);
    });
    pen.save();
    pen.beginPath();
    pen.rect(this._left, 0, this._ganttBox.clientWidth - this._left, height);
    pen.clip();
    for (const [kind] of KINDS) this._drawKind(pen, kind, colours[kind]);
    this._drawTokens(pen, colours);
    this._drawMarks(pen, colours);
    pen.restore();
  }

  _drawAxis(pen, colours, height) {
    const room = Math.max(2, (this._ganttBox.clientWidth - this._left) / 110); // labels that fit
    const step = nice(Math.max((this._to - this._from) / room, 1e-3));
    pen.strokeStyle = colours.rule;
    pen.fillStyle = colours.ink;
    pen.lineWidth = 1;
    pen.beginPath();
    const first = Math.ceil((this._from) / step) * step;
    for (let ms = first; ms <= this._to; ms += step) {
      const x = Math.round(this._x(ms)) + 0.5;
      pen.moveTo(x, TOP);
      pen.lineTo(x, height - AXIS + 4);
      const says = since(ms);
      const width = pen.measureText(says).width;
      pen.fillText(says, Math.max(this._left, Math.min(x - width / 2, this._ganttBox.clientWidth - width)), height - 6);
    }
    pen.stroke();
  }

  _drawKind(pen, kind, colour) {
    pen.fillStyle = colour;
    pen.beginPath();
    for (const bar of this._bars) {
      if (bar.kind !== kind || bar.to_ms < this._from || bar.from_ms > this._to) continue;
      const lane = this._lanes.indexOf(bar.lane);
      const [x, width] = [this._x(bar.from_ms), Math.max(this._x(bar.to_ms) - this._x(bar.from_ms), 1)];
      const isThin = kind === "detokenize" || kind === "chunk";
      if (kind === "preempted" || kind === "gone") hatch(pen, x, this._barTop(lane), width, BAR);
      else pen.rect(x, this._barTop(lane) + (isThin ? 4 : 0), width, isThin ? BAR - 8 : BAR);
    }
    pen.fill();
  }

  _drawTokens(pen, colours) {
    const lanes = new Map(this._lanes.map((lane, index) => [lane, index]));
    const paths = PAUSE_CLASSES.map(() => new Path2D());
    const width = this._timeline.tokens.length < 400 ? 2 : 1;
    for (const token of this._timeline.tokens) {
      if (token.missing || token.client_at_ms < this._from || token.at_ms - token.pause_ms > this._to) continue;
      const longer = pauseClass(token.pause_ms, this._usualMs);
      const path = paths[longer];
      const x = this._x(token.at_ms);
      const top = this._barTop(lanes.get(token.who) ?? 1);
      path.rect(x, top, width, BAR);
      if (longer && token.n > 1) {
        // the pause itself, as a line up to the token
        const since = this._x(token.at_ms - token.pause_ms);
        path.rect(since, top + BAR / 2 - 1, x - since, 2);
      }
      path.rect(this._x(token.client_at_ms), this._barTop(lanes.get("reply")), width, BAR);
    }
    fillEach(pen, paths, colours);
  }

  _drawMarks(pen, colours) {
    pen.fillStyle = pen.strokeStyle = colours.ink;
    const timeline = this._timeline;
    const marks = timeline.marks
      .filter(mark => mark.what !== "admitted")
      .map(mark => [mark.at_ms, mark.who]);
    if (timeline.isOver) marks.push([timeline.lastMs, "reply"]);
    for (const [ms, lane] of marks) {
      const [x, y] = [this._x(ms), this._barTop(Math.max(this._lanes.indexOf(lane), 0))];
      pen.beginPath();
      pen.moveTo(x - 4, y - 4);
      pen.lineTo(x + 4, y - 4);
      pen.lineTo(x, y + 3);
      pen.fill();
    }
  }

  _drawPauses(colours) {
    const width = this._pausesBox.clientWidth;
    const pen = prepared(this._pauses, width, PAUSES);
    const tokens = this._timeline.tokens;
    const longest = tokens.reduce((most, token) => Math.max(most, token.pause_ms), 1);
    pen.fillStyle = colours.ink;
    if (!this._isNarrow) {
      pen.fillText("pause before", 0, 20);
      pen.fillText("each token", 0, 36);
    }
    this._pauses.setAttribute(
      "aria-label",
      tokens.length
        ? `Pause before each of ${tokens.length} tokens, the longest ${duration(longest)}`
        : "No tokens yet",
    );
    const paths = PAUSE_CLASSES.map(() => new Path2D());
    const drafted = new Path2D();
    const each = (width - this._left) / Math.max(tokens.length, 1);
    tokens.forEach((token, index) => {
      const high = Math.max(1, (Math.log1p(token.pause_ms) / Math.log1p(longest)) * (PAUSES - 2 * DRAFTED));
      const place = paths[pauseClass(token.pause_ms, this._usualMs)];
      const [x, wide] = [this._left + index * each, Math.max(each - (each > 3 ? 1 : 0), 0.5)];
      place.rect(x, PAUSES - high, wide, high);
      if (token.drafted) drafted.rect(x, 0, wide, DRAFTED);
    });
    fillEach(pen, paths, colours);
    pen.fillStyle = colours.draft;
    pen.fill(drafted);
  }

  _place() {
    const tokens = this._timeline?.tokens ?? [];
    const ms = tokens[this._n - 1]?.at_ms ?? 0;
    const x = this._to > this._from ? this._x(ms) : this._left;
    this._cursor.style.transform = `translateX(${x}px)`;
    this._cursor.hidden = x < this._left - 1 || x > this._ganttBox.clientWidth;
    const share = tokens.length ? (this._n - 0.5) / tokens.length : 0;
    this._notch.hidden = !this._n;
    this._notch.style.transform = `translateX(${this._left + share * (this._pausesBox.clientWidth - this._left)}px)`;
  }

  _summary() {
    const timeline = this._timeline;
    const several = (kind, name) => {
      const number = timeline.marks.filter(mark => mark.what === kind).length;
      return `${number} ${name}${number === 1 ? "" : "s"}`;
    };
    return (
      `Chart of the request over ${duration(timeline.lastMs)}: ${timeline.tokens.length} tokens, ` +
      `${several("preempted", "preemption")}, ${several("taken_over", "takeover")}. The table of moments has the details.`
    );
  }
}

// Fill the path of each class of pauses with its colour.
function fillEach(pen, paths, colours) {
  paths.forEach((path, index) => {
    pen.fillStyle = colours[`pause-${index}`];
    pen.fill(path);
  });
}

// Add slanted stripes to the path, so that a bar differs not by its colour alone.
function hatch(pen, x, y, width, height) {
  pen.rect(x, y, width, 2);
  pen.rect(x, y + height - 2, width, 2);
  const end = Math.min(x + width, 20_000);
  for (let at = Math.max(x, -height); at < end; at += 7) {
    const right = Math.min(at + 3, end);
    pen.moveTo(at, y + height);
    pen.lineTo(Math.min(at + height / 2, end), y);
    pen.lineTo(Math.min(right + height / 2, end), y);
    pen.lineTo(right, y + height);
    pen.closePath();
  }
}

function since(ms) {
  return ms < 0.001 ? "0" : duration(Math.round(ms * 1000) / 1000);
}
