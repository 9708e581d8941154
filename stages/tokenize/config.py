"""Flags of the tokenize stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import flag, seconds
from pipeline.log.config import LogConfig
from pipeline.process.config import ModelConfig, WorkerConfig

DEFAULT_CPU_S: Final = 10.0
"""4 MiB of any text take 2.8 to 7.3 s with byte-level BPE (tokenizers 0.23, one core of an AMD EPYC). It is CPU time
because on a busy machine the same text takes several times as long."""


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """How long one request may keep a tokenizer."""

    tokenize_cpu_s: float = flag(
        "--tokenize-timeout",
        default=DEFAULT_CPU_S,
        parse=seconds,
        help=(
            "CPU seconds for a request's chat template, and for its encoding; a request that needs more gets 400, and "
            "its tokenizer is restarted"
        ),
    )


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """The flags of `minisgl stage tokenize`."""

    model: ModelConfig
    worker: WorkerConfig
    log: LogConfig
    prompts: PromptConfig
