"""What other people's programs say to the server: `make clients`. Each in an environment of its own, their pins clash.

Sets up `.clients/<name>` for each (a venv, or a folder of node modules), starts a server with a small random model,
runs every program against it and says how each ended; with names as arguments, those alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints import make_checkpoint
from servers import serve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".clients"
MODEL = "org/small-model"
PATIENCE_S = 300


@dataclass(frozen=True)
class Client:
    """A program that uses a client library."""

    program: str
    packages: tuple[str, ...]

    def prepare(self, folder: Path) -> list[str]:
        """Install what it needs into *folder*, once; return the command that runs it."""
        is_node = self.program.endswith(".mjs")
        done = folder / ".ready"
        wanted = "\n".join(self.packages)
        if not done.exists() or done.read_text() != wanted:
            if is_node:
                folder.mkdir(parents=True, exist_ok=True)
                _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *self.packages)
            else:
                _run(sys.executable, "-m", "venv", "--clear", str(folder))
                _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *self.packages)
            done.write_text(wanted)
        if not is_node:
            return [str(folder / "bin" / "python"), str(HERE / self.program)]
        program = folder / self.program  # node looks for modules beside the program
        program.write_bytes((HERE / self.program).read_bytes())
        return ["node", str(program)]


CLIENTS = {
    "langchain": Client("with_langchain.py", ("langchain-openai",)),
    "llama-index": Client("with_llama_index.py", ("llama-index-llms-openai-like",)),
    "litellm": Client("with_litellm.py", ("litellm",)),
    "openai-node": Client("with_openai_node.mjs", ("openai",)),
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
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model", "llama3")
        with serve(Path(folder), "--model", str(model), "--served-model-name", MODEL) as server:
            for name, command in commands.items():
                began_s = time.monotonic()
                ended = subprocess.run([*command, f"{server.url}/v1", MODEL], check=False, timeout=PATIENCE_S)
                print(f"{name}: {'passed' if ended.returncode == 0 else 'FAILED'} ({time.monotonic() - began_s:.1f} s)")
                failed += [name] if ended.returncode else []
    return 1 if failed else 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
