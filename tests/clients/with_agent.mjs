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
  codex: join(HERE, "node_modules/.bin/codex"),
  opencode: join(HERE, "node_modules/opencode-linux-x64/bin/opencode"),
  qwen: join(HERE, "node_modules/.bin/qwen"),
};
const INSTRUCTIONS = "You are a coding agent.";
const CODEX = `model = "${MODEL}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "URL/v1"
env_key = "KEY"
wire_api = "responses"
`;

// How each is run, without a terminal, against the proxy at a URL.
const RUNS = {
  claude(url) {
    const more = {
      ANTHROPIC_BASE_URL: url,
      ANTHROPIC_AUTH_TOKEN: "none",
      ANTHROPIC_MODEL: MODEL,
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    };
    const args = ["-p", PROMPT, "--allowedTools", "Bash"];
    const slim = ["--bare", "--tools", "Bash", "--system-prompt", INSTRUCTIONS];
    return [["slim", [...args, ...slim], more], ["whole", args, more]];
  },
  codex(url) {
    writeFileSync(join(home, "config.toml"), CODEX.replace("URL", url));
    writeFileSync(join(home, "instructions.md"), INSTRUCTIONS);
    const args = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"];
    const settings = [`model_instructions_file="${home}/instructions.md"`, 'web_search="disabled"'];
    const without = ["features.multi_agent=false", "features.goals=false"];
    const slim = [...settings, ...without].flatMap(setting => ["-c", setting]);
    const more = { CODEX_HOME: home, KEY: "none" };
    return [["slim", [...args, ...slim, PROMPT], more], ["whole", [...args, PROMPT], more]];
  },
  opencode(url) {
    const options = { baseURL: `${url}/v1`, apiKey: "none" };
    const models = { model: { name: MODEL, limit: { context: 65536, output: 2048 } } };
    const chat = { npm: "@ai-sdk/openai-compatible", models, options };
    const provider = { chat, responses: { ...chat, npm: "@ai-sdk/openai" } };
    writeFileSync(join(work, "opencode.json"), JSON.stringify({ provider }));
    return ["chat", "responses"].map(name => [name, ["run", "--model", `${name}/model`, PROMPT], {}]);
  },
  qwen(url) {
    const more = { OPENAI_BASE_URL: `${url}/v1`, OPENAI_API_KEY: "none", OPENAI_MODEL: MODEL };
    return [["whole", ["--auth-type", "openai", "-y", "-p", PROMPT], more]];
  },
};

// The tools that run commands, and the argument with the command.
const TOOLS = { bash: "command", run_shell_command: "command", exec_command: "cmd" };
const DONE = { name: "done", schema: { const: "Done." } };

// What each API calls the same things.
const DIALECTS = {
  "/v1/chat/completions": {
    tool: each => each.function,
    schema: "parameters",
    result: '"role":"tool"',
    choice: name => ({ tool_choice: { type: "function", function: { name } }, max_tokens: 200 }),
    done: { tool_choice: "none", response_format: { type: "json_schema", json_schema: DONE }, max_tokens: 20 },
  },
  "/v1/messages": {
    tool: each => each,
    schema: "input_schema",
    result: '"type":"tool_result"',
    choice: name => ({ tool_choice: { type: "tool", name }, max_tokens: 32000, thinking: undefined }),
    done: { tool_choice: { type: "none" }, output_config: { format: { type: "json_schema", schema: DONE.schema } }, max_tokens: 20 },
  },
  "/v1/responses": {
    tool: each => each,
    schema: "parameters",
    result: '"type":"function_call_output"',
    choice: name => ({ tool_choice: { type: "function", name }, max_output_tokens: 200 }),
    done: { tool_choice: "none", text: { format: { type: "json_schema", ...DONE } }, max_output_tokens: 20 },
  },
};

// Make the answer a call of the tool that runs commands, and the one after it a few words.
function forced(body, dialect) {
  const tool = (body.tools ?? []).map(dialect.tool).find(each => each?.name?.toLowerCase() in TOOLS);
  if (!tool) return { ...body, ...dialect.done, tool_choice: undefined };
  if (JSON.stringify(body.messages ?? body.input).includes(dialect.result)) return { ...body, ...dialect.done };
  const command = TOOLS[tool.name.toLowerCase()];
  const { required = [], properties: given } = tool[dialect.schema];
  const value = name => (name === command ? COMMAND : given[name].type === "boolean" ? false : "A file");
  const names = [...new Set([command, ...required])];
  const properties = Object.fromEntries(names.map(name => [name, { const: value(name) }]));
  tool[dialect.schema] = { type: "object", properties, required: names, additionalProperties: false };
  return { ...body, ...dialect.choice(tool.name), temperature: 0 };
}

const proxy = http.createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  let body = Buffer.concat(parts);
  const dialect = DIALECTS[request.url.split("?")[0]];
  if (request.method === "POST" && dialect) body = JSON.stringify(forced(JSON.parse(body), dialect));
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
for (const [kind, args, more] of RUNS[agent](`http://127.0.0.1:${proxy.address().port}`)) {
  const env = { ...process.env, ...more, PWD: work, HOME: home, XDG_CONFIG_HOME: home, XDG_DATA_HOME: home };
  const child = spawn(BINARIES[agent], args, { cwd: work, env, stdio: ["ignore", "inherit", "inherit"] });
  const limit = setTimeout(() => child.kill("SIGKILL"), 240_000);
  const code = await new Promise(done => child.on("close", done));
  clearTimeout(limit);
  const file = join(work, "made.txt");
  const made = existsSync(file) ? readFileSync(file, "utf8").trim() : "";
  if (code !== 0 || made !== WORDS) throw new Error(`${agent}, ${kind}: ended with ${code}, made.txt has ${JSON.stringify(made)}`);
  writeFileSync(file, "");
  console.log(`${agent}, ${kind}: made the file`);
}
process.exit(0);
