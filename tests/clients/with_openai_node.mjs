// OpenAI's library for JavaScript: models, chat, completions, streams, errors, leaving a stream.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Tell me how a log remembers." }], temperature: 0, max_tokens: 16 };

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert.deepEqual(names, [model]);
assert.equal((await client.models.retrieve(model)).id, model);

const whole = await client.chat.completions.create(asked);
assert.ok(whole.choices[0].message.content);
assert.ok(whole._request_id);

let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const helper = client.chat.completions.stream(asked);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const told = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2, n: 2 });
assert.deepEqual(told.choices.map((choice) => choice.index), [0, 1]);
assert.equal(told.choices[0].logprobs.content[0].top_logprobs.length, 2);

const completion = await client.completions.create({ model, prompt: ["Once", "Twice"], max_tokens: 8, temperature: 0 });
assert.deepEqual(completion.choices.map((choice) => choice.index), [0, 1]);
let first = "";
for await (const chunk of await client.completions.create({ model, prompt: "Once", max_tokens: 8, temperature: 0, stream: true }))
  first += chunk.choices[0].text;
assert.equal(first, completion.choices[0].text);

await assert.rejects(client.chat.completions.create({ ...asked, temperature: 3 }), (error) =>
  error instanceof OpenAI.BadRequestError && error.param === "temperature" && Boolean(error.requestID));
await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), (error) =>
  error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
await assert.rejects(client.embeddings.create({ model, input: "a" }), (error) =>
  error instanceof OpenAI.NotFoundError && error.code === "not_implemented");

const endless = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const chunk of endless) if (chunk.choices[0].delta.content) break; // which leaves it
