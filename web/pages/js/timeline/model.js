// One request as data: a fold of the events of its history, as GET /v1/requests/<uid>/events?format=events sends them.
// It tells what `minisgl trace` tells, and more of each token. Knows no page, no clock and no network.

import { duration } from "../format.js";

// Classes of pauses, as multiples of the usual one. `pauseClass` returns an index of this list.
export const PAUSE_CLASSES = [
  { upTo: 2, says: "usual" },
  { upTo: 5, says: "2 to 5 times as long" },
  { upTo: 20, says: "5 to 20 times" },
  { upTo: Infinity, says: "more than 20 times" },
];
const SHORTEST_PAUSE_MS = 4; // below it a multiple says nothing: the clock counts milliseconds
const ENDS = new Set(["finished", "failed", "cancelled", "answered"]);
const STATES = {
  submitted: "queued",
  tokenized: "tokenized",
  admitted: "running",
  preempted: "running",
  taken_over: "running",
  tokens: "running",
  finished: "finished",
  answered: "finished",
  failed: "failed",
  cancelled: "cancelled",
};
// Fields of events that a moment does not repeat, as in pipeline/views/history.py.
const TOLD_ELSEWHERE = new Set(
  `kind v n ms frontend by engine epoch endpoint model messages prompt prompt_ids sampling deadline_ms
  labels constraint grammar token_ids pieces tokens text usage timings`.split(/\s+/),
);

export class Timeline {
  constructor(uid) {
    this.uid = uid;
    this.state = "queued";
    this.beganMs = 0; // when it was submitted, by the clock of Redis
    this.lastMs = 0; // of the last event
    this.submitted = null; // the events themselves; null: not there yet
    this.tokenized = null;
    this.end = null;
    this.tokens = []; // of the output; see `_takeTokens`. Token n is at n - 1.
    this.marks = []; // {id, n, ms, kind, engine, epoch, event}: what engines said besides tokens
    this.moments = []; // as `minisgl trace --json` has them
    this.n = 0;
    this.lastId = "";
    this._began = false;
    this._engine = "";
    this._text = "";
    this._ends = [0]; // where the text ends that clients had after n tokens
    this._commit = { first: 0, last: 0, ms: 0, epoch: 0 }; // of the last tokens; each of them has it
    this._longest = 0; // the longest pause of the last moment, before this commit
  }

  // Take in the next event. An event that was heard before is passed over, so a stream may repeat itself.
  hear(id, event) {
    if (this.lastId && !isAfter(id, this.lastId)) return false;
    this.lastId = id;
    if (!this._began) [this.beganMs, this._began] = [event.ms, true];
    this.lastMs = event.ms;
    this.state = STATES[event.kind] ?? this.state;
    const isEnd = ENDS.has(event.kind);
    const after = isEnd ? Math.max(event.n ?? 0, this.n) : Number(id.split("-")[0]);
    const before = event.kind === "tokens" ? after - (event.count ?? 1) : after;
    this._takeHole(id, event.ms, before);
    this.n = after;
    if (event.kind === "tokens") this._takeTokens(id, event);
    else this._takeMark(id, event, isEnd);
    return true;
  }

  get promptTokens() {
    if (this.end?.usage) return this.end.usage.prompt_tokens;
    if (this.end?.kind === "answered" && this.end.token_ids?.length) return this.end.token_ids.length;
    return this.tokenized ? this.tokenized.token_ids.length : null;
  }

  get cachedTokens() {
    return (
      this.end?.usage?.cached_tokens ?? this.marks.find(mark => mark.kind === "admitted")?.event.cached_tokens ?? 0
    );
  }

  get isOver() {
    return this.end !== null;
  }

  // How long the usual pause between two tokens is in the engine: the median, in milliseconds.
  get usualPauseMs() {
    const pauses = this.tokens
      .slice(1)
      .filter(token => !token.missing)
      .map(token => token.pauseMs);
    pauses.sort((one, other) => one - other);
    return pauses.length ? pauses[pauses.length >> 1] : 0;
  }

  // The longest pause between two tokens for the client.
  get longestClientPauseMs() {
    return this.tokens.slice(1).reduce((most, token) => Math.max(most, token.clientPauseMs), 0);
  }

  // The text that clients had after n tokens.
  textAt(n) {
    return this._text.slice(0, this._ends[Math.min(n, this._ends.length - 1)]);
  }

