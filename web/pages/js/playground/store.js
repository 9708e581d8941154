// Conversations stay in this browser: IndexedDB holds them, one record each. Files of them can be written and read.
// Where IndexedDB is off (some private windows), they live as long as the page.
//
// A conversation: {id, title, createdMs, changedMs, sides: [{model, system, fields, messages}]}
// A message: {id, role: "user", content}, {id, role: "tool", callId, content} or {id, role: "assistant", answers, shown}

import { newAnswer } from "./answer.js";

const FORMAT = "minisgl-conversations";
const MOST_FILE_BYTES = 64 * 1024 * 1024;

export const newId = () =>
  crypto.randomUUID
    ? crypto.randomUUID()
    : [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
export const newSide = (from = {}) => ({
  model: from.model ?? "",
  system: from.system ?? "",
  fields: structuredClone(from.fields ?? {}),
  messages: structuredClone(from.messages ?? []),
});

export function newConversation(from) {
  const now = Date.now();
  return {
    id: newId(),
    title: "",
    createdMs: now,
    changedMs: now,
    sides: (from?.sides ?? [{}]).map(side => newSide({ ...side, messages: [] })),
  };
}

export async function openStore() {
  let database = null;
  try {
    database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open("minisgl.playground", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(opening.error);
      opening.onblocked = () => reject(new Error("another tab blocks it"));
    });
  } catch {
    /* the page says so: lasts is false */
  }
  const act = (mode, action) =>
    new Promise((resolve, reject) => {
      const transaction = database.transaction("conversations", mode);
      const asked = action(transaction.objectStore("conversations"));
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  return {
    lasts: database !== null,
    all: async () =>
      database ? (await act("readonly", store => store.getAll())).filter(one => isConversation(one)) : [],
    put: async conversation => {
      if (database) await act("readwrite", store => store.put(conversation));
    },
    remove: async id => {
      if (database) await act("readwrite", store => store.delete(id));
    },
  };
}

export function asFile(conversations) {
  return new Blob([JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1)], {
    type: "application/json",
  });
}

/** Return the conversations of a file, with ids of their own. Throws with a sentence if it is not such a file. */
export async function fromFile(file) {
  if (file.size > MOST_FILE_BYTES)
    throw new Error(`${file.name} has ${file.size} bytes; a file of conversations has at most ${MOST_FILE_BYTES}.`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is not JSON: ${error.message}`);
  }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations))
    throw new Error(
      `${file.name} is not a file of conversations: expected "format": "${FORMAT}". Choose a file that Export wrote.`,
    );
  if (found.version !== 1)
    throw new Error(`${file.name} has version ${found.version} of the format; this page reads version 1.`);
  const bad = found.conversations.findIndex(one => !isConversation(one));
  if (bad >= 0) throw new Error(`${file.name}: conversation ${bad + 1} is damaged. Nothing was imported.`);
  return found.conversations.map(one => ({ ...one, id: newId(), sides: one.sides.map(newSide) }));
}

const isText = value => typeof value === "string";
const isNumber = value => value === null || typeof value === "number";
const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
const isList = (value, check) => Array.isArray(value) && value.every(check);

function isConversation(one) {
  return (
    isObject(one) &&
    isText(one.id) &&
    isText(one.title) &&
    typeof one.createdMs === "number" &&
    typeof one.changedMs === "number" &&
    isList(one.sides, isSide) &&
    one.sides.length >= 1 &&
    one.sides.length <= 2
  );
}

const isSettings = side => isObject(side) && isText(side.model) && isText(side.system) && isObject(side.fields);
const isSide = side => isSettings(side) && isList(side.messages, isMessage);

function isMessage(message) {
  if (!isObject(message) || !isText(message.id)) return false;
  if (message.role === "user") return isText(message.content);
  if (message.role === "tool") return isText(message.callId) && isText(message.content);
  return (
    message.role === "assistant" &&
    isList(message.answers, isAnswer) &&
    message.answers.length > 0 &&
    Number.isInteger(message.shown) &&
    message.shown >= 0 &&
    message.shown < message.answers.length
  );
}

const isScored = token => isObject(token) && isText(token.text) && isNumber(token.logprob);
const isUsage = usage =>
  usage === null ||
  (isObject(usage) && [usage.prompt, usage.output, usage.cached, usage.of].every(value => typeof value === "number"));

function isAnswer(answer) {
  return (
    isObject(answer) &&
    Object.keys(newAnswer({ model: "", system: "", fields: {} })).every(name => name in answer) &&
    [answer.content, answer.reasoning, answer.error, answer.note, answer.uid, answer.model].every(isText) &&
    isNumber(answer.firstMs) &&
    isNumber(answer.tookMs) &&
    isSettings(answer.asked) &&
    (answer.finish === null || isText(answer.finish)) &&
    isUsage(answer.usage) &&
    isList(answer.calls, call => isObject(call) && isText(call.id) && isText(call.name) && isText(call.arguments)) &&
    isList(answer.tokens, token => isScored(token) && isList(token.top, isScored))
  );
}
