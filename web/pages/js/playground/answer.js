// One request and what comes back: folds chunks of a stream, or a whole body, into answers. Knows no element of a page.
//
// An answer: {content, reasoning, calls: [{id, name, arguments}], tokens: [{text, logprob, top: [{text, logprob}]}],
//   finish, error, note, stopped, uid, model, firstMs, tookMs, usage: {prompt, output, cached, of} or null, atMs,
//   asked: {model, system, fields}}
// *of* is the number of answers that the usage counts together. *note* says that the stream broke and is being resumed.
// A stream that breaks is resumed by its uid and the id of its last event, where it has ids; one that was left, from its
// start.
//
// *page* of both: {signal, onChange(), onUid()}. *onChange* is called after each change of the answers.

import { ApiError, call, events, explain, follow, pathOf, pause, request } from "../api.js";
import { newId } from "./store.js";

const MOST_TRIES = 30; // of a question that the server cannot take yet
const MOST_BREAKS = 9; // of its connection, before an answer begins

/** Return an empty answer of *side*, which remembers the settings that it was asked with. */
export function newAnswer({ model, system, fields }) {
  return {
    content: "",
    reasoning: "",
    calls: [],
    tokens: [],
    finish: null,
    error: "",
    note: "",
    stopped: false,
    uid: "",
    model,
    firstMs: null,
    tookMs: null,
    usage: null,
    atMs: Date.now(),
    asked: { model, system, fields: structuredClone(fields) },
  };
}

/** Send *body*; resolves, never rejects, when all *answers* have ended. */
export function ask(body, answers, page) {
  const began = performance.now();
  return listen(
    answers,
    page,
    () => performance.now() - began,
    async onNote => {
      const response = await taken(body, page.signal, onNote);
      const uid = response.headers.get("x-minisgl-uid") ?? "";
      answers.forEach((answer, n) => {
        answer.uid = uid && answers.length > 1 ? `${uid}.${n}` : uid;
      });
      page.signal.addEventListener("abort", () => cancel(uid), { once: true });
      page.onUid();
      if (response.headers.get("content-type")?.startsWith("text/event-stream"))
        return chunks(response, uid, page.signal, onNote);
      const whole = await response.json();
      for (const answer of answers) bodies.set(answer, whole);
      return [whole];
    },
  );
}

/** Send *body* until the server takes it: at its start, or while it has no room, it says 503. Under one key, all that is
 *  sent is one request, also if the connection breaks before the answer begins. */
async function taken(body, signal, onNote) {
  const headers = { "idempotency-key": newId(), "x-minisgl-event-ids": "1" };
  for (let left = MOST_TRIES, breaks = 0; ; left--) {
    try {
      return await request("/v1/chat/completions", { method: "POST", body, headers, signal });
    } catch (error) {
      const again = error.status === 0 ? ++breaks <= MOST_BREAKS : error.status === 503;
      if (!again || !left) throw error;
      onNote(error.status ? "The server cannot take it yet. Trying again." : "The connection broke. Asking again.");
      await pause(error.status ? Math.max(error.retryAfterMs, 1000) : Math.min(250 * breaks, 2000), signal);
      onNote("");
    }
  }
}

/** Read an *answer* that the page left before it was complete, from its start. The server has what was said to it. */
export function resume(answer, page) {
  const { uid, model, asked, atMs } = answer;
  Object.assign(answer, newAnswer(asked), { uid, model, atMs });
  if (!uid) answer.error = "The page was left before the server had the question.";
  return listen(
    [answer],
    page,
    () => null,
    async onNote => {
      // how long it took is not known any more
      page.signal.addEventListener("abort", () => cancel(uid), { once: true });
      return uid ? rest(uid, null, page.signal, onNote) : [];
    },
  );
}

export const isLeft = answer => answer.finish === null && !answer.error && !answer.stopped;

/** Return the body that came in one piece, or null. It is kept as long as the page. */
export const wholeBody = answer => bodies.get(answer) ?? null;
const bodies = new WeakMap();