  // Everything that is known of token n, and of the moment at which it came. n = 0: before the first token.
  at(n) {
    const token = n > 0 ? (this.tokens[n - 1] ?? null) : null;
    const marks = this.marks.filter(mark => mark.n < n || (n === 0 && mark.n === 0));
    const admitted = marks.findLast(mark => mark.kind === "admitted") ?? null;
    return {
      n,
      token,
      text: this.textAt(n),
      added: n > 0 ? this._text.slice(this._ends[n - 1], this._ends[n]) : "",
      admitted,
      marks: this.marks.filter(mark => mark.n === n - 1 || (n === 0 && mark.n === 0)),
      length: this.promptTokens === null ? null : this.promptTokens + n,
    };
  }

  _takeHole(id, ms, before) {
    if (before <= this.n) return;
    for (let n = this.n + 1; n <= before; n += 1) {
      const nothing = { id: "", isKnown: false, pauseMs: 0, clientPauseMs: 0, token: null, score: null };
      const nobody = { engine: "", epoch: 0, step: "", chunks: 0, missing: true };
      this.tokens.push({ n, ms, madeMs: ms, commit: { first: n, last: n }, ...nothing, ...nobody });
      this._ends.push(this._text.length);
    }
    const moment = this._moment(id, ms, "missing", "", before);
    this.moments.push({ ...moment, first_n: this.n + 1, count: before - this.n });
  }

  _takeTokens(id, event) {
    const count = event.count ?? 1;
    const epoch = Number(event.step.split("-")[0]);
    const who = `${this._engine} epoch ${epoch}`.trim();
    const since = this.tokens.length ? this.tokens.at(-1).ms : this.beganMs;
    const goesOn = this.moments.at(-1)?.what === "tokens" && this.moments.at(-1).who === who;
    this._begin(this.n - count + 1, event.ms, epoch, goesOn);
    for (let index = 0; index < count; index += 1) {
      if (index === count - 1) this._text += event.text ?? ""; // a text belongs to the last token of its event
      this.tokens.push({
        n: this.n - count + 1 + index,
        id,
        ms: event.ms, // when its client got it
        madeMs: index === count - 1 ? event.ms - (event.age_ms ?? 0) : event.ms, // when the engine had made it
        isKnown: index === count - 1 && event.age_ms !== undefined, // whether the log says that
        pauseMs: 0, // in the engine
        clientPauseMs: index ? 0 : event.ms - since,
        commit: this._commit, // the numbers of the first and the last token that came with it
        token: event.tokens?.[index] ?? null,
        score: event.scores?.[index] ?? null,
        engine: this._engine,
        epoch,
        step: event.step,
        chunks: index ? 0 : (event.chunks ?? 0),
        missing: false,
      });
      this._ends.push(this._text.length);
    }
    this._divide();
    const last = this.moments.at(-1);
    const atMs = event.ms - this.beganMs;
    if (goesOn) {
      last.longest_pause_ms = this._longestIn(last);
      last.longest_client_pause_ms = Math.max(last.longest_client_pause_ms, atMs - last.last_at_ms);
      Object.assign(last, { n: this.n, last_id: id, count: last.count + count, last_at_ms: atMs });
      last.chunks += event.chunks ?? 0;
    } else {
      const moment = this._moment(id, event.ms, "tokens", who, this.n);
      Object.assign(moment, { first_n: this.n - count + 1, last_id: id, count, last_at_ms: atMs });
      this.moments.push({
        ...moment,
        longest_pause_ms: this._longestIn(moment),
        longest_client_pause_ms: 0,
        chunks: event.chunks ?? 0,
      });
    }
  }

  // Say of which commit the next tokens are, the first of which is *first*.
  _begin(first, ms, epoch, goesOn) {
    const before = this._commit;
    const isSame = before.ms === ms && before.epoch === epoch && !this.tokens.at(-1)?.missing;
    if (!isSame || !before.first) this._commit = { first, last: this.n, ms, epoch };
    if (!goesOn) this._longest = 0;
    else if (this._commit !== before) this._longest = this.moments.at(-1).longest_pause_ms;
    this._commit.last = this.n;
  }

