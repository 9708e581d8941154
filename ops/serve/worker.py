"""One worker of a stage: a process that a supervisor started, or a container."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ops.serve.config import StageConfig
from pipeline.errors import ConfigError
from pipeline.names import Names
from stages.archive.config import ArchiveConfig
from stages.detokenize.config import DetokenizeConfig
from stages.generate.setup.config import GenerateConfig
from stages.tokenize.config import TokenizeConfig
from web.config import WebStageConfig

if TYPE_CHECKING:
    from pipeline.log.redis import RedisLog

SAME_S: Final = 10.0
"""What one of several engines cannot do, the first one says for all, and the supervisor ends them. It may be so late on
busy cores: it, too, imports torch first."""


def run_worker(config: StageConfig, stage: str) -> int:
    """Be one worker of *stage*; return the exit code."""
    from pipeline.process.observe import configure_logging, end_with_any_thread
    from pipeline.process.parent import die_with_supervisor

    die_with_supervisor(os.environ)
    configure_logging(stage=stage)
    end_with_any_thread()
    gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the time

    from pipeline.process import failpoints

    failpoints.arm(os.environ)
    if isinstance(config, WebStageConfig):
        from web.server import run as run_web

        gc.enable()
        return run_web(config)
    run = _imported(config)
    gc.freeze()
    gc.enable()
    try:
        return run()
    except ConfigError:
        if isinstance(config, GenerateConfig) and _another_says_it(config):
            time.sleep(SAME_S)
        raise


def _another_says_it(config: GenerateConfig) -> bool:
    """Whether another engine, or another rank of this machine, begins with the same flags and says what is wrong."""
    return config.share.engine > 0 or config.ranks.rank > config.nodes.ranks_here(config.engine.tp).start


def _imported(config: TokenizeConfig | GenerateConfig | DetokenizeConfig | ArchiveConfig) -> Callable[[], int]:
    """Import the stage of *config*; return the function that runs a worker of it."""
    from pipeline.log.protocol import RequestLimits
    from pipeline.log.redis import RedisLog

    def open_log() -> RedisLog:
        limits = RequestLimits(
            retention_s=config.log.retention_s,
            response_retention_s=config.log.response_retention_s,
            journal_bytes=config.log.journal_bytes,
        )
        return RedisLog(config.log.redis_url, Names(config.log.namespace), limits)

    match config:
        case TokenizeConfig():
            from stages.tokenize.worker import run as run_tokenize

            return lambda: run_tokenize(config, open_log, _folder(config))
        case GenerateConfig():
            _import_torch()
            if config.engine.tp > 1:
                from stages.generate.ranks.worker import run as run_generate
            else:
                from stages.generate.loop.worker import run as run_generate

            return lambda: run_generate(config, open_log, _folder(config))
        case DetokenizeConfig():
            from stages.detokenize.worker import run as run_detokenize

            return lambda: run_detokenize(config, open_log, _folder(config))
        case ArchiveConfig():
            from stages.archive.worker import run as run_archive

            return lambda: run_archive(config, open_log)


def _import_torch() -> None:
    """Import torch without its descriptions of operations, unless it sees a GPU.

    They are a quarter of the import. Only tracers need them (torch.compile, torch.export), which compute nothing for us
    on a CPU. Who imports them later gets them whole.
    """
    if "torch" in sys.modules:
        return
    name = "torch._meta_registrations"
    sys.modules[name] = ModuleType(name)
    try:
        import torch
    finally:
        del sys.modules[name]
    if torch.cuda.is_available():
        importlib.import_module(name)


def _folder(config: TokenizeConfig | GenerateConfig | DetokenizeConfig) -> Path:
    """Return the model's folder. A supervisor passes it; by hand, `--model` may name any model."""
    model = config.model
    if model.model and not model.tokenizer and (Path(model.model) / "config.json").is_file():
        return Path(model.model)
    from stages.generate.model.folder import model_folder

    if isinstance(config, GenerateConfig):
        return model_folder(model.model, tokenizer=model.tokenizer, loading=config.engine.loading)
    return model_folder(model.model, tokenizer=model.tokenizer, text_alone=True)
