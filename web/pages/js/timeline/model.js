// One request as data, as GET /v1/requests/<uid>/events?format=story tells it: each frame has what an event changed. Times
// are milliseconds since the submit. Knows no page, no clock and no network.

import { duration } from "../format.js";

// Classes of pauses, as multiples of the usual one. `pauseClass` returns an index of this list.
export const PAUSE_CLASSES = [
  { upTo: 2, says: "usual" },
  { upTo: 5, says: "2 to 5 times as long" },
  { upTo: 20, says: "5 to 20 times" },
  { upTo: Infinity, says: "more than 20 times" },
];
const SHORTEST_PAUSE_MS = 4; // below it a multiple says nothing: the clock counts milliseconds
const ENDED = new Set(["finished", "failed", "cancelled"]);
const MARKS = new Set(["admitted", "preempted", "taken_over"]);

// Has the fields of the story (docs/pages.md), and its tokens, bars and moments. Token n is at n - 1.
export class Timeline {
  constructor(uid) {
    Object.assign(this, { uid, lastId: "", state: "queued", submitted_ms: 0, prompt_tokens: null, text: "" });
    [this.tokens, this.moments, this.bars, this.asked] = [[], [], [], null];
  }

  // Take in what the next event changes.
  take(id, { moments = [], bars = [], tokens = [], ...facts }) {
    this.lastId = id;
    Object.assign(this, facts);
    for (const [at, bar] of bars) this.bars[at] = bar;
    for (const [at, moment] of moments) {
      this.moments[at] = moment;
      if (moment.what !== "missing") continue;
      for (let n = moment.first_n; n <= moment.n; n += 1) {
        const times = { at_ms: moment.at_ms, client_at_ms: moment.at_ms, pause_ms: 0, client_pause_ms: 0 };
        this.tokens[n - 1] = { n, ...times, text: "", score: null, token: null, commit: n, missing: true };
      }
    }
    for (const token of tokens) this.tokens[token.n - 1] = token;
  }

  get isOver() {
    return ENDED.has(this.state);
  }

  // When the last event was.
  get lastMs() {
    const last = this.moments.at(-1);
    return last?.last_at_ms ?? last?.at_ms ?? 0;
  }

  get cachedTokens() {
    return this.usage?.cached_tokens ?? this.moments.find(({ what }) => what === "admitted")?.cached_tokens ?? 0;
  }

  // What engines said of it besides tokens.
  get marks() {
    return this.moments.filter(({ what }) => MARKS.has(what));
  }

  // How long the usual pause between two tokens is in the engine: the median, in milliseconds.
  get usualPauseMs() {
    const later = this.tokens.slice(1).filter(token => !token.missing);
    const pauses = later.map(token => token.pause_ms).sort((one, other) => one - other);
    return pauses.length ? pauses[pauses.length >> 1] : 0;
  }

  // The text that clients had after n tokens.
  textAt(n) {
    const texts = this.tokens.slice(0, n).map(token => token.text);
    return this.text + texts.join("");
  }

  // Everything that is known of token n, and of the moment at which it came. n = 0: before the first token.
  at(n) {
    return {
      n,
      token: this.tokens[n - 1] ?? null,
      text: this.textAt(n),
      added: this.tokens[n - 1]?.text ?? "",
      admitted: this.marks.findLast(mark => mark.what === "admitted" && (mark.n < n || !mark.n)) ?? null,
      marks: this.marks.filter(mark => mark.n === Math.max(n - 1, 0)),
      length: this.prompt_tokens === null ? null : this.prompt_tokens + n,
    };
  }
}

// Return how long a pause was, as an index of PAUSE_CLASSES.
export function pauseClass(pauseMs, usualMs) {
  const times = pauseMs / Math.max(usualMs, SHORTEST_PAUSE_MS);
  return PAUSE_CLASSES.findIndex(each => times < each.upTo);
}

// Return the pause before a token in words.
export function pauseOf({ n, pause_ms: pauseMs }) {
  return `${duration(pauseMs)} after ${n > 1 ? "the one before" : "submit"}`;
}

// Return the bars of the chart in the order of their time: {lane, kind, from_ms, to_ms, says}. Lanes are "way" (the queues),
// engines, and "reply". The story has those of the request; *steps*, those of the journal by name, add theirs.
export function barsOf(timeline, nowMs, steps = new Map()) {
  const bars = timeline.bars.map(bar => ({ ...bar, to_ms: bar.to_ms ?? Math.max(nowMs, timeline.lastMs, bar.from_ms) }));
  const since = ms => ms - timeline.submitted_ms;
  bars.forEach((bar, index) => {
    const [before, step] = [bars[index - 1], steps.get(bar.step)]; // it took the request before it could say so
    if (before && step) {
      bar.from_ms = before.to_ms = Math.max(since(step.made_ms - step.forward_ms), before.from_ms);
    }
  });
  for (const step of steps.values()) {
    if (!step.prompt_tokens) continue;
    const lane = `${step.engine} epoch ${step.id.split("-")[0]}`;
    const [from, to] = [since(step.made_ms - step.forward_ms), since(step.made_ms)];
    const says = `${step.prompt_tokens} prompt tokens in step ${step.id}`;
    bars.push({ lane, kind: "chunk", from_ms: from, to_ms: to, says });
  }
  for (const { n, engine, step: id, client_at_ms: to } of timeline.tokens) {
    const step = steps.get(stepKey(engine, id));
    const says = `token ${n} becomes text`;
    if (step) bars.push({ lane: "reply", kind: "detokenize", from_ms: since(step.ms), to_ms: to, says });
  }
  return bars;
}

// Return the steps of GET /v1/requests/<uid>/steps by name. Each has its companions, also where they stayed the same.
export function stepsOf(answer) {
  let companions = [];
  return new Map(
    answer.steps.map(step => {
      companions = step.companions ?? companions;
      return [stepKey(step.engine, step.id), { ...step, companions }];
    }),
  );
}

// The name of a step: epochs are counted for each engine.
export function stepKey(engine, id) {
  return `${engine}/${id}`;
}
