// Vercel's AI SDK with schemas of zod 4: text, streams, objects, tools, errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "minisgl", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const asked = { model: provider(name), temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const fail = { onError: ({ error }) => { throw error; } };

const whole = await generateText({ ...asked, system: "Be brief.", prompt: "What is 17 plus 25?" });
assert.equal(whole.text, "17 + 25 = 42");
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.outputTokens > 0);

const stream = streamText({ ...asked, ...fail, system: "Be brief.", prompt: "What is 17 plus 25?" });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(150) });
const person = { ...asked, schema: Person, prompt: "Write JSON for Ada, 42 years old." };
assert.deepEqual((await generateObject(person)).object, { name: "Ada", age: 42 });
const partial = streamObject({ ...person, ...fail });
for await (const part of partial.partialObjectStream) assert.equal(typeof part, "object");
assert.deepEqual(await partial.object, { name: "Ada", age: 42 });
const output = await generateText({ ...asked, output: Output.object({ schema: Person }), prompt: person.prompt });
assert.deepEqual(output.output, { name: "Ada", age: 42 });

// A record becomes `propertyNames`. What the demo model writes into it need not make sense.
const Everything = z.object({
  kind: z.enum(["a", "b"]),
  open: z.record(z.string(), z.number().int().min(0).max(9)),
  named: z.record(z.string().regex(/^[a-z]{1,4}$/), z.boolean()),
  short: z.record(z.string().max(4), z.boolean()),
  listed: z.partialRecord(z.enum(["x", "y"]), z.boolean()),
  pair: z.tuple([z.string().max(4), z.boolean()]),
  either: z.union([z.literal(1), z.null()]),
});
const all = await generateObject({ ...asked, maxOutputTokens: 400, schema: Everything, prompt: "Write JSON." });
assert.equal(typeof all.object.listed, "object");

const called = [];
const getWeather = tool({
  description: "Get the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: ({ city }) => (called.push(city), "sunny, 21 degrees"),
});
const tools = { ...asked, tools: { get_weather: getWeather }, stopWhen: stepCountIs(3), prompt: "What is the weather in Paris?" };
assert.equal((await generateText(tools)).text, "It is sunny and 21 degrees in Paris.");
const agent = streamText({ ...tools, ...fail });
const kinds = new Set();
for await (const part of agent.fullStream) kinds.add(part.type);
assert.equal(await agent.text, "It is sunny and 21 degrees in Paris.");
for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
assert.deepEqual(called, ["Paris", "Paris"]);
const forced = await generateText({ ...tools, stopWhen: stepCountIs(1), toolChoice: { type: "tool", toolName: "get_weather" } });
assert.deepEqual(forced.toolCalls.map((call) => call.input), [{ city: "Paris" }]);

await assert.rejects(generateText({ ...asked, temperature: 3, prompt: "Hello" }), (error) =>
  APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("temperature") && !error.isRetryable);
