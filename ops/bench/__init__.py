"""`minisgl bench KIND`: finds the benchmark. Each kind is a module with its own flags, imported only when it runs.

All have one shape. A target is started or found (`targets`): servers, and programs that answer questions. A load is
sent to it (`load`): conversations of `datasets` for any server, exact prompts of `models` where the tokenizer is known.
Figures come out (`report`): tables, JSON and a plot. `offline` and `pipeline` have their target in their own process.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Final, cast

from pipeline.errors import ConfigError

KINDS: Final = ("offline", "serve", "pipeline", "compare", "tail", "speculate", "cost", "gpu")
USAGE: Final = """\
usage: minisgl bench offline [flags]      the engine alone, in this process: tokens/s, and the machine's limits
       minisgl bench serve [flags]        any OpenAI server: TTFT, TPOT, ITL, E2E under load
       minisgl bench pipeline [flags]     the log alone: commits per second, added time per token
       minisgl bench compare [flags]      MiniSGL and transformers, llama.cpp or a server in turn, on the same requests
       minisgl bench tail [flags]         the time per token of streams while long prompts arrive, with bounds
       minisgl bench speculate [flags]    what drafts save where an answer repeats something, and cost where not
       minisgl bench cost [flags]         what journals, an archive, schemas, sampling, tabs or a busy core cost
       minisgl bench gpu [flags]          a checkout's tests for a GPU, and how fast its engine is there

Each kind explains its flags with --help.
"""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one benchmark; return the exit code.

    Raises:
        ConfigError: There is no such benchmark, or its flags cannot work.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    kind = arguments[0]
    if kind not in KINDS:
        raise ConfigError(f"bench: {kind} given, expected one of {', '.join(KINDS)}")
    module = importlib.import_module(f"ops.bench.{kind}")
    return cast(int, module.main(arguments[1:], environment))