/** Fold what *open* gives, an iterable of chunks, into *answers*; *elapsed* says how many ms have passed, or null. */
async function listen(answers, { signal, onChange }, elapsed, open) {
  const onNote = sentence => {
    for (const answer of answers) answer.note = sentence;
    onChange();
  };
  try {
    for await (const chunk of await open(onNote)) {
      fold(chunk, answers, elapsed);
      onChange();
    }
  } catch (error) {
    for (const answer of answers) {
      if (signal.aborted) answer.stopped = answer.finish === null;
      else if (answer.finish === null) answer.error = explain(error);
    }
  }
  for (const answer of answers) {
    answer.note = "";
    answer.tookMs ??= elapsed();
    if (signal.aborted && isLeft(answer)) answer.stopped = true;
    if (isLeft(answer)) answer.error = "The stream ended before the answer was complete.";
  }
  onChange();
}

function cancel(uid) {
  if (uid)
    call(pathOf(uid), { method: "DELETE", asks: false }).catch(() => {
      /* it has ended, or ends with its reader */
    });
}

async function* chunks(response, uid, signal, onNote) {
  let last = null,
    begun = false;
  try {
    for await (const { id, data } of events(response)) {
      last = id;
      begun = true;
      if (data === "[DONE]") return;
      yield parsed(data);
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError || !uid || (begun && !last)) throw error;
    onNote("The connection broke. Connecting again.");
    yield* rest(uid, last, signal, onNote);
  }
}

/** Read the frames of a request after the one with the id *last*, or all of them. */
async function* rest(uid, last, signal, onNote) {
  const onState = (state, sentence) => onNote(sentence);
  for await (const { data } of follow(`${pathOf(uid)}/events`, { signal, lastEventId: last, onState })) {
    if (data === "[DONE]") return;
    yield parsed(data);
  }
}

function parsed(data) {
  const chunk = JSON.parse(data);
  if (chunk.error)
    throw new ApiError(chunk.error.message ?? "The request failed.", { code: chunk.error.code ?? null, status: 500 });
  return chunk;
}

/** Fold a chunk of a stream, or a whole body, into the answers. */
function fold(chunk, answers, elapsed) {
  for (const choice of chunk.choices ?? []) {
    const answer = answers.length > 1 ? answers[choice.index] : answers[0];
    if (!answer) continue;
    const said = choice.delta ?? choice.message ?? {};
    answer.model = chunk.model ?? answer.model;
    answer.content += said.content ?? "";
    answer.reasoning += said.reasoning_content ?? said.reasoning ?? "";
    for (const call of said.tool_calls ?? []) foldCall(answer.calls, call);
    for (const token of choice.logprobs?.content ?? []) {
      answer.tokens.push({
        text: token.token,
        logprob: token.logprob,
        top: (token.top_logprobs ?? []).map(({ token: text, logprob }) => ({ text, logprob })),
      });
    }
    if (said.content || said.reasoning_content || said.reasoning || said.tool_calls?.length) {
      answer.firstMs ??= elapsed();
      answer.tookMs = elapsed();
    }
    answer.finish = choice.finish_reason ?? answer.finish;
  }
  if (chunk.usage) {
    const usage = {
      prompt: chunk.usage.prompt_tokens,
      output: chunk.usage.completion_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      of: answers.length,
    };
    for (const answer of answers) answer.usage = usage;
  }
}

function foldCall(calls, { index, id, function: called }) {
  const at = index ?? calls.length;
  const call = (calls[at] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  call.name += called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

/** Return output tokens per second after the first one, or null where that is not known. The tokens of a call come before
 *  the first that is seen of it. */
export function rate({ usage, firstMs, tookMs, calls }) {
  if (!usage || calls.length || usage.of > 1 || usage.output < 2 || firstMs === null || tookMs <= firstMs) return null;
  return (usage.output - 1) / ((tookMs - firstMs) / 1000);
}
