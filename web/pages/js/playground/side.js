// One column: its model, its messages, and the requests that answer them. Two of them stand side by side.
//
//   const column = sideView(side, {name, models, onSettings, onChange, onBusy, showRequest, onEdit});
//   column.element   column.ask()   column.stop()   column.isBusy()   column.render()   column.refreshHead()

import { announce, button, el, everyFrame, fill, keep } from "../dom.js";
import { count } from "../format.js";
import { ask, isLeft, newAnswer, resume } from "./answer.js";
import { bodyOf } from "./request.js";
import { newId } from "./store.js";
import { messageView } from "./turns.js";

const NEAR_END_PX = 80;
const MOST_SAID = 600; // characters of an answer that screen readers are told
const EXAMPLES = [
  "Hello! Who are you?",
  "What can you do?",
  "Explain what a queue is, in two sentences.",
  "Write four lines about rain.",
];
const DEMO = "minisgl-demo";
const DEMO_EXAMPLES = ["What can you do?", "What is 17 + 25?", "Sort these numbers: 31, 4, 15, 9.", "Spell the word lantern."];
const OF_DEMO =
  "A small model to try the server with. It adds, compares, sorts, counts, spells, remembers what you tell it, writes JSON and calls tools; it knows little else.";
const NO_TEMPLATE =
  "This model has no chat template, so it cannot hold a conversation. Use /v1/completions, which continues a text.";

export function sideView(side, page) {
  const label = page.name ? `Column ${page.name}` : "Conversation";
  const model = el("select", {
    "aria-label": page.name ? `Model of column ${page.name}` : "Model",
    change: () => {
      side.model = model.value;
      page.onChange();
    },
  });
  const told = el("button", {
    type: "button",
    class: "button quiet tiny settings-line",
    title: "Change the settings",
    click: page.onSettings,
  });
  const list = el("div.messages", { tabindex: 0, role: "region", "aria-label": `${label}: messages` });
  const element = el(
    "section.side",
    { "aria-label": label },
    el("div.side-head", page.name && el("span.badge", page.name), model, told),
    list,
  );
  const views = new Map(); // by id of the message
  let running = null; // {controller, message}

  const acts = {
    isBusy: () => running !== null,
    isRunning: message => running?.message === message,
    isLast: message => side.messages.at(-1) === message,
    edit: page.onEdit,
    regenerate: message => {
      if (!running && page.mayAsk()) {
        answerTo(message);
        page.afterAction();
      }
    },
    choose: (message, at) => {
      message.shown = at;
      views.get(message.id).update();
      page.onChange();
    },
    answerCall: (message, results) => {
      if (running || !page.mayAsk()) return;
      side.messages.push(...results.map(({ callId, content }) => ({ id: newId(), role: "tool", callId, content })));
      askNow();
      page.afterAction();
    },
    showRequest: message =>
      page.showRequest(message.answers[message.shown], side.messages.slice(0, side.messages.indexOf(message))),
  };

  function refreshHead() {
    const names = page.models().map(({ id }) => id);
    if (side.model && !names.includes(side.model)) names.push(side.model);
    fill(
      model,
      [["", names[0] ?? "default"], ...names.slice(1).map(name => [name, name])].map(([value, text]) =>
        el("option", { value }, text),
      ),
    );
    model.value = side.model === names[0] ? "" : side.model;
    const set = Object.entries(side.fields).map(
      ([name, value]) => `${name} ${typeof value === "object" ? "…" : value}`,
    );
    told.textContent = [side.system.trim() && "system text", ...set].filter(Boolean).join(" · ") || "default settings";
  }

  function render() {
    const ids = new Set(side.messages.map(({ id }) => id));
    for (const id of views.keys()) if (!ids.has(id)) views.delete(id);
    const nodes = side.messages.map(message => {
      if (views.has(message.id)) views.get(message.id).update();
      else views.set(message.id, messageView(message, acts));
      return views.get(message.id).element;
    });
    keep(list, nodes.length ? nodes : [welcome()]);
  }

  function welcome() {
    const served = page.models().find(({ id }) => id === side.model) ?? page.models()[0];
    return el(
      "div.empty.welcome",
      el("h2", served ? served.id : "No model yet"),
      el(
        "p",
        served?.max_model_len
          ? `A context of ${count(served.max_model_len)} tokens. Conversations stay in this browser.`
          : "Conversations stay in this browser.",
      ),
      served?.id === DEMO && el("p", OF_DEMO),
      served?.has_chat_template === false && el("p", NO_TEMPLATE),
      !page.name &&
        served?.has_chat_template !== false &&
        el(
          "div.row.examples",
          (served?.id === DEMO ? DEMO_EXAMPLES : EXAMPLES).map(text => button(text, { class: "tiny", click: () => page.onExample(text) })),
        ),
    );
  }

  const atEnd = () => list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  const toEnd = () => {
    list.scrollTop = list.scrollHeight;
  };

  function askNow() {
    const message = { id: newId(), role: "assistant", answers: [], shown: 0 };
    side.messages.push(message);
    return answerTo(message);
  }

  /** Add answers to *message*, the last of the column, and ask for them. */
  async function answerTo(message) {
    const body = bodyOf(side, side.messages.slice(0, side.messages.indexOf(message)));
    const answers = Array.from({ length: Math.max(1, body.n ?? 1) }, () => newAnswer(side));
    message.shown = message.answers.length;
    message.answers.push(...answers);
    return run(message, answers, (all, listening) => ask(body, all, listening));
  }

  /** Read the rest of an answer that the page left. */
  function resumeLast() {
    const message = side.messages.at(-1);
    const left = message?.role === "assistant" ? message.answers.filter(isLeft) : [];
    if (left.length) run(message, left, (all, listening) => Promise.all(all.map(answer => resume(answer, listening))));
  }

  async function run(message, answers, begin) {
    const controller = new AbortController();
    const mine = (running = { controller, message });
    render();
    toEnd();
    page.onBusy();
    announce("Waiting for the answer.");
    const draw = everyFrame(() => {
      if (running !== mine) return;
      const follow = atEnd();
      views.get(message.id)?.update();
      if (follow) toEnd();
    });
    await begin(answers, { signal: controller.signal, onChange: draw, onUid: page.onChange });
    const follow = atEnd();
    running = null;
    render();
    if (follow) toEnd();
    const [answer] = answers;
    announce(
      answer.error
        ? `Error: ${answer.error}`
        : `${answer.stopped ? "Stopped." : "Answer:"} ${answer.content.slice(0, MOST_SAID)}`,
    );
    page.onBusy();
    page.onChange();
  }

  refreshHead();
  render();
  return {
    element,
    ask: askNow,
    stop: () => running?.controller.abort(),
    isBusy: () => running !== null,
    render,
    refreshHead,
    toEnd,
    resumeLast,
  };
}
