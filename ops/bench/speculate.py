"""`minisgl bench speculate`: what drafts save, and cost. Two servers, one with `--speculate off`, answer in turn.

A model that walks writes words in a known order. Its prompt has them too, but for a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shlex
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from ops.bench import report
from ops.bench.load import CHAT, Form, connected
from ops.bench.models import WALKING, CheckpointConfig, Prompts
from ops.bench.targets import SILENCE_TIMEOUT_S, Served, SideFailed, our_server, scratch_and_status
from pipeline.flags import at_least, flag, parse_flags

ABOUT: Final = """\
Starts two servers, one that drafts tokens and one that does not, and sends both the same requests, in turn. Prints how
many times faster the first one is, and how many times fewer steps it makes.
"""
RENAMED_EVERY: Final = 25
"""One of so many words of the copied text has another name."""
KEYS: Final = 10
CASES: Final = ("copied", "schema", "prose", "streams")
STREAMS: Final = 32
SETTLE_S: Final = 3.0
"""Engines tell their counts so often."""
STREAM_TOKENS: Final = 200
STEPS: Final = "minisgl:iteration_tokens_total_count"
DRAFTS: Final = "minisgl:spec_decode_num_draft_tokens_total"


@dataclass(frozen=True, slots=True)
class SpeculateConfig(CheckpointConfig):
    """The requests."""

    model: str = flag(
        "--model", default="95m-walk", help=f"{' or '.join(WALKING)} (made on first use), or a checkpoint folder"
    )
    of: str = flag("--of", default="all", choices=("all", *CASES), help="which requests")
    tokens: int = flag("--tokens", default=1000, parse=at_least(50), help="length of copied texts and of prose")
    runs: int = flag("--runs", default=7, parse=at_least(1), help="pairs of requests; their medians are printed")
    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of the prompts")
    serve_flags: str = flag("--serve-flags", default="", help="more flags for both servers, as one quoted text")
    output: str = flag("--output", default="", help="JSON file for the setup and all runs")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a pair, sent so many times at once."""

    text: str
    max_tokens: int
    fields: Mapping[str, Any]
    times: int = 1


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure; return the exit code. Raises MiniSGLError."""
    (config,) = parse_flags("bench speculate", (SpeculateConfig,), arguments, environment, about=ABOUT)
    report.check_can_write("--output", config.output)
    folder = config.folder(environment)
    prompts, flags = Prompts(folder), ["--model", str(folder), *shlex.split(config.serve_flags)]
    pairs: dict[str, list[dict[str, float]]] = {}
    with scratch_and_status() as (data, status), contextlib.ExitStack() as servers:
        sides = []
        for name, more in {"on": [], "off": ["--speculate", "off"]}.items():
            (data / name).mkdir()
            sides.append(servers.enter_context(our_server(data / name, [*flags, *more]))[0])
        numerics = sides[0].numerics()
        for number in range(config.runs):
            generator = random.Random(f"{config.seed}/{number}")
            for name, asked in cases(config, prompts, generator).items():
                if config.of not in ("all", name):
                    continue
                status.update(f"run {number + 1} of {config.runs}: {name}")
                order = sides if number % 2 == 0 else sides[::-1]
                told = {side.url: measured(side, asked) for side in order}
                pairs.setdefault(name, []).append(compared(*(told[side.url] for side in sides)))
    print(f"{folder.name}, on {report.cpu_model()}", f"numerics: {numerics}", "", table(pairs), sep="\n")
    document = {"options": report.options_of(config), "checkpoint": str(folder), "numerics": numerics, "pairs": pairs}
    report.save(config.output, ("minisgl", "bench", "speculate", *arguments), ("torch", "redis", "aiohttp"), document)
    return 0


def cases(config: SpeculateConfig, prompts: Prompts, generator: random.Random) -> dict[str, Asked]:
    """Return the requests of a run by name. The prompts are new, so nothing of them is cached."""
    words = prompts.walk(config.tokens)
    old = generator.choice([word for word in prompts.words(generator, 50).split() if word not in words])
    first = generator.randrange(RENAMED_EVERY)
    said = [old if at % RENAMED_EVERY == first else word for at, word in enumerate(words)]
    names = prompts.words(generator, 3 * KEYS).split()
    keys = ["_".join(names[3 * at : 3 * at + 3]) for at in range(KEYS)]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": "boolean"} for key in keys},
        "required": keys,
    }
    schema |= {"additionalProperties": False}
    text = " " + " ".join(said)
    question = prompts.words(generator, 30)
    return {
        "copied": Asked(text, config.tokens, {"ignore_eos": True}),
        "schema": Asked(question, 400, {"json_schema": orjson.dumps(schema).decode()}),
        "prose": Asked(question, config.tokens, {"ignore_eos": True}),
        "streams": Asked(question, STREAM_TOKENS, {"ignore_eos": True}, STREAMS),
    }


def measured(server: Served, asked: Asked) -> dict[str, float]:
    """Send a request; return its tokens per second, and the steps and drafts that it took.

    Raises:
        SideFailed: It failed.
    """
    before = _counted(server.url)
    answers = asyncio.run(_sent(server, asked))
    tokens = sum(answer.output_tokens for answer in answers)
    seconds = max(answer.ended_s for answer in answers) - min(answer.content_s[0] for answer in answers)
    time.sleep(SETTLE_S)
    counted = {name: count - before[name] for name, count in _counted(server.url).items()}
    return {"rate": (tokens - len(answers)) / seconds, "steps": counted[STEPS], "drafts": counted[DRAFTS]}


async def _sent(server: Served, asked: Asked) -> list[Any]:
    form = replace(Form(CHAT, "default"), fields={"temperature": 0, **asked.fields})
    async with connected(server.url, timeout_s=SILENCE_TIMEOUT_S) as client:
        message = [{"role": "user", "content": asked.text}]
        answers = await asyncio.gather(*(client.stream(form, message, asked.max_tokens) for _ in range(asked.times)))
    if failed := next((answer for answer in answers if answer.error or not answer.content_s), None):
        raise SideFailed(f"a request failed: {failed.error or 'its answer is empty'}")
    return answers


def _counted(url: str) -> dict[str, float]:
    """Return the steps and drafts of a server so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=SILENCE_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in (STEPS, DRAFTS)
    }


def compared(on: Mapping[str, float], off: Mapping[str, float]) -> dict[str, float]:
    """Return what drafts make of a request."""
    return {
        "faster": on["rate"] / off["rate"],
        "fewer_steps": off["steps"] / on["steps"],
        "drafts": on["drafts"],
        "rate": on["rate"],
    }


def table(pairs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the medians of all pairs, with the range of the first figure."""
    rows = [("", "times faster", "lowest to highest", "times fewer steps", "drafts", "tokens/s")]
    for name, of_it in pairs.items():
        median = {figure: statistics.median(pair[figure] for pair in of_it) for figure in of_it[0]}
        rates = sorted(pair["faster"] for pair in of_it)
        spread = f"{rates[0]:.2f} to {rates[-1]:.2f}"
        rows.append(
            (
                name,
                f"{median['faster']:.2f}",
                spread,
                f"{median['fewer_steps']:.2f}",
                f"{median['drafts']:.0f}",
                f"{median['rate']:.1f}",
            )
        )
    return report.aligned(rows)
