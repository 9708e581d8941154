"""Flags of the tokenize stage."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.log.config import LogConfig
from pipeline.process.config import ModelConfig, WorkerConfig


@dataclass(frozen=True, slots=True)
class TokenizeConfig:
    """The flags of `minisgl stage tokenize`."""

    model: ModelConfig
    worker: WorkerConfig
    log: LogConfig
