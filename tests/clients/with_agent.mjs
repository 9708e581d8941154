// An agent makes a file by a call of a tool: node with_agent.mjs URL MODEL, beside the agent's package.
//
// Its model is too small to choose a tool. So a proxy in between forces the call: the schema of the tool that runs commands
// allows one value alone, and the answer must be a call of it. The agent runs the command, and sends its result back.

import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import http from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [, , URL_, MODEL] = process.argv;
const HERE = import.meta.dirname;
const WORDS = "made by an agent";
const COMMAND = `echo ${WORDS} > made.txt`;
const PROMPT = "Make a file made.txt with some words.";
const home = mkdtempSync(join(tmpdir(), "agent-home-"));
const work = mkdtempSync(join(tmpdir(), "agent-work-"));
const BINARIES = {
  claude: join(HERE, "node_modules/@anthropic-ai/claude-code-linux-x64/claude"),
  opencode: join(HERE, "node_modules/opencode-linux-x64/bin/opencode"),
  qwen: join(HERE, "node_modules/.bin/qwen"),
};
const SLIM = ["--bare", "--tools", "Bash", "--system-prompt", "You are a coding agent."];

// How each is run, without a terminal, against the proxy at a port.
function runs(agent, port) {
  const url = `http://127.0.0.1:${port}`;
  const anthropic = {
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_AUTH_TOKEN: "none",
    ANTHROPIC_MODEL: MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  };
  const openai = { OPENAI_BASE_URL: `${url}/v1`, OPENAI_API_KEY: "none", OPENAI_MODEL: MODEL };
  const claude = ["-p", PROMPT, "--allowedTools", "Bash"];
  if (agent === "claude") return [["slim", [...claude, ...SLIM], anthropic], ["whole", claude, anthropic]];
  if (agent === "qwen") return [["whole", ["--auth-type", "openai", "-y", "-p", PROMPT], openai]];
  const options = { baseURL: `${url}/v1`, apiKey: "none" };
  const model = { name: MODEL, limit: { context: 65536, output: 2048 } };
  const provider = { local: { npm: "@ai-sdk/openai-compatible", models: { model }, options } };
  writeFileSync(join(work, "opencode.json"), JSON.stringify({ provider }));
  return [["whole", ["run", "--model", "local/model", PROMPT], {}]];
}

// Make the answer a call of the tool that runs commands, and the one after it a few words.
function forced(body) {
  const isMessages = !("stream_options" in body) && "max_tokens" in body && body.tools?.[0]?.input_schema;
  const named = each => (isMessages ? each : each.function);
  const tool = (body.tools ?? []).map(named).find(each => /^(bash|run_shell_command)$/i.test(each?.name ?? ""));
  const schema = { const: "Done." };
  const done = isMessages
    ? { tool_choice: { type: "none" }, output_config: { format: { type: "json_schema", schema } } }
    : { tool_choice: "none", response_format: { type: "json_schema", json_schema: { name: "done", schema } } };
  if (!tool) return { ...body, ...done, tool_choice: undefined, max_tokens: 20 };
  const isDone = JSON.stringify(body.messages).includes(isMessages ? '"tool_result"' : '"role":"tool"');
  if (isDone) return { ...body, ...done, max_tokens: 20 };
  const key = isMessages ? "input_schema" : "parameters";
  const properties = { command: { const: COMMAND } };
  for (const name of tool[key].required ?? [])
    if (name !== "command") properties[name] = tool[key].properties[name].type === "boolean" ? { const: false } : { const: "A file" };
  tool[key] = { type: "object", properties, required: Object.keys(properties), additionalProperties: false };
  const choice = isMessages ? { type: "tool", name: tool.name } : { type: "function", function: { name: tool.name } };
  return { ...body, thinking: undefined, temperature: 0, max_tokens: isMessages ? 32000 : 200, tool_choice: choice };
}

const proxy = http.createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  let body = Buffer.concat(parts);
  if (request.method === "POST" && body.length) body = JSON.stringify(forced(JSON.parse(body)));
  const headers = { "content-type": "application/json", authorization: request.headers.authorization ?? "" };
  const path = request.url.startsWith("/v1") ? request.url.slice(3) : request.url;
  const answer = await fetch(URL_ + path, { method: request.method, headers, body: request.method === "POST" ? body : undefined });
  if (answer.status !== 200) console.error(`${path}: ${answer.status} ${(await answer.clone().text()).slice(0, 500)}`);
  response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") ?? "application/json" });
  for await (const piece of answer.body ?? []) response.write(piece);
  response.end();
});
await new Promise(done => proxy.listen(0, "127.0.0.1", done));

const agent = Object.keys(BINARIES).find(name => existsSync(BINARIES[name]));
for (const [kind, args, more] of runs(agent, proxy.address().port)) {
  const env = { ...process.env, ...more, PWD: work, HOME: home, XDG_CONFIG_HOME: home, XDG_DATA_HOME: home };
  const child = spawn(BINARIES[agent], args, { cwd: work, env, stdio: ["ignore", "inherit", "inherit"] });
  const limit = setTimeout(() => child.kill("SIGKILL"), 240_000);
  const code = await new Promise(done => child.on("close", done));
  clearTimeout(limit);
  const file = join(work, "made.txt");
  const made = existsSync(file) ? readFileSync(file, "utf8").trim() : "";
  if (made !== WORDS) throw new Error(`${agent}, ${kind}: ended with ${code}, made.txt has ${JSON.stringify(made)}`);
  writeFileSync(file, "");
  console.log(`${agent}, ${kind}: made the file`);
}
process.exit(0);
