// How the pages speak with the server: the API key, errors as sentences, and server-sent events over fetch.
//
//   await call("/v1/models")     the JSON of an answer; {method, body, signal, headers} as fetch, body as an object;
//        asks: false throws a 401 at once
//   const response = await request(path, options)   the Response itself, after its status was checked
//   for await (const {id, event, data} of events(response))   its server-sent events; data is text
//   for await (const {id, event, data} of follow(path, {signal, lastEventId, again, onState}))
//        the events of a GET, which connects again after a broken connection and goes on after the last id.
//        again: "broken" (default) ends where the server ends the stream; "always" connects again then, too.
//        onState("open", "") and onState("waiting", sentence) tell whether it is connected.
//   catch (error) { explain(error) }                a sentence for the user; ApiError has status, code, param
//   apiKey(), setApiKey(text), onKeyChange(listener), needsKey()
//   pageOf(uid), pathOf(uid)      the page of a request, and its path in the API
//
// A 401 asks the user for a key (js/frame.js gives the dialog through askWith) and tries again, until the key is right
// or the user gives none. All requests share one dialog. The key stays in sessionStorage: it ends with the tab.
// EventSource is not used, because it cannot send a key.

import { inTab } from "./storage.js";

const KEY = "minisgl.key";
const WAITS_MS = [300, 600, 1200, 2500, 5000];
const listeners = new Set();
let needed = false;
let ask = async () => null;
let asking = null;

export const pageOf = uid => `/requests/${encodeURIComponent(uid)}`;
export const pathOf = uid => `/v1${pageOf(uid)}`;

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterMs = 0 } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, code, param, retryAfterMs });
  }
}

export const apiKey = () => inTab.get(KEY);

export function setApiKey(text) {
  inTab.set(KEY, text);
  for (const listener of listeners) listener();
}

export const needsKey = () => needed;
export const onKeyChange = listener => {
  listeners.add(listener);
};

/** *asker(sentence)* asks the user for a key and returns it, or null if the user gives none. */
export const askWith = asker => {
  ask = asker;
};

export async function request(path, { asks = true, ...options } = {}) {
  for (;;) {
    const tried = apiKey();
    try {
      return await once(path, options);
    } catch (error) {
      if (error.status !== 401 || !asks) throw error;
      needed = true;
      for (const listener of listeners) listener();
      if (apiKey() !== tried) continue; // another one was given meanwhile
      if (!tried) error.message = "Enter an API key of this server. It stays in this tab.";
      asking ??= ask(error.message).finally(() => {
        asking = null;
      });
      const given = await asking;
      if (!given) throw error;
      setApiKey(given);
    }
  }
}

export async function call(path, options = {}) {
  const response = await request(path, options);
  return response.status === 204 ? null : response.json();
}

async function once(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  const key = apiKey();
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : typeof body === "string" ? body : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. It may be down or restarting; try again.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const retryAfterMs = 1000 * (Number(response.headers.get("retry-after")) || 0);
  let said = null;
  try {
    said = JSON.parse(await response.text()).error;
  } catch {
    /* not ours, such as a proxy's page */
  }
  const message = said?.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(message, {
    status: response.status,
    code: said?.code ?? null,
    param: said?.param ?? null,
    retryAfterMs,
  });
}

export function explain(error) {
  if (error instanceof ApiError)
    return error.retryAfterMs ? `${error.message} Try again in ${error.retryAfterMs / 1000} s.` : error.message;
  if (error?.name === "AbortError") return "Stopped.";
  if (error instanceof TypeError && /fetch|network|load/i.test(error.message))
    return "The connection to the server broke.";
  return `The page failed: ${error?.message ?? error}`;
}

/** Server-sent events of a response, as the HTML standard reads them: fields end with CR, LF or both. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "",
    event = "",
    data = [],
    id = null,
    afterReturn = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      let text = rest + value;
      if (afterReturn && text.startsWith("\n")) text = text.slice(1);
      afterReturn = text.endsWith("\r");
      const lines = text.split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { id, event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
          continue;
        }
        const at = line.indexOf(":");
        const name = at < 0 ? line : line.slice(0, at);
        const said = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
        if (name === "data") data.push(said);
        else if (name === "event") event = said;
        else if (name === "id" && !said.includes("\0")) id = said;
      }
    }
  } finally {
    reader.cancel().catch(() => {
      /* it is over already */
    });
  }
}

export async function* follow(path, { signal, lastEventId = null, again = "broken", onState = () => {} } = {}) {
  let last = lastEventId;
  for (let failed = 0; !signal?.aborted; failed++) {
    let sentence,
      waitMs = WAITS_MS[Math.min(failed, WAITS_MS.length - 1)];
    try {
      const response = await request(path, {
        signal,
        headers: { accept: "text/event-stream", ...(last ? { "last-event-id": last } : {}) },
      });
      onState("open", "");
      for await (const found of events(response)) {
        failed = 0;
        last = found.id ?? last;
        yield found;
        if (found.data === "[DONE]") return;
      }
      if (again !== "always") return;
      sentence = "The server ended the stream. Connecting again.";
    } catch (error) {
      if (signal?.aborted) return;
      if (error instanceof ApiError && error.status && error.status < 500 && error.status !== 429) throw error;
      if (!(error instanceof ApiError) && !(error instanceof TypeError) && error.name !== "NetworkError") throw error;
      sentence = error.status ? explain(error) : "The server does not answer. Connecting again.";
      waitMs = Math.max(waitMs, Math.min(error.retryAfterMs ?? 0, 10_000));
    }
    onState("waiting", sentence);
    await pause(waitMs, signal);
  }
}

/** Wait, at most until *signal* aborts. */
export function pause(ms, signal) {
  return new Promise(resolve => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });
}
