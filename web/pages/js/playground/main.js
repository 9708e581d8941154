// The playground: which conversation is open, its one or two columns, and the field to type in.

import { apiKey, call, explain, onKeyChange } from "../api.js";
import { announce, ask, button, el, fill, find, ticked } from "../dom.js";
import { frame } from "../frame.js";
import { inTab } from "../storage.js";
import { isLeft, wholeBody } from "./answer.js";
import { conversationOf } from "./chain.js";
import { makeDrawers } from "./drawers.js";
import { readSchemas } from "./fields.js";
import { conversationList } from "./list.js";
import { bodyOf } from "./request.js";
import { showRequest } from "./request_dialog.js";
import { settingsPanel } from "./settings.js";
import { sideView } from "./side.js";
import { newConversation, newId, newSide, openStore } from "./store.js";

const TITLE_LENGTH = 60;
const READ_AGAIN_MS = 2000;

const state = { store: null, conversations: [], current: null, models: [], schemas: null, problem: "", columns: [] };
const input = el("textarea", {
  id: "question",
  rows: 1,
  placeholder: "Ask something",
  "aria-label": "Question",
  "aria-describedby": "keys",
});
const send = button("Send", { icon: "send", class: "primary", click: submit });
const stop = button("Stop", { icon: "stop", class: "danger", hidden: true, click: stopAll });
const problem = el("div.notice.bad", { role: "alert", hidden: true });
const sides = el("div.sides");
const compare = button("Side by side", { icon: "columns", class: "quiet", click: toggleColumns });
const drawers = makeDrawers({ conversations: ["Conversations", "list"], settings: ["Settings", "sliders"] });
const list = conversationList(drawers.conversations.panel, {
  all: () => state.conversations,
  current: () => state.current,
  open: conversation => {
    open(conversation);
    drawers.closeWhereNarrow();
    input.focus();
  },
  add: () => {
    open(fresh());
    drawers.closeWhereNarrow();
    input.focus();
  },
  closeButton: () => drawers.conversations.closeButton(),
  remove: async conversation => {
    state.conversations = state.conversations.filter(one => one !== conversation);
    await state.store.remove(conversation.id);
    if (state.current === conversation) open(state.conversations.at(-1) ?? fresh());
    else list.show();
    announce("Deleted.");
  },
  rename: (conversation, title) => {
    conversation.title = title;
    save(conversation);
    list.show();
  },
  take: async found => {
    for (const conversation of found) await state.store.put(conversation);
    state.conversations.push(...found);
    if (found.length) open(found.at(-1));
  },
});
const settings = settingsPanel(drawers.settings.panel, {
  sides: () => state.current.sides,
  schemas: () => state.schemas,
  problem: () => state.problem,
  closeButton: () => drawers.settings.closeButton(),
  onChange: () => {
    for (const column of state.columns) column.refreshHead();
    save(state.current);
  },
});

function fresh() {
  const unused = state.conversations.find(
    ({ title, sides: both }) => !title && both.every(({ messages }) => !messages.length),
  );
  if (unused) return unused;
  const made = newConversation(state.current);
  state.conversations.push(made);
  return made;
}

function open(conversation) {
  stopAll();
  state.current = conversation;
  inTab.set("minisgl.playground.open", conversation.id);
  const double = conversation.sides.length > 1;
  state.columns = conversation.sides.map((side, at) =>
    sideView(side, {
      name: double ? "AB"[at] : "",
      models: () => state.models,
      onSettings: () => {
        drawers.settings.show(true);
        settings.show(at);
      },
      onChange: () => {
        for (const column of state.columns) column.refreshHead();
        save(conversation);
      },
      onBusy: showBusy,
      onEdit: edit,
      onExample: text => {
        input.value = text;
        submit();
      },
      mayAsk,
      afterAction: () => input.focus(),
      showRequest: (answer, messages) => showRequest(bodyOf(answer.asked, messages), wholeBody(answer)),
    }),
  );
  fill(
    sides,
    state.columns.map(({ element }) => element),
  ).classList.toggle("double", double);
  for (const column of state.columns) {
    column.toEnd();
    column.resumeLast();
  }
  compare.setAttribute("aria-pressed", String(double));
  complain("");
  showBusy();
  list.show();
  settings.show(0);
}

function save(conversation) {
  conversation.changedMs = Date.now();
  state.store
    .put(structuredClone(conversation))
    .catch(error => complain(`The conversation could not be kept in this browser: ${error?.message ?? error}`));
}

const isBusy = () => state.columns.some(column => column.isBusy());

function showBusy() {
  const busy = isBusy();
  send.hidden = busy;
  stop.hidden = !busy;
  compare.disabled = busy;
}

function stopAll() {
  for (const column of state.columns) column.stop();
}

function complain(sentence) {
  problem.textContent = sentence;
  problem.hidden = !sentence;
}

/** Say whether a question can be sent now; if not, the user is told why. */
function mayAsk() {
  const wrong = settings.wrong();
  complain(wrong ? `Settings, ${wrong[0]}: ${wrong[1]}` : "");
  return !wrong;
}