  // Say when each token of the commit was made. Those of unknown time divide the time up to the next known one, or the
  // commit, as in pipeline/views/made.py. A token that follows may be of the same commit, so this is done again then.
  _divide() {
    const { first, last } = this._commit;
    const before = this.tokens[first - 2];
    let since = before && !before.missing ? before.madeMs : null;
    let unknown = [];
    for (let n = first; n <= last; n += 1) {
      const token = this.tokens[n - 1];
      unknown.push(token);
      if (!token.isKnown && n < last) continue;
      const now = Math.max(token.isKnown ? token.madeMs : token.ms, since ?? 0);
      const began = since ?? now;
      unknown.forEach((each, index) => {
        each.madeMs = began + Math.floor(((now - began) * (index + 1)) / unknown.length);
      });
      [since, unknown] = [now, []];
    }
    for (let n = first; n <= last; n += 1) {
      const earlier = this.tokens[n - 2];
      const from = n > 1 ? (earlier.missing ? this.tokens[n - 1].madeMs : earlier.madeMs) : this.beganMs;
      this.tokens[n - 1].pauseMs = this.tokens[n - 1].madeMs - from;
    }
  }

  // The longest pause between two tokens of the last moment.
  _longestIn(moment) {
    const later = this.tokens.slice(Math.max(this._commit.first - 1, moment.first_n));
    return later.reduce((most, token) => Math.max(most, token.pauseMs), this._longest);
  }

  _takeMark(id, event, isEnd) {
    const details = {};
    let who = event.frontend ?? event.by ?? "";
    if (event.kind === "submitted") {
      this.submitted = event;
      if (event.constraint) details.constraint = event.constraint.kind;
    } else if (event.kind === "tokenized") {
      this.tokenized = event;
      details.prompt_tokens = event.token_ids.length;
      if (event.grammar) details.grammar_chars = event.grammar.length;
    } else if (isEnd) {
      this.end = event;
      if (event.kind === "answered") this._ends[this._ends.length - 1] = (this._text += event.text ?? "").length;
    } else {
      this._engine = event.engine;
      who = `${event.engine} epoch ${event.epoch}`;
      this.marks.push({
        id,
        n: this.n,
        ms: event.ms,
        kind: event.kind,
        engine: event.engine,
        epoch: event.epoch,
        event,
      });
    }
    for (const [name, value] of Object.entries(event)) if (!TOLD_ELSEWHERE.has(name)) details[name] = value;
    this.moments.push({ ...this._moment(id, event.ms, event.kind, who, this.n), ...details });
  }

  _moment(id, ms, what, who, n) {
    return { at_ms: ms - this.beganMs, id, what, who, n };
  }
}

// Say whether an id of a history comes after another one. The last id is above what a number can hold exactly.
export function isAfter(id, other) {
  const [first, second] = id.split("-").map(BigInt);
  const [otherFirst, otherSecond] = other.split("-").map(BigInt);
  return first > otherFirst || (first === otherFirst && second > otherSecond);
}

// Return how long a pause was, as an index of PAUSE_CLASSES.
export function pauseClass(pauseMs, usualMs) {
  const times = pauseMs / Math.max(usualMs, SHORTEST_PAUSE_MS);
  return PAUSE_CLASSES.findIndex(each => times < each.upTo);
}

// Return the pause before a token in words.
export function pauseOf({ n, pauseMs }) {
  return `${duration(pauseMs)} after ${n > 1 ? "the one before" : "submit"}`;
}

// Return the bars of the chart, in the order of their time: {lane, kind, from, to, says}, in ms since 1970.
//
// lane  who                     kinds
// way   the queues              tokenize, wait, preempted, gone (its engine died), end
// <engine> epoch <epoch>        prefill, decode; chunk (a step that computed a part of the prompt)
// reply detokenizer and client  detokenize
//
// *steps* are those of the journal, by the id that their tokens name; empty: they are not known.
export function barsOf(timeline, nowMs, steps = new Map()) {
  const bars = [];
  if (!timeline._began) return bars;
  const last = timeline.isOver ? timeline.lastMs : Math.max(nowMs, timeline.lastMs);
  const tokenizedMs = timeline.tokenized?.ms ?? last;
  const answered = timeline.end?.kind === "answered";
  bars.push({
    lane: "way",
    kind: "tokenize",
    from: timeline.beganMs,
    to: tokenizedMs,
    says: answered ? "the tokenizer answers" : "queue and tokenizer",
  });
  if (!timeline.tokenized) return bars;
  let free = { kind: "wait", from: tokenizedMs }; // the request is in no engine since then
  let stint = null; // in an engine
  const leave = ms => {
    if (stint) bars.push(...stintBars(stint, ms));
    stint = null;
  };
  const enter = (mark, fromMs) => {
    if (free) bars.push({ lane: "way", ...free, to: fromMs, says: WAITS[free.kind] });
    free = null;
    stint = { lane: `${mark.engine} epoch ${mark.epoch}`, from: fromMs, tokens: [] };
  };
  for (const each of inOrder(timeline)) {
    if (each.kind === "admitted") {
      leave(each.ms);
      enter(each, admittedMs(timeline, each, steps, free?.from ?? tokenizedMs));
    } else if (each.kind === "preempted") {
      leave(each.ms);
      free = { kind: "preempted", from: each.ms };
    } else if (each.kind === "taken_over") {
      const lost = stint?.tokens.at(-1)?.madeMs ?? stint?.from;
      leave(lost);
      free = free ?? { kind: "gone", from: lost ?? each.ms };
    } else if (stint) {
      stint.tokens.push(each.token);
    }
  }
  leave(last);
  if (free) bars.push({ lane: "way", ...free, to: last, says: WAITS[free.kind] });
  bars.push(...stepBars(timeline, steps));
  return bars;
}

