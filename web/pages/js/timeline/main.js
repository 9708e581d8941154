// /requests/<uid>: the timeline of one request, live or ended. It holds one cursor, the number of a token, which the slider,
// the keys and the chart move.

import { ApiError, apiKey, call, explain, follow, pageOf, pathOf, pause } from "../api.js";
import { curl } from "../curl.js";
import { letters, requeueButton } from "../dead.js";
import { announce, button, copy, el, everyFrame, fill, find, table, toast } from "../dom.js";
import { frame } from "../frame.js";
import { About } from "./about.js";
import { Chart } from "./chart.js";
import { stepsOf, Timeline } from "./model.js";
import { Comparison } from "./replay.js";
import { Slider } from "./slider.js";
import { AnswerText, TokenState } from "./state.js";

const STEPS_MS = 3000; // while the request runs, the journal is read so often
const LIVE_MS = 250; // and its bars grow so often
const ADDRESS_MS = 300; // the address names the token when the cursor rests: browsers refuse many changes at once
const RETRY_MS = 2000;
const PASSING = new Set(["shutting_down", "overloaded"]); // codes of errors of the server, not of the request

class RequestPage {
  constructor(main, name) {
    this._main = main;
    this._name = name;
    this._n = 0;
    this._wanted = null; // the token that the address names, until it has come
    this._follows = true; // the cursor stays at the newest token
    this._known = { steps: new Map(), waits: new Map(), sentence: "" };
    this._arrivedAt = 0;
    this._naming = 0;
    this._draw = everyFrame(() => this._drawNow());
  }

  async open() {
    if (this._name.includes("/")) return this._showAbsent(new ApiError("No request has a slash in its id."));
    for (;;) {
      try {
        const story = await call(pathOf(this._name));
        if (story.siblings) return this._showFamily(story);
        return this._run(story.uid);
      } catch (error) {
        const passes = error instanceof TypeError || error.status === 0 || error.status >= 500;
        if (!passes) return this._showAbsent(error);
        fill(
          this._main,
          el("h1", "Request"),
          el("p.notice.warn", { role: "status" }, `${explain(error)} Trying again.`),
        );
        await pause(RETRY_MS);
      }
    }
  }

  // One request

