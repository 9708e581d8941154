// A request at one token: the text so far, and what is known of the token. Also how tokens are written for people.

import { pageOf } from "../api.js";
import { button, el, fill } from "../dom.js";
import { count, duration } from "../format.js";
import { pauseClass, PAUSE_CLASSES, pauseOf, stepKey } from "./model.js";

const MOST_TEXT = 20_000; // characters before the token that are shown: laying out more in each move takes too long
const COMPANIONS = 24; // that are shown at first

// The text of an answer up to a token, which grows as one moves.
export class AnswerText {
  constructor() {
    this._before = el("span");
    this._token = el("mark.here");
    this._cut = el("p.dim.small", { hidden: true });
    this._text = el(
      "div.answer",
      { tabindex: "0", role: "region", aria: { label: "Text up to this token" } },
      this._before,
      this._token,
    );
    this.node = el("section.card", el("h2", "Text so far"), this._cut, this._text);
  }

  show(state) {
    const before = state.text.slice(0, state.text.length - state.added.length);
    this._cut.hidden = before.length <= MOST_TEXT;
    this._cut.textContent = `The first ${count(Math.max(before.length - MOST_TEXT, 0))} characters are left out here.`;
    this._before.textContent = before.slice(-MOST_TEXT);
    this._token.textContent = state.added;
    this._token.hidden = !state.added;
    this._text.scrollTop = this._text.scrollHeight;
  }
}

// What is known of a token, as a list of names and values. Each value has `data-field`.
export class TokenState {
  constructor() {
    this._list = el("dl.facts");
    this._others = el("div.stack");
    this.node = el("section.card", el("h2", "At this token"), this._list, this._others);
    this._showAll = false;
  }

  show(timeline, state, known) {
    const { token } = state;
    const step = token && known.steps.get(stepKey(token.engine, token.step));
    fill(
      this._list,
      [
        [
          "token",
          "Token",
          token || timeline.tokens.length ? `${state.n} of ${timeline.tokens.length}` : timeline.isOver ? "no tokens" : "none yet",
        ],
        ...(token ? tokenRows(timeline, state, step, known) : beforeRows(timeline)),
      ]
        .filter(([, , value]) => value !== null && value !== "")
        .flatMap(([name, says, value]) => [el("dt", says), el("dd", { data: { field: name } }, value)]),
    );
    this._showOthers(step, token, known);
  }

  _showOthers(step, token, known) {
    if (!step) {
      const why = token && known.sentence;
      fill(this._others, why && el("p.dim.small", why));
      return;
    }
    const shown = this._showAll ? step.companions : step.companions.slice(0, COMPANIONS);
    const left = step.companions.length - shown.length;
    fill(
      this._others,
      el("h3", step.companions.length ? "In the same batch" : "Alone in its batch"),
      el(
        "ul.chips",
        shown.map(one =>
          el(
            "li",
            typeof one === "string"
              ? el("a.mono.small", { href: pageOf(one), title: one }, short(one))
              : el("span.dim.small", `another client's ${one}`),
          ),
        ),
      ),
      left > 0 &&
        button(`${count(left)} more`, {
          class: "tiny",
          click: () => {
            this._showAll = true;
            this._showOthers(step, token, known);
          },
        }),
    );
  }
}

