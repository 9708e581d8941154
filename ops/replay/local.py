"""An engine of this process that computes requests again, with the stages of `LLM`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ops.offline.llm import quieten_logs
from ops.offline.stages import Stages, Wrap
from ops.replay.compute import Computer
from pipeline.errors import MiniSGLError
from pipeline.flags import parse_config
from pipeline.process.config import ModelConfig
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
    folder = model_folder(model.model, dummy=engine.dummy_weight)
    with contextlib.closing(Stages(dataclasses.replace(defaults, model=model, engine=engine), folder, wrap)) as stages:

        def check() -> None:
            if stages.error is not None:
                raise MiniSGLError(f"the engine has ended: {stages.error!r}") from stages.error

        yield Computer(stages.log, at_once=at_once, check=check)