  async _run(uid) {
    this._timeline = new Timeline(uid);
    document.title = `${uid} · MiniSGL`;
    this._about = new About(this._timeline, { onToken: n => this._move(n) });
    this._chart = new Chart({ onPick: n => this._move(n) });
    this._slider = new Slider({ onMove: n => this._move(n) });
    this._text = new AnswerText();
    this._state = new TokenState();
    this._actions = this._makeActions();
    this._notice = el("p.notice.warn", { role: "status", hidden: true });
    this._again = el("div");
    this._chart.node.append(this._slider.node);
    fill(
      this._main,
      el("div.row.head", this._about.title, el("span.grow"), this._actions.node),
      this._about.error,
      this._notice,
      this._about.facts,
      this._chart.node,
      el("div.sides", this._text.node, this._state.node),
      this._again,
      this._about.siblings,
      this._about.moments,
      this._about.asked,
    );
    this._listenToKeys();
    const wanted = Number(/^#token=(\d+)$/.exec(location.hash)?.[1] ?? NaN);
    if (!Number.isNaN(wanted)) [this._wanted, this._follows] = [wanted, false];
    const ticking = setInterval(() => {
      if (!this._timeline.isOver) this._draw();
    }, LIVE_MS);
    const reading = setInterval(() => this._readSteps(), STEPS_MS);
    this._readSteps();
    try {
      await hearAll(
        this._timeline,
        () => {
          this._arrivedAt = performance.now();
          this._draw();
        },
        sentence => this._tell(sentence),
      );
    } catch (error) {
      this._tell(explain(error));
    }
    clearInterval(ticking);
    clearInterval(reading);
    this._draw();
    await this._readSteps();
    if (this._timeline.asked?.replay_of) this._offerComparison(this._timeline.asked.replay_of);
    if (this._timeline.state === "failed") this._findLetter(uid, this._actions.more);
  }

  _tell(sentence) {
    this._notice.hidden = !sentence;
    this._notice.textContent = sentence;
  }

  _drawNow() {
    const timeline = this._timeline;
    const last = timeline.tokens.length;
    this._n = this._follows ? last : Math.min(this._wanted ?? this._n, last);
    if (this._n === this._wanted) this._wanted = null;
    const nowMs = timeline.lastMs + (timeline.isOver ? 0 : performance.now() - this._arrivedAt);
    this._chart.show(timeline, nowMs, this._known.steps);
    this._about.show(nowMs);
    this._actions.show(timeline);
    this._showToken();
  }

  _showToken() {
    const state = this._timeline.at(this._n);
    this._chart.moveTo(this._n);
    this._slider.show(this._timeline, state);
    this._text.show(state);
    this._state.show(this._timeline, state, this._known);
  }

  _move(n) {
    const last = this._timeline.tokens.length;
    this._wanted = null;
    this._n = Math.max(0, Math.min(n, last));
    this._follows = this._n === last && !this._timeline.isOver;
    clearTimeout(this._naming);
    this._naming = setTimeout(
      () => history.replaceState(null, "", this._follows ? location.pathname : `#token=${this._n}`),
      ADDRESS_MS,
    );
    this._showToken();
  }

  _listenToKeys() {
    document.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog"))
        return;
      const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
      const zooms = { "+": 2, "=": 2, "-": 0.5, 0: 0 };
      if (steps) this._move(this._n + steps * (event.shiftKey ? 10 : 1));
      else if (event.key in zooms) this._chart.zoom(zooms[event.key]);
      else return;
      event.preventDefault();
    });
  }

  async _readSteps() {
    if (document.hidden && !this._timeline.isOver) return;
    try {
      const answer = await call(`${pathOf(this._timeline.uid)}/steps`);
      const sentence = answer.complete ? "" : "The journal of the engine no longer has the step of this token.";
      this._known = { steps: stepsOf(answer), waits: new Map(answer.waits.map(wait => [wait.n, wait])), sentence };
    } catch (error) {
      this._known = { ...this._known, sentence: explain(error) };
    }
    this._draw();
  }

  // What one can do with it

  _makeActions() {
    const cached = el("input", { type: "checkbox" });
    const act = work => async () => {
      try {
        await work();
      } catch (error) {
        this._tell(explain(error));
      }
    };
    const replay = button("Replay", {
      icon: "again",
      title: "Compute it again on this server, and compare",
      click: act(() => this._replay(cached.checked)),
    });
    const cancel = button("Cancel", { icon: "stop", class: "danger", click: act(() => this._cancel()) });
    const again = button("Copy as curl", {
      icon: "copy",
      click: act(() => copy(curlOf(this._timeline))),
    });
    const more = el("span.row");
    const node = el(
      "div.row.actions",
      cancel,
      replay,
      el("label.switch.small", { title: "Otherwise all of its prompt is computed again" }, cached, "with prefix cache"),
      again,
      more,
    );
    const show = timeline => {
      cancel.hidden = timeline.isOver;
      replay.disabled = timeline.tokens.length === 0;
      again.disabled = !timeline.asked?.body;
    };
    return { node, show, more };
  }

  async _cancel() {
    const answer = await call(pathOf(this._timeline.uid), { method: "DELETE" });
    toast(answer.cancelled ? "Cancelled" : "It had ended already");
  }

  async _replay(cached) {
    const path = `${pathOf(this._timeline.uid)}/replay`;
    const { uid } = await call(path, { method: "POST", body: { cached } });
    await this._compare(this._timeline, new Timeline(uid));
  }

  _offerComparison(of) {
    fill(
      this._again,
      el(
        "p.notice.row",
        "This request is a replay of another one.",
        button("Compare them", { icon: "columns", click: () => this._compare(new Timeline(of), this._timeline) }),
      ),
    );
  }

  async _compare(recorded, again) {
    const shown = new Comparison(recorded, again);
    fill(this._again, shown.node);
    shown.node.scrollIntoView({ block: "nearest" });
    const draw = everyFrame(() => shown.show());
    draw();
    try {
      await Promise.all(
        [recorded, again]
          .filter(each => each !== this._timeline)
          .map(each => hearAll(each, draw, sentence => this._tell(sentence))),
      );
    } catch (error) {
      this._tell(explain(error));
    }
    draw();
  }

  // Offer to send it again if it is a dead letter. Only the admin may see these; others are told nothing.
  async _findLetter(uid, node) {
    const found = await letters({ uid }).catch(() => null); // then it is not offered
    const [letter] = found?.dead ?? [];
    if (!letter) return;
    const send = requeueButton(letter, made => location.assign(pageOf(made)));
    fill(node, el("span.badge.bad", `dead letter of ${letter.stage} after ${letter.deaths} deaths`), send);
  }

  // No request, or several

  _showAbsent(error) {
    const madeMs = /^(chatcmpl-|cmpl-)?[0-9a-f]{12}7[0-9a-f]{3}[89ab]/.test(this._name)
      ? parseInt(this._name.replace(/^\w*-/, "").slice(0, 12), 16)
      : null;
    const letter = el("div.row");
    fill(
      this._main,
      el("h1", "Request ", el("span.mono.uid", this._name)),
      el("p.notice.bad", { role: "alert" }, explain(error)),
      madeMs !== null && el("p", `Its uid was made on ${new Date(madeMs).toLocaleString("en-GB")}.`),
      letter,
      el("p", "The ", el("a", { href: "/pipeline" }, "pipeline"), " lists the newest requests."),
    );
    if (madeMs !== null && error.status === 404) this._findLetter(this._name, letter);
    document.title = "Unknown request · MiniSGL";
    announce(explain(error));
  }

  _showFamily(story) {
    document.title = `${story.uid} · MiniSGL`;
    const told = new Map(story.requests.map(each => [each.uid, each]));
    const row = uid => {
      const each = told.get(uid);
      return el(
        "tr",
        el("td", el("a.mono", { href: pageOf(uid) }, uid)),
        el("td", each ? each.state : "gone"),
        el("td.number", each ? String(each.completion_tokens) : ""),
        el("td", each ? each.text.slice(0, 120) : ""),
      );
    };
    fill(
      this._main,
      el("h1", "Siblings ", el("span.mono.uid", story.uid)),
      el("p", `One body made these ${story.siblings.length} requests. Each has a timeline of its own.`),
      el("div.card.scroll", table(["uid", "state", "tokens", "text"], story.siblings.map(row))),
    );
  }
}

