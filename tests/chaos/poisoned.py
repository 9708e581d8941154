"""`minisgl stage STAGE` whose process dies of one text, which the environment names; all else is shipped.

POISON=text POISON_TOKENS=n python tests/chaos/poisoned.py stage generate --redis-url URL --model FOLDER [flags]

A tokenizer dies when it is to encode the text, an engine or a detokenizer when it works for a request that holds it and
has POISON_TOKENS tokens after it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Callable, Iterable, Sequence

from chaos.chain_engine import stage_config, supervise

from pipeline.events import StepCompleted, Tokenized
from pipeline.log.protocol import Produced
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.observe import configure_logging
from pipeline.process.parent import die_with_supervisor
from pipeline.walk import Moment
from stages.detokenize import worker as detokenize
from stages.detokenize.config import DetokenizeConfig
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.text import Decoder
from stages.detokenize.worker import load_decoder
from stages.generate.loop.flights import Forward
from stages.generate.loop.worker import Loaded, load, run_engine
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.setup.config import GenerateConfig
from stages.tokenize import worker as tokenize
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.prompts import PromptEncoder, Rendered

POISON = os.environ.get("POISON", "")
POISON_TOKENS = int(os.environ.get("POISON_TOKENS", "0"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """An engine that dies of the poison. It keeps the tokens of each row of the page table, as the pages do."""

    def __init__(self, engine: Forward, decode: Callable[[Sequence[int]], str]) -> None:
        self._engine = engine
        self._decode = decode
        self._held: dict[int, list[int]] = {}

    def forward(self, plan: BatchPlan) -> Computed:
        for row in plan.rows:
            held = self._held.get(row.table, [])[: row.start]
            held += [0] * (row.start - len(held))  # what was found in the cache
            self._held[row.table] = [*held, *row.token_ids]
            before = self._held[row.table][: len(self._held[row.table]) - POISON_TOKENS]
            if row.sample is not None and POISON in self._decode(before):
                die()
        return self._engine.forward(plan)


class MortalEncoder(PromptEncoder):
    """A tokenizer that dies of the poison."""

    def encode(self, prompts: Sequence[Rendered]) -> list[Sequence[int]]:
        if any(POISON in prompt.text for prompt in prompts):
            die()
        return super().encode(prompts)


class MortalFold(DetokenizeFold):
    """A detokenizer that dies of the poison, in the next step or in a history."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._decode = decoder.plain
        self._poisoned: set[str] = set()

    def learn(self, uid: str, history: Iterable[Moment]) -> None:
        moments = list(history)
        super().learn(uid, moments)
        if any(isinstance(each.event, Tokenized) and POISON in self._decode(each.event.token_ids) for each in moments):
            self._poisoned.add(uid)

    def apply(self, step: StepCompleted, step_id: str) -> list[Produced]:
        produced = super().apply(step, step_id)
        if any(item.uid in self._poisoned and item.n >= POISON_TOKENS for item in produced):
            die()
        return produced


def mortal_load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
    loaded = load(config, folder, report)
    mortal = Mortal(loaded.engine, load_decoder(folder).plain)
    return Loaded(mortal, loaded.settings, loaded.eos_ids)


def main(arguments: Sequence[str]) -> int:
    """Be one worker, or start it and keep it alive."""
    config, stage = stage_config(arguments)
    configure_logging(stage=stage)
    if config.worker.slot is None:
        return supervise(config, stage, __file__)
    die_with_supervisor(os.environ)
    assert isinstance(config, GenerateConfig | TokenizeConfig | DetokenizeConfig)
    url, names, folder = config.log.redis_url, Names(config.log.namespace), Path(config.model.model)
    if isinstance(config, GenerateConfig):
        return run_engine(config, lambda: RedisLog(url, names), folder, mortal_load)
    if isinstance(config, DetokenizeConfig):
        detokenize.DetokenizeFold = MortalFold  # type: ignore[attr-defined]
        return detokenize.run(config, lambda: RedisLog(url, names), folder)
    tokenize.PromptEncoder = MortalEncoder  # type: ignore[attr-defined]
    return tokenize.run(config, lambda: RedisLog(url, names), folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
