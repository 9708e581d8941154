"""An engine of this process that computes requests again; and for a request that killed its engine, one of a process of
its own: what that process died of is shown.

As a program it reads the recorded request from stdin, takes the flags of an engine, and prints the report as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from ops.offline.llm import quieten_logs
from ops.offline.stages import Stages, Wrap
from ops.replay.compute import OF_ENGINES, Computer
from ops.replay.report import computed_report, report
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import flags_for, parse_config, parse_flags
from pipeline.process.config import ModelConfig
from pipeline.recording import decode_recording, encode_recording
from pipeline.replaying import NotComputed, again
from pipeline.views.recorded import History
from stages.generate.loop.past import TOKENS_IN_DOUBT
from stages.generate.model.folder import model_folder
from stages.generate.setup.config import EngineConfig, GenerateConfig


@contextlib.contextmanager
def local_engine(
    model: ModelConfig, engine: EngineConfig, *, at_once: int, wrap: Wrap = lambda engine: engine
) -> Iterator[Computer]:
    """Load *model*, and give what has requests computed with it.

    Raises:
        ConfigError: The model, the flags and the machine do not go together.
    """
    quieten_logs()
    defaults = parse_config("stage generate", GenerateConfig, [], {})
    folder = model_folder(model.model, tokenizer=model.tokenizer, loading=engine.loading)
    with contextlib.closing(Stages(dataclasses.replace(defaults, model=model, engine=engine), folder, wrap)) as stages:

        def check() -> None:
            if stages.error is not None:
                raise MiniSGLError(f"the engine has ended: {stages.error!r}") from stages.error

        yield Computer(stages.log, at_once=at_once, check=check)


ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "ops.replay.isolated")
"""The command line of this module: Python shows the stack of a process that a signal ends."""
EXIT_CONFIG: Final = 2
LINES_SHOWN: Final = 40
"""Of what the process wrote before it died: the last ones."""


def compute_isolated(history: History, engine: Sequence[Any], timeout_s: float) -> dict[str, Any]:
    """Compute *history* in a process of its own, with the flags in *engine*; return the report of it.

    If the process dies, the report has `died`, how, and `output`, what it wrote. If not, it has `beyond`: how many more
    tokens than the recorded ones it made.

    Raises:
        ConfigError: The model, the flags and the machine do not go together.
    """
    try:
        again(history, beyond=TOKENS_IN_DOUBT)
    except NotComputed as error:
        return report(history, []) | {"times": 1, "failed": str(error).removeprefix(f"{history.uid}: ")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    environment["PYTHONPATH"] = str(ROOT)
    try:
        done = subprocess.run(
            [*PROGRAM, *flags_for(engine)],
            input=encode_recording(history.recording),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        return _died(history, f"it had not ended after {timeout_s:g} s (--request-timeout)", error.stderr or b"")
    if done.returncode == EXIT_CONFIG:
        raise ConfigError("".join(_last_lines(done.stderr)[-1:]))
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        return _died(history, how, done.stderr)
    told: dict[str, Any] = orjson.loads(done.stdout)
    return told | ({"output": _last_lines(done.stderr)} if "failed" in told else {})


def _died(history: History, how: str, output: bytes) -> dict[str, Any]:
    told = report(history, []) | {"times": 1}
    return told | {"died": how, "output": _last_lines(output)}


def _last_lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").splitlines()[-LINES_SHOWN:]


def main() -> None:
    """Compute the request in stdin."""
    model, engine = parse_flags("replay run", OF_ENGINES, sys.argv[1:], {})
    history = History(decode_recording(sys.stdin.buffer.read()))
    event = again(history, beyond=TOKENS_IN_DOUBT)
    try:
        with local_engine(model, engine, at_once=1) as computer:
            (now,) = computer.compute([event])
            told = computed_report(history, [now], computer)
            told["beyond"] = len(now.tokens) - len(history.tokens)
    except ConfigError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        sys.exit(EXIT_CONFIG)
    sys.stdout.buffer.write(orjson.dumps(told))


if __name__ == "__main__":
    main()