// Read the story of a request into its timeline, and go on while it runs, also after a restart of the server.
async function hearAll(timeline, onEvent, onTrouble) {
  const path = `${pathOf(timeline.uid)}/events?format=story`;
  const onState = (state, sentence) => onTrouble(state === "waiting" ? `${sentence} Trying again.` : "");
  for (let again = true; again; ) {
    again = false;
    for await (const { id, data } of follow(path, { lastEventId: timeline.lastId || null, onState })) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error && !told.state) {
        const { message, code } = told.error;
        if (!PASSING.has(code)) throw new ApiError(message, { code });
        onTrouble(`${message} Trying again.`);
        await pause(RETRY_MS);
        again = true;
        break;
      }
      timeline.take(id, told);
      onEvent();
      if (timeline.isOver) return;
    }
  }
}

function curlOf({ endpoint, asked }) {
  const streams = JSON.parse(asked.body).stream;
  return curl(location.origin + endpoint, asked.body, { streams, withKey: apiKey() !== null });
}

frame("", () => location.reload());
const [, name = ""] = /^\/requests\/(.*)$/.exec(location.pathname) ?? [];
let given = name;
try {
  given = decodeURIComponent(name);
} catch {
  /* it is no text in UTF-8: shown as it is */
}
new RequestPage(find("#main"), given).open();
