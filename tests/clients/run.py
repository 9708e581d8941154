"""What other people's programs say to the server: `make clients`. Each in an environment of its own, their pins clash.

Sets up `.clients/<name>` for each (a venv, or a folder of node modules), runs every program against a server and says
how each ended; with names as arguments, those alone. Programs that call tools, or need a tokenizer that they can read,
talk with the demo model; the others with a small random one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support.checkpoints import make_checkpoint
from support.dialects import make_tokenizer
from support.servers import Server, serve

from stages.generate.model.checkpoint import DEMO_FOLDER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".clients"
MODEL = "org/small-model"
PATIENCE_S = 600
LONG_CONTEXT = 65_536


@dataclass(frozen=True)
class Client:
    """A program that uses a client library."""

    program: str
    packages: tuple[str, ...]
    without_requirements: tuple[str, ...] = ()
    """Packages whose own requirements are too large; *packages* has those that are imported."""
    model: Literal["random", "demo", "long", "thinking"] = "random"
    """Which model it talks with. `long` is the demo model with a context for an agent's instructions; `thinking` is a
    random one that thinks."""

    def prepare(self, folder: Path) -> list[str]:
        """Install what it needs into *folder*, once; return the command that runs it."""
        is_node = self.program.endswith(".mjs")
        done = folder / ".ready"
        wanted = "\n".join((*self.packages, *self.without_requirements))
        if not done.exists() or done.read_text() != wanted:
            if is_node:
                folder.mkdir(parents=True, exist_ok=True)
                _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *self.packages)
            else:
                _run(sys.executable, "-m", "venv", "--clear", str(folder))
                install = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
                _run(*install, *self.packages)
                if self.without_requirements:
                    _run(*install, "--no-deps", *self.without_requirements)
            done.write_text(wanted)
        if not is_node:
            return [str(folder / "bin" / "python"), str(HERE / self.program)]
        program = folder / self.program  # node looks for modules beside the program
        program.write_bytes((HERE / self.program).read_bytes())
        return ["node", str(program)]


CLIENTS = {
    "langchain": Client("with_langchain.py", ("langchain-openai",)),
    "langchain-tools": Client("with_langchain_tools.py", ("langchain-openai",), model="demo"),
    "pydantic-ai": Client("with_pydantic_ai.py", ("pydantic-ai-slim[openai]",), model="demo"),
    "openai-agents": Client("with_openai_agents.py", ("openai-agents",), model="demo"),
    "openai-responses": Client("with_openai_responses.py", ("openai", "pytest"), model="demo"),
    "openai-reasoning": Client("with_openai_reasoning.py", ("openai", "pytest"), model="thinking"),
    "instructor": Client("with_instructor.py", ("instructor",), model="demo"),
    "llama-index": Client("with_llama_index.py", ("llama-index-llms-openai-like",)),
    "litellm": Client("with_litellm.py", ("litellm",)),
    "openai-node": Client("with_openai_node.mjs", ("openai",)),
    "sglang-bench": Client(
        "with_sglang_bench.py",
        ("transformers", "aiohttp", "msgspec", "orjson", "requests", "psutil", "pyzmq", "pybase64", "pillow"),
        without_requirements=("sglang",),
        model="demo",
    ),
    "huggingface-hub": Client("with_huggingface_hub.py", ("huggingface_hub",), model="demo"),
    "llm": Client("with_llm.py", ("llm",), model="demo"),
    "smolagents": Client("with_smolagents.py", ("smolagents[openai]",), model="demo"),
    "vllm-bench": Client(
        "with_vllm_bench.py", ("aiohttp", "regex", "tqdm"), without_requirements=("vllm",), model="demo"
    ),
    "anthropic": Client("with_anthropic.py", ("anthropic", "pytest"), model="demo"),
    "claude-code": Client("with_agent.mjs", ("@anthropic-ai/claude-code-linux-x64",), model="long"),
    "codex": Client("with_agent.mjs", ("@openai/codex",), model="long"),
    "opencode": Client("with_agent.mjs", ("opencode-linux-x64",), model="long"),
    "qwen-code": Client("with_agent.mjs", ("@qwen-code/qwen-code",), model="long"),
    "ai-sdk": Client("with_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod@4"), model="demo"),
}


def main(names: Sequence[str]) -> int:
    """Run the clients *names*, or all; return the exit code."""
    unknown = set(names) - set(CLIENTS)
    if unknown:
        print(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
        return 2
    chosen = {name: CLIENTS[name] for name in names or CLIENTS}
    commands: dict[str, list[str]] = {}
    for name, client in chosen.items():
        print(f"{name}: setting up {ENVIRONMENTS.name}/{name}", flush=True)
        commands[name] = client.prepare(ENVIRONMENTS / name)
    failed = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        urls = {kind: servers.enter_context(_server(Path(folder), kind)).url for kind in _kinds(chosen.values())}
        for name, command in commands.items():
            began_s = time.monotonic()
            url = urls[chosen[name].model]
            ended = subprocess.run([*command, f"{url}/v1", MODEL], check=False, timeout=PATIENCE_S)
            print(f"{name}: {'passed' if ended.returncode == 0 else 'FAILED'} ({time.monotonic() - began_s:.1f} s)")
            failed += [name] if ended.returncode else []
    return 1 if failed else 0


def _kinds(clients: Iterable[Client]) -> list[str]:
    return sorted({client.model for client in clients})


def _server(folder: Path, kind: str) -> AbstractContextManager[Server]:
    named = ("--served-model-name", MODEL)
    if kind == "demo":
        return serve(folder / "demo", *named, demo=True)
    if kind == "random":
        model = make_checkpoint(folder / "model", "llama3")
        return serve(folder / "random", "--model", str(model), *named, "--strict-model-names")
    model = folder / kind
    if kind == "thinking":
        make_checkpoint(model, "qwen3", max_positions=2048)
        make_tokenizer(model, "qwq", num_tokens=440)
        return serve(folder / "with-thinking", "--model", str(model), *named)
    shutil.copytree(DEMO_FOLDER, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG_CONTEXT}))
    return serve(folder / "with-long", "--model", str(model), *named)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