function tokenRows(timeline, state, step, known) {
  const { token } = state;
  const classOf = pauseClass(token.pause_ms, timeline.usualPauseMs);
  const wait = known.waits.get(state.n);
  const events = state.marks.map(
    mark =>
      ({
        preempted: "preempted",
        taken_over: `taken over by ${mark.who}`,
        admitted: `admitted by ${mark.who}`,
      })[mark.what],
  );
  if (token.missing) return [["missing", "Missing", "The log does not have this token."]];
  return [
    ["text", "Text", written(state, timeline)],
    ["id", "Id", token.token === null ? "" : String(token.token)],
    ["logprob", "Log-probability", token.score ? scored(token.score) : el("span.dim", "not asked for")],
    ["at", "Made", `${duration(token.at_ms)} after submit`],
    [
      "pause",
      "Pause",
      el(
        "span",
        { class: ["badge", ["", "info", "warn", "bad"][classOf]], title: PAUSE_CLASSES[classOf].says },
        pauseOf(token),
      ),
    ],
    ["why", "Why", wait ? wait.why.join(", and ") || nothingElse(wait, step) : ""],
    ["client", "To the client", toClient(token, timeline)],
    ["before", "Just before", events.join(", then ")],
    ["engine", "Engine", token.who],
    ["step", "Step", token.step],
    ["chunks", "Prefill", token.chunks ? `${token.chunks} ${token.chunks === 1 ? "chunk" : "chunks"} before it` : ""],
    ["drafted", "Draft", token.drafted ? "it was guessed, and needed no step of its own" : ""],
    ["length", "Context", state.length === null ? "" : `${count(state.length)} tokens with the prompt`],
    ["forward", "Forward pass", step ? duration(step.forward_ms) : ""],
    [
      "batch",
      "Batch",
      step
        ? `${count(step.rows)} ${step.rows === 1 ? "request" : "requests"}, ${count(step.tokens)} ${step.tokens === 1 ? "token" : "tokens"} computed`
        : "",
    ],
    ["room", "Engine load", step ? `${count(step.waiting)} waiting, ${count(step.pages_free)} pages free` : ""],
    [
      "numerics",
      "Numerics",
      state.admitted?.numerics ? el("span.mono.small", state.admitted.numerics) : "",
    ],
    ["entry", "Entry in the log", el("span.mono.small", token.id)],
  ];
}

function nothingElse(wait, step) {
  const isLong = step && step.forward_ms > wait.waited_ms / 2;
  return isLong ? "nothing else happened: the step itself took long" : "nothing else happened";
}

// When the client got a token, and which tokens with it.
function toClient({ client_at_ms: clientMs, at_ms: madeMs, client_pause_ms: pauseMs, commit, estimated }, { tokens }) {
  const late = `${duration(clientMs - madeMs)} later, ${duration(pauseMs)} after the one before`;
  const last = tokens.findLast(token => token.commit === commit).n;
  if (commit === last) return late;
  const together = `${late}; tokens ${commit} to ${last} were committed together (--commit-interval)`;
  return estimated ? `${together}, and when each was made is an estimate` : together;
}

function beforeRows(timeline) {
  return [
    ["state", "State", timeline.state],
    [
      "prompt",
      "Prompt",
      timeline.prompt_tokens === null
        ? `not counted${timeline.isOver ? "" : " yet"}`
        : `${count(timeline.prompt_tokens)} tokens`,
    ],
    ["tokenizer", "Tokenizer", whoOf(timeline, "tokenized")],
    ["frontend", "Frontend", whoOf(timeline, "submitted")],
  ];
}

const whoOf = ({ moments }, event) => moments.find(({ what }) => what === event)?.who ?? "";

function written({ added, token }, { tokens }) {
  if (added) return el("code.token", visible(added));
  const last = tokens.findLast(each => each.id === token.id); // of the tokens that a step with drafts has made
  const why = last.n > token.n ? `told with token ${last.n}, of the same step` : "it is special, or a character or a stop string is incomplete";
  const none = el("span.dim", `not shown: ${why}`);
  return token.score?.text ? el("span", el("code.token", visible(token.score.text)), " ", none) : none;
}

function scored(score) {
  const best = (score.top ?? []).map(each => `${visible(each.text ?? String(each.token))} ${each.logprob.toFixed(3)}`);
  const said = `${score.logprob.toFixed(4)} (${(100 * Math.exp(score.logprob)).toPrecision(3)} %)`;
  return best.length ? el("span", said, el("span.dim.small", `; most probable: ${best.join(", ")}`)) : said;
}

// Return a text with its invisible characters written out.
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

// Return the part of a uid that tells it from its neighbours.
export function short(uid) {
  const [base, sibling] = uid.split(".");
  return `${base.slice(0, 8)}…${base.slice(-4)}${sibling === undefined ? "" : `.${sibling}`}`;
}
