// The body of a request, and the same request for a terminal and for Python. Knows no element of the page.

import { curl } from "../curl.js";

/** Return the body that asks *side* ({model, system, fields}) to answer *messages*. */
export function bodyOf(side, messages) {
  const body = { ...(side.model ? { model: side.model } : {}), messages: [] };
  if (side.system.trim()) body.messages.push({ role: "system", content: side.system });
  body.messages.push(...messages.flatMap(message => sent(message)));
  Object.assign(body, side.fields);
  body.stream = side.fields.stream ?? true;
  if (body.stream) body.stream_options = { include_usage: true };
  return body;
}

/** Return a message of a conversation as the API takes it; none for an answer that failed. */
function sent(message) {
  if (message.role === "user") return [{ role: "user", content: message.content }];
  if (message.role === "tool") return [{ role: "tool", tool_call_id: message.callId, content: message.content }];
  const answer = message.answers[message.shown];
  if (!answer || (!answer.content && !answer.calls.length)) return [];
  const calls = answer.calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  return [{ role: "assistant", content: answer.content || null, ...(calls.length ? { tool_calls: calls } : {}) }];
}

export const asCurl = (body, origin, withKey) =>
  curl(`${origin}/v1/chat/completions`, JSON.stringify(body, null, 2), { streams: body.stream, withKey });

// What OpenAI's client takes by name; the rest goes into extra_body.
const OPENAI = new Set(
  `model messages stream stream_options temperature top_p n stop seed max_tokens max_completion_tokens
  presence_penalty frequency_penalty logit_bias logprobs top_logprobs response_format tools
  tool_choice user metadata store service_tier safety_identifier prompt_cache_key reasoning_effort
  parallel_tool_calls`.split(/\s+/),
);

export function asPython(body, origin, withKey) {
  const given = { model: "default", ...body };
  const own = Object.entries(given).filter(([name]) => OPENAI.has(name));
  const extra = Object.entries(given).filter(([name]) => !OPENAI.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), 1)},`);
  const shown = body.stream
    ? [
        "for chunk in answer:",
        "    for choice in chunk.choices:",
        '        print(choice.delta.content or "", end="", flush=True)',
      ]
    : ["print(answer.choices[0].message.content)"];
  const key = withKey ? 'os.environ["MINISGL_API_KEY"]' : '"none"';
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    ...shown,
    "",
  ].join("\n");
}

function python(value, depth) {
  const indent = "    ".repeat(depth + 1),
    end = "    ".repeat(depth);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value))
    return value.length ? `[\n${value.map(item => `${indent}${python(item, depth + 1)},\n`).join("")}${end}]` : "[]";
  if (typeof value === "object") {
    const items = Object.entries(value);
    return items.length
      ? `{\n${items.map(([name, item]) => `${indent}${JSON.stringify(name)}: ${python(item, depth + 1)},\n`).join("")}${end}}`
      : "{}";
  }
  return JSON.stringify(value);
}