function submit() {
  const text = input.value;
  if (!text.trim() || isBusy() || !mayAsk()) return;
  const message = { id: newId(), role: "user", content: text };
  if (!state.current.title) state.current.title = text.trim().split("\n")[0].slice(0, TITLE_LENGTH);
  input.value = "";
  grow();
  state.columns.forEach((column, at) => {
    state.current.sides[at].messages.push({ ...message });
    column.ask();
  });
  save(state.current);
  list.show();
  input.focus();
}

/** Replace a question in every column that has it, and ask again. */
function edit(message, text) {
  if (isBusy() || !mayAsk()) return;
  const edited = { id: newId(), role: "user", content: text };
  state.columns.forEach((column, n) => {
    const { messages } = state.current.sides[n];
    const at = messages.findIndex(({ id }) => id === message.id);
    if (at < 0) return;
    messages.splice(at, messages.length, { ...edited });
    column.ask();
  });
  save(state.current);
  input.focus();
}

function toggleColumns() {
  const { current } = state;
  const [one, other] = current.sides;
  const turn = () => {
    if (other) current.sides.pop();
    else current.sides.push(newSide(one));
    save(current);
    open(current);
    compare.focus();
  };
  if (!other || JSON.stringify(one.messages) === JSON.stringify(other.messages)) return turn();
  return ask(
    { title: "Close column B?", action: "Close column B", class: "danger" },
    turn,
    el("p.dim", "Its answers and settings are removed."),
  );
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight / 3)}px`;
}

function keys(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!drawers.closeByKey() && isBusy()) stopAll();
}

/** Read what the server serves, again and again while it does not answer or has no model yet. */
async function readServer() {
  const before = state.problem,
    hadForm = state.schemas !== null;
  let again = false;
  try {
    const [{ data }, schemas] = await Promise.all([call("/v1/models"), state.schemas ?? readSchemas()]);
    Object.assign(state, { models: data, schemas, problem: "" });
    again = !data.length;
  } catch (error) {
    state.problem = explain(error);
    again = error.status !== 401; // then the user has given no key, and is asked no more
  }
  for (const column of state.columns) {
    column.refreshHead();
    column.render();
  }
  if (!hadForm || state.problem !== before) settings.show();
  if (state.problem || before) complain(state.problem);
  if (again) setTimeout(readServer, READ_AGAIN_MS);
}

async function start() {
  frame("Playground");
  const question = el(
    "div.composer",
    problem,
    el(
      "div.write",
      input,
      button("Show the request", { icon: "code", text: false, class: "quiet", click: () => showDraft() }),
      send,
      stop,
    ),
    el("p.dim.small", { id: "keys" }, ticked("`Enter` sends, `Shift`+`Enter` starts a new line, `Esc` stops.", "kbd")),
  );
  const shade = el("div.shade", { click: drawers.closeWhereNarrow });
  fill(
    find("main"),
    el("h1.hidden-text", "Playground"),
    drawers.conversations.panel,
    el(
      "section.chat",
      { "aria-label": "Chat" },
      el("div.row.tools", drawers.conversations.toggle, el("span.grow"), compare, drawers.settings.toggle),
      sides,
      question,
    ),
    drawers.settings.panel,
    shade,
  );
  input.addEventListener("input", grow);
  input.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  addEventListener("keydown", keys);

  state.store = await openStore();
  state.conversations = await state.store.all();
  const last = inTab.get("minisgl.playground.open"); // without one the newest opens
  open(state.conversations.find(({ id }) => id === last) ?? fresh());
  drawers.place();
  if (!state.store.lasts)
    complain("This browser keeps no data for this page: conversations end with it. Export what you want to keep.");
  onKeyChange(() => {
    if (!apiKey() || !state.problem) return;
    complain("");
    readServer();
  });
  await readServer();
  const response = new URLSearchParams(location.search).get("response");
  if (response) await openResponse(response);
  input.focus();
}

/** Open a stored response and all that it goes on after. */
async function openResponse(id) {
  try {
    const conversation = await conversationOf(id);
    state.conversations.push(conversation);
    open(conversation);
    save(conversation);
    history.replaceState(null, "", "/"); // a reload opens the conversation that is here now
  } catch (error) {
    complain(`The response was not opened: ${explain(error)}`);
  }
}

/** Show what Send would send, of the first column; without a new question what was sent last. */
function showDraft() {
  const [side] = state.current.sides;
  const asked =
    input.value.trim() || !side.messages.length
      ? [{ role: "user", content: input.value.trim() ? input.value : "Hello!" }]
      : [];
  const last = side.messages.at(-1);
  const isOpen = last?.role === "assistant" && (!asked.length || last.answers.some(isLeft));
  showRequest(bodyOf(side, [...side.messages.slice(0, isOpen ? -1 : undefined), ...asked]));
}

start().catch(error => {
  complain(explain(error));
  throw error;
});
