// The picture of the pipeline: workers as cards, streams as pipes between them, in the order in which a request passes them.
// Nodes stay while their worker does, so that nothing flickers and the focus stays where it is.

import { el, figures, keep, say } from "../dom.js";
import { bytes, count, duration, known, percent, short } from "../format.js";
import { FADING_MS, numberOf, phaseOf } from "./model.js";

const KINDS = {
  ready: "ok",
  held: "ok",
  away: "bad",
  gone: "bad",
  loading: "info",
  draining: "warn",
  guest: "warn",
  waiting: "warn",
};
const LOG_FULL = Math.log2(1 + 1024); // entries that fill a pipe

export class Picture {
  constructor() {
    this._cards = new Map();
    this._pipes = new Map();
    this._web = group("web", "Frontends");
    this._tokenize = group("tokenize", "Tokenizers");
    this._ranks = group("rank", "Ranks");
    this._others = group("others", "Other workers");
    this._submitted = this._pipe("submitted", "submitted");
    this._tokenized = this._pipe("tokenized", "tokenized");
    this._back = el("div.back", (this._open = el("span.small.dim")));
    this._flow = el("div.flow", this._web.node, this._submitted.node, this._tokenize.node, this._tokenized.node);
    this.node = el(
      "section.card.picture",
      { aria: { label: "The pipeline" } },
      this._flow,
      this._back,
      el("div.asides", this._ranks.node, this._others.node),
    );
  }

  show(pipeline) {
    const { picture } = pipeline;
    const streams = new Map(picture.streams.map(each => [each.stream, each]));
    const engines = new Map(picture.engines.map(each => [each.engine, each]));
    const steps = new Map(picture.steps.map(each => [each.engine, each]));
    const used = new Set();
    const card = slot => {
      used.add(slot.slot);
      if (!this._cards.has(slot.slot)) this._cards.set(slot.slot, new Card(slot.slot));
      const mine = this._cards.get(slot.slot);
      mine.show(slot, picture.at_ms, engines.get(slot.slot), steps.get(slot.slot));
      return mine.node;
    };
    put(this._web, pipeline.stage("web").map(card));
    put(this._tokenize, pipeline.stage("tokenize").map(card));
    put(this._ranks, pipeline.stage("rank").map(card));
    put(this._others, [...pipeline.stage("archive"), ...pipeline.stage("janitor")].map(card));
    this._submitted.show(streams.get("submitted"));
    this._tokenized.show(streams.get("tokenized"));
    this._placeEngines(pipeline, streams, card);
    for (const name of [...this._cards.keys()]) if (!used.has(name)) this._cards.delete(name);
    const open = picture.slots.reduce((sum, slot) => sum + slot.streams_open, 0);
    say(this._open, `replies: ${open === 1 ? "1 stream is" : `${count(open)} streams are`} open`);
  }

  // A row for each engine: its card, its steps, its detokenizer.
  _placeEngines(pipeline, streams, card) {
    const numbers = new Set(
      [...pipeline.stage("generate"), ...pipeline.stage("detokenize")].map(slot => numberOf(slot.slot)),
    );
    const rows = [...numbers].sort((one, other) => one - other);
    const nodes = [this._web.node, this._submitted.node, this._tokenize.node, this._tokenized.node];
    rows.forEach((number, index) => {
      const [engine, detokenizer] = [`generate-${number}`, `detokenize-${number}`];
      const name = `steps:${engine}`;
      if (!this._pipes.has(name)) this._pipes.set(name, this._pipe(name, "steps"));
      const pipe = this._pipes.get(name);
      pipe.show(streams.get(name));
      const cells = [pipeline.slots.get(engine), null, pipeline.slots.get(detokenizer)].map((slot, column) => {
        const node = column === 1 ? pipe.node : slot ? card(slot) : empty(this._cards, column ? detokenizer : engine);
        node.style.gridArea = `${index + 1} / ${column + 5}`;
        return node;
      });
      nodes.push(...cells);
    });
    for (const node of nodes.slice(0, 4)) node.style.gridRow = `1 / span ${Math.max(rows.length, 1)}`;
    keep(this._flow, nodes);
  }