const WAITS = {
  wait: "waits for an engine",
  preempted: "preempted: its pages went to more important requests",
  gone: "its engine is gone, and another one takes it over",
};

function inOrder(timeline) {
  const marks = timeline.marks.map(mark => ({ ...mark, at: mark.n + 0.5 }));
  const tokens = timeline.tokens.filter(token => !token.missing);
  const told = tokens.map(token => ({ kind: "token", ms: token.madeMs, at: token.n, token }));
  return [...marks, ...told].sort((one, other) => one.at - other.at);
}

// When an engine took the request: it commits that at the end of the step, and began before it.
function admittedMs(timeline, mark, steps, earliest) {
  const timings = timeline.end?.timings;
  if (timings && mark.id === timeline.marks.find(each => each.kind === "admitted").id)
    return Math.max(timeline.beganMs + timings.admitted_ms, earliest);
  const step = steps.get(stepKey(mark.engine, `${mark.epoch}-${mark.event.step}`));
  return step ? Math.max(step.made_ms - step.forward_ms, earliest) : mark.ms;
}

function stintBars(stint, ms) {
  const first = stint.tokens[0];
  const last = stint.tokens.at(-1);
  const chunks = first?.chunks ?? 0;
  const says = chunks ? `prefill in ${chunks} ${chunks === 1 ? "chunk" : "chunks"}` : "prefill";
  const bars = [{ lane: stint.lane, kind: "prefill", from: stint.from, to: first?.madeMs ?? ms, says }];
  if (first) {
    const counted = `tokens ${first.n} to ${last.n}`;
    bars.push({ lane: stint.lane, kind: "decode", from: first.madeMs, to: Math.max(ms, last.madeMs), says: counted });
  }
  return bars;
}

function stepBars(timeline, steps) {
  const bars = [];
  for (const step of steps.values()) {
    const own = step.prompt_tokens ?? 0; // tokens of this request's prompt, or of prompt and answer
    if (own) {
      const [epoch] = step.id.split("-");
      bars.push({
        lane: `${step.engine} epoch ${epoch}`,
        kind: "chunk",
        from: step.made_ms - step.forward_ms,
        to: step.made_ms,
        says: `${own} prompt tokens in step ${step.id}`,
        step,
      });
    }
  }
  for (const token of timeline.tokens) {
    const step = steps.get(stepKey(token.engine, token.step));
    if (step && !token.missing) {
      bars.push({
        lane: "reply",
        kind: "detokenize",
        from: step.ms,
        to: token.ms,
        says: `token ${token.n} becomes text`,
      });
    }
  }
  return bars;
}

// Return the steps of GET /v1/requests/<uid>/steps by name. Each has its companions, also where they stayed the same.
export function stepsOf(answer) {
  const steps = new Map();
  let companions = [];
  for (const step of answer.steps) {
    companions = step.companions ?? companions;
    steps.set(stepKey(step.engine, step.id), { ...step, companions });
  }
  return steps;
}

// The name of a step: epochs are counted for each engine.
export function stepKey(engine, id) {
  return `${engine}/${id}`;
}

// Return the first difference of two answers: {n, one, other}, the tokens there, null where an answer has ended; null: they
// agree as far as both have got.
export function difference(one, other) {
  const shared = Math.min(one.tokens.length, other.tokens.length);
  for (let index = 0; index < shared; index += 1) {
    const [here, there] = [one.tokens[index], other.tokens[index]];
    if (!here.missing && !there.missing && here.token !== there.token) {
      return { n: index + 1, one: here, other: there };
    }
  }
  const longer = one.tokens.length > shared ? one : other;
  const shorter = longer === one ? other : one;
  if (longer.tokens.length > shared && shorter.isOver) {
    return { n: shared + 1, one: one.tokens[shared] ?? null, other: other.tokens[shared] ?? null };
  }
  return null;
}
