"""One worker of a stage: a process that a supervisor started, or a container."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ops.serve.config import StageConfig
from pipeline.names import Names
from stages.detokenize.config import DetokenizeConfig
from stages.generate.config import GenerateConfig
from stages.tokenize.config import TokenizeConfig
from web.config import WebStageConfig

if TYPE_CHECKING:
    from pipeline.log.redis import RedisLog


def run_worker(config: StageConfig, stage: str) -> int:
    """Be one worker of *stage*; return the exit code."""
    from pipeline.process.observe import configure_logging
    from pipeline.process.parent import die_with_supervisor

    die_with_supervisor(os.environ)
    configure_logging(stage=stage)
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
    return run()


def _imported(config: TokenizeConfig | GenerateConfig | DetokenizeConfig) -> Callable[[], int]:
    """Import the stage of *config*; return the function that runs a worker of it."""
    from pipeline.log.protocol import RequestLimits
    from pipeline.log.redis import RedisLog

    def open_log() -> RedisLog:
        limits = RequestLimits(retention_s=config.log.retention_s)
        return RedisLog(config.log.redis_url, Names(config.log.namespace), limits)

    match config:
        case TokenizeConfig():
            from stages.tokenize.worker import run as run_tokenize

            return lambda: run_tokenize(config, open_log, _folder(config))
        case GenerateConfig():
            from stages.generate.worker import run as run_generate

            return lambda: run_generate(config, open_log, _folder(config))
        case DetokenizeConfig():
            from stages.detokenize.worker import run as run_detokenize

            return lambda: run_detokenize(config, open_log, _folder(config))


def _folder(config: TokenizeConfig | GenerateConfig | DetokenizeConfig) -> Path:
    """Return the folder that a supervisor passed, or the demo model's where somebody starts a worker by hand."""
    if config.model.model:
        return Path(config.model.model)
    from stages.generate.model.folder import model_folder

    if isinstance(config, GenerateConfig):
        return model_folder("", dummy=config.engine.dummy_weight)
    return model_folder("", text_alone=True)