  _pipe(name, label) {
    const numbers = el("span.number.small");
    const pending = el("span.pending");
    const lag = el("span.lag");
    const node = el(
      "div.pipe",
      { data: { stream: name } },
      el("span.small.mono", label),
      el("span.tube", { aria: { hidden: "true" } }, pending, lag),
      numbers,
    );
    const show = stream => {
      const { length = 0, pending: taken = 0, lag: left = 0 } = stream ?? {};
      say(
        numbers,
        length || taken || left ? `${short(length)} in it, ${short(taken)} pending, lag ${short(left)}` : "empty",
      );
      pending.style.width = `${share(taken, taken + left)}%`;
      lag.style.width = `${share(left, taken + left)}%`;
      node.classList.toggle("busy", taken + left > 0);
      node.classList.toggle("late", left > 0);
    };
    return { node, show };
  }
}

// How much of a pipe a part of its entries takes; the whole grows with the logarithm.
function share(part, whole) {
  return whole ? (100 * Math.min(1, Math.log2(1 + whole) / LOG_FULL) * part) / whole : 0;
}

// A worker, and if it is an engine its figures.
class Card {
  constructor(name) {
    this._phase = el("span.badge");
    this._epoch = el("span.small.dim.number");
    this._took = el("p.took.small", { hidden: true });
    this._lease = el("span.left");
    this._where = el("p.small.dim");
    this._pending = el("p.small");
    this._figures = figures("dl.inside");
    this.node = el(
      "article.worker",
      { data: { slot: name }, aria: { label: name } },
      el("div.row", el("h3.mono", name), this._phase, this._epoch),
      this._took,
      el("span.lease", { aria: { hidden: "true" } }, this._lease),
      this._where,
      this._pending,
      this._figures.node,
    );
  }

  show(slot, nowMs, engine, steps) {
    say(this._phase, phaseOf(slot));
    const kind = `badge ${KINDS[slot.phase] ?? "info"}`;
    if (this._phase.className !== kind) this._phase.className = kind;
    say(this._epoch, `epoch ${slot.epoch}`);
    const isTaken = slot.tookMs > 0 && nowMs - slot.tookMs < FADING_MS;
    this._took.hidden = !isTaken;
    say(this._took, isTaken ? `${slot.slot}: epoch ${slot.tookEpoch}, taken over` : "");
    this.node.classList.toggle("taken", isTaken);
    this.node.classList.toggle("away", slot.phase === "away" || slot.phase === "gone");
    this.node.classList.toggle("gone", slot.phase === "gone");
    this._lease.style.width = `${Math.min(100, slot.lease_ms / 30)}%`;
    const where = [
      slot.pid ? `${slot.host}:${slot.pid}` : "",
      slot.lease_ms ? `lease ${duration(slot.lease_ms)}` : "no worker",
    ];
    say(this._where, where.filter(Boolean).join(", "));
    say(this._pending, slot.pending ? `${count(slot.pending)} pending` : "");
    if (engine) this._figures.show(figuresOf(engine, steps));
  }
}

function figuresOf(engine, steps) {
  const seconds = value => duration(value * 1000);
  const told = [
    ["running", known(engine.running, count)],
    ["waiting", known(engine.waiting, count)],
    ["pages used", known(engine.cache_used, percent)],
    ["cache hits", known(engine.prefix_hits, percent)],
    ["tokens/s in", known(engine.prompt_tokens_per_s, short)],
    ["tokens/s out", known(engine.output_tokens_per_s, short)],
    ["first token", known(engine.first_token_p50_s, seconds)],
    ["between tokens", known(engine.between_tokens_p50_s, seconds)],
    ["preempted", known(engine.preemptions, count)],
  ];
  if (steps) {
    told.push(
      ["pages free", count(steps.free_pages)],
      ["step, median", duration(steps.median_ms)],
      ["step, longest", duration(steps.longest_ms)],
    );
  }
  return told;
}

function group(name, label) {
  const list = el("div.workers");
  const node = el("section", { class: ["stage", name], aria: { label } }, el("h2.small.dim", label), list);
  return { node, list };
}

function put({ node, list }, nodes) {
  node.hidden = !nodes.length;
  keep(list, nodes);
}

function empty(cards, name) {
  const key = `no ${name}`;
  if (!cards.has(key))
    cards.set(key, { node: el("article.worker.away.none", el("h3.mono", name), el("p.small.dim", "not there")) });
  return cards.get(key).node;
}

// What Redis and the whole log say of themselves, in words.
export function aboutOf(picture) {
  const { redis } = picture;
  const limit = redis.max_bytes ? ` of ${bytes(redis.max_bytes)}` : "";
  const others = picture.others ? `, ${count(picture.others)} of the newest belong to others` : "";
  return [
    `${redis.name} ${redis.version}, ${bytes(redis.used_bytes)}${limit}`,
    `${count(picture.num_live)} live requests${others}`,
  ];
}
