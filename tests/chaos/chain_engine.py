"""`minisgl stage generate` with the chain model for an engine; all else of the process is what is shipped.

python tests/chaos/chain_engine.py stage generate --redis-url URL --model FOLDER --dummy-weight [flags]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chaos.chain_model import ChainEngine

from ops.serve.config import ServerConfig, StageConfig, parse_command, stage_flags, stage_of
from ops.serve.processes import worker_environment
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process import failpoints
from pipeline.process.observe import configure_logging
from pipeline.process.parent import die_with_supervisor
from pipeline.stage.supervisor import Job, Supervisor
from stages.generate.model.spec import Loading
from stages.generate.setup.config import GenerateConfig

if TYPE_CHECKING:
    from stages.generate.loop.worker import Loaded

STEP_S = 0.005
"""How long a step takes: requests are in flight long enough to be hit."""
FOREVER_S = float("inf")


def main(arguments: Sequence[str]) -> int:
    """Be one engine, or start as many as --replicas says and keep them alive."""
    config, stage = stage_config(arguments)
    configure_logging(stage=stage)
    if config.worker.slot is None:
        return supervise(config, stage)
    assert isinstance(config, GenerateConfig)
    return run_worker(config)


def stage_config(arguments: Sequence[str]) -> tuple[StageConfig, str]:
    """Return the config of `stage STAGE [flags]`, and the stage."""
    config = parse_command(arguments, os.environ)
    assert not isinstance(config, ServerConfig)
    return config, stage_of(arguments[1:])


def run_worker(config: GenerateConfig) -> int:
    """As ops.serve.worker.run_worker, with another way to load."""
    from stages.generate.loop.worker import run_engine

    die_with_supervisor(os.environ)
    failpoints.arm(os.environ)
    url, names = config.log.redis_url, Names(config.log.namespace)
    return run_engine(config, lambda: RedisLog(url, names), Path(config.model.model), load)


def load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
    """As stages.generate.loop.worker.load, but for the engine."""
    from stages.generate.loop.worker import Loaded
    from stages.generate.model.checkpoint import check_folder
    from stages.generate.setup.resolve import resolve

    spec = check_folder(folder, Loading(dummy=True))
    settings = resolve(config.engine, spec)
    engine = ChainEngine(
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        max_running_requests=settings.limits.max_running_requests,
        step_s=STEP_S,
    )
    report(1.0)
    return Loaded(engine, settings, spec.eos_ids)


def supervise(config: StageConfig, stage: str, program: str = __file__) -> int:
    """As ops.serve.command.run_stage, with the file *program* in the place of minisgl.py."""
    log = RedisLog(config.log.redis_url, Names(config.log.namespace))
    supervisor = Supervisor(
        lambda: log,
        [Job(stage, tuple(stage_flags(config, stage)))] * config.worker.replicas,
        program=(sys.executable, program),
        environment=worker_environment(os.environ, config.log.redis_url),
        watch_redis=lambda: None,
    )
    supervisor.listen()
    try:
        supervisor.start()
        supervisor.wait_until_ready(FOREVER_S)
        supervisor.run()
        supervisor.stop([[stage]])
    finally:
        supervisor.kill()
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
