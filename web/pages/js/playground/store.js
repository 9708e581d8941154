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

// What conversations of a file have to be: a shape is a check, a list of one shape, or an object whose fields have shapes.
const fits = (value, shape) => {
  if (typeof shape === "function") return shape(value);
  if (Array.isArray(shape)) return Array.isArray(value) && value.every(each => fits(each, shape[0]));
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  return isObject && Object.entries(shape).every(([name, each]) => fits(value[name], each));
};
const text = value => typeof value === "string";
const number = value => typeof value === "number";
const orNull = shape => value => value === null || fits(value, shape);
const has = (shape, check) => value => fits(value, shape) && check(value);

const SETTINGS = { model: text, system: text, fields: {} };
const SCORED = { text, logprob: orNull(number) };
const ANSWER = has(
  {
    ...{ content: text, reasoning: text, error: text, note: text, uid: text, model: text, finish: orNull(text) },
    ...{ firstMs: orNull(number), tookMs: orNull(number), asked: SETTINGS },
    usage: orNull({ prompt: number, output: number, cached: number, of: number }),
    calls: [{ id: text, name: text, arguments: text }],
    tokens: [{ ...SCORED, top: [SCORED] }],
  },
  answer => Object.keys(newAnswer({ model: "", system: "", fields: {} })).every(name => name in answer),
);
const MESSAGES = {
  user: { content: text },
  tool: { callId: text, content: text },
  assistant: has({ answers: [ANSWER], shown: Number.isInteger }, ({ answers, shown }) => shown in answers),
};
const MESSAGE = has({ id: text, role: role => Object.hasOwn(MESSAGES, role) }, one => fits(one, MESSAGES[one.role]));
const CONVERSATION = has(
  { id: text, title: text, createdMs: number, changedMs: number, sides: [{ ...SETTINGS, messages: [MESSAGE] }] },
  ({ sides }) => sides.length === 1 || sides.length === 2,
);
const isConversation = one => fits(one, CONVERSATION);
