"""Flags of the tokenize stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.flags import flag, seconds
from pipeline.log.config import LogConfig
from pipeline.process.config import ModelConfig, WorkerConfig

TOOL_FORMATS: Final = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "pythonic",
    "lfm2",
    "minicpm",
    "glm",
    "kimi_k2",
    "deepseek",
    "apertus",
    "harmony",
)
"""Those of `pipeline.markup`, which a process that only parses flags does not load."""
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
class MarkupConfig:
    """How the model writes tool calls."""

    tool_parser: str = flag(
        "--tool-parser",
        "--tool-call-parser",
        default="auto",
        choices=("auto", "none", *TOOL_FORMATS),
        help=(
            "format in which the model writes tool calls; auto: the one that its chat template writes; none: calls are "
            "left in the text"
        ),
    )


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """The flags of `minisgl stage tokenize`."""

    model: ModelConfig
    worker: WorkerConfig
    log: LogConfig
    prompts: PromptConfig
    markup: MarkupConfig
