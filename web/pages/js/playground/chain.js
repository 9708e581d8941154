// A stored response and all that it goes on after, as a conversation of the playground.

import { call } from "../api.js";
import { newAnswer } from "./answer.js";
import { newConversation, newId } from "./store.js";

const AT_ONCE = 100;

/** Return the conversation of the response *id*. Throws as `call` does, if there is none. */
export async function conversationOf(id) {
  const path = `/v1/responses/${encodeURIComponent(id)}`;
  const response = await call(path);
  const items = [];
  for (let page = { has_more: true }; page.has_more; ) {
    const after = items.length ? `&after=${encodeURIComponent(page.last_id)}` : "";
    page = await call(`${path}/input_items?order=asc&limit=${AT_ONCE}${after}`);
    items.push(...page.data);
  }
  const conversation = newConversation();
  const [side] = conversation.sides;
  const functions = response.tools.filter(({ type }) => type === "function");
  if (functions.length) side.fields.tools = functions.map(({ type, ...named }) => ({ type, function: named }));
  side.system = response.instructions ?? "";
  for (const item of [...items, ...response.output]) add(side, item);
  const last = side.messages.at(-1);
  if (last?.role === "assistant") last.answers[0].uid = id.replace(/^resp_/, "");
  conversation.title = (side.messages[0]?.content ?? id).split("\n")[0].slice(0, 60);
  return conversation;
}

function add(side, item) {
  const text = (item.content ?? []).map(part => part.text ?? "").join("\n");
  if (item.type === "message" && item.role === "system") side.system += (side.system ? "\n\n" : "") + text;
  else if (item.type === "message" && item.role === "user") side.messages.push({ id: newId(), role: "user", content: text });
  else if (item.type.endsWith("_output"))
    side.messages.push({ id: newId(), role: "tool", callId: item.call_id, content: item.output });
  else {
    if (side.messages.at(-1)?.role !== "assistant")
      side.messages.push({ id: newId(), role: "assistant", answers: [{ ...newAnswer(side), finish: "stop" }], shown: 0 });
    const [answer] = side.messages.at(-1).answers;
    if (item.type === "reasoning") answer.reasoning += text;
    else if (item.type === "message") answer.content += text;
    else answer.calls.push({ id: item.call_id, name: item.name, arguments: item.arguments ?? item.input });
    answer.finish = answer.calls.length ? "tool_calls" : "stop";
  }
}
