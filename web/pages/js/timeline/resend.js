// From the first event of a request to a command that sends the same body again, seed included. web/wire/resend.py is the
// server's own way back; this one leaves out a few fields that do not change the answer.

import { curl } from "../curl.js";

const CHAT = "/v1/chat/completions",
  COMPLETIONS = "/v1/completions",
  GENERATE = "/generate";
const RECOMMENDED = new Set(["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]); // a model may have its own defaults
const DEFAULTS = {
  typical_p: 1,
  min_tokens: 0,
  presence_penalty: 0,
  frequency_penalty: 0,
  ignore_eos: false,
  include_stop_str_in_output: false,
  skip_special_tokens: true,
};

// Return the JSON of *text*; whole numbers too large for a number, such as seeds, become a BigInt.
export function parseExactly(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")
      ? BigInt(context.source)
      : value,
  );
}

// Return a command for a POSIX shell; "" if the request cannot be sent so.
export function curlOf(submitted, origin, withKey) {
  const body = bodyOf(submitted);
  if (!body) return "";
  const numbers = [];
  const json = JSON.stringify(
    body,
    (_, value) => (typeof value === "bigint" ? `@exact ${numbers.push(value) - 1}@` : value),
    2,
  ).replace(/"@exact (\d+)@"/g, (all, index) => String(numbers[index] ?? all));
  return curl(origin + submitted.endpoint, json, { streams: body.stream, withKey });
}

function bodyOf(submitted) {
  const said = sampling(submitted);
  const constraint = constraintOf(submitted.constraint);
  if (submitted.endpoint === CHAT) {
    if (submitted.prompt_ids?.length) return null; // it computes a chat again: a client can only send messages
    const asked = submitted.messages?.length ? { messages: submitted.messages } : { prompt: submitted.prompt ?? "" };
    const scores = said.logprobs === undefined ? {} : { logprobs: true, top_logprobs: said.logprobs };
    const templating = submitted.templating ?? {};
    const more = templating.continue_final_message ? { continue_final_message: true } : {};
    if (templating.tools?.length) more.tools = templating.tools;
    if (Object.keys(templating.variables ?? {}).length) more.chat_template_kwargs = templating.variables;
    return {
      model: submitted.model,
      ...asked,
      ...said,
      ...scores,
      ...length(submitted),
      ...constraint,
      ...more,
      ...shown(submitted),
    };
  }
  const prompt = submitted.prompt_ids?.length ? submitted.prompt_ids : (submitted.prompt ?? "");
  if (submitted.endpoint === COMPLETIONS) {
    return { model: submitted.model, prompt, ...said, ...length(submitted), ...constraint, ...shown(submitted) };
  }
  if (submitted.endpoint !== GENERATE) return null;
  if (!submitted.presentation?.whole_text) return { prompt, max_tokens: submitted.sampling.max_tokens ?? 16 };
  const { seed, min_tokens: fewest, logprobs: scores, include_stop_str_in_output: keep, ...params } = said;
  const given = { ...params, sampling_seed: seed, max_new_tokens: submitted.sampling.max_tokens };
  if (fewest) given.min_new_tokens = fewest;
  if (keep) given.no_stop_trim = true;
  const name = typeof prompt === "string" ? "text" : "input_ids";
  return {
    [name]: prompt,
    sampling_params: given,
    stream: submitted.presentation.stream === true,
    ...(scores === undefined ? {} : { return_logprob: true, top_logprobs_num: scores }),
  };
}

function sampling(submitted) {
  const said = {};
  for (const [name, value] of Object.entries(submitted.sampling)) {
    const isEmpty = value === null || (Array.isArray(value) && !value.length);
    if (
      name === "max_tokens" ||
      name === "prompt_logprobs" ||
      isEmpty ||
      (!RECOMMENDED.has(name) && DEFAULTS[name] === value)
    )
      continue;
    said[name] = name === "logit_bias" ? Object.fromEntries(value) : value;
  }
  return said;
}

function length(submitted) {
  const most = submitted.sampling.max_tokens;
  if (submitted.limit) return { [submitted.limit]: most };
  return most === null || most === undefined ? {} : { max_tokens: most };
}

function shown(submitted) {
  const said = {};
  if (submitted.presentation?.stream) said.stream = true;
  if (submitted.presentation?.include_usage) said.stream_options = { include_usage: true };
  if (submitted.priority) said.priority = submitted.priority;
  return said;
}

function constraintOf(constraint) {
  if (!constraint) return {};
  const member = { json: "json", regex: "regex", choice: "choice", grammar: "grammar" }[constraint.kind];
  const isJson = constraint.kind === "json" || constraint.kind === "choice";
  return { structured_outputs: { [member]: isJson ? JSON.parse(constraint.text) : constraint.text } };
}
