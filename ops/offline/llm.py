"""`LLM`: a model in this process, and `generate`."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self

import structlog

from ops.offline.call import Call, Completion
from ops.offline.progress import progress_bar
from ops.offline.prompts import Outputs, Prompt, checked_requests
from ops.offline.stages import Stages, Wrap
from pipeline.errors import MiniSGLError
from pipeline.events import SamplingParams
from pipeline.flags import flags_of, parse_config
from pipeline.process.config import ModelConfig
from stages.generate.model.folder import model_folder
from stages.generate.setup.config import EngineConfig, GenerateConfig
from stages.generate.setup.resolve import Settings


class LLM:
    """Offline generation: the stages of a server as threads of this process, without Redis.

    llm = LLM("path/or/hub-id")
    for completion in llm.generate(["Hello!"], SamplingParams(temperature=0, max_tokens=32)):
        print(completion.text)
    """

    def __init__(
        self, model: str | PathLike[str] = "", *, wrap_engine: Wrap = lambda engine: engine, **options: Any
    ) -> None:
        """Load *model*, a folder or what else --model takes; "" is the demo model.

        *options* are the engine's flags by the names of their fields, such as ``dtype="bfloat16"``, with their defaults
        and checks, and ``tokenizer`` for a GGUF file. One differs: without ``mixed_prefill_length`` prompts are not
        held back beside running requests.
        ``tp=N`` starts N - 1 more processes, which end with this object.
        *wrap_engine* puts something around the engine, such as a clock.

        Raises:
            TypeError: An option that there is not.
            ConfigError: The model, the options and the machine do not go together.
            RankLost: One of those processes ended at its start.
        """
        quieten_logs()
        config = _config(fspath(model), options)
        of_model, loading = config.model, config.engine.loading
        self.folder = model_folder(of_model.model, tokenizer=of_model.tokenizer, loading=loading)
        """The model's folder."""
        self._stages = Stages(config, self.folder, wrap_engine)
        self._end = weakref.finalize(self, self._stages.stop_soon)
        self._end.atexit = False  # then there is time to wait for the threads
        atexit.register(_close, weakref.ref(self._stages))

    @property
    def settings(self) -> Settings:
        """The options as resolved on this machine."""
        return self._stages.loaded.settings

    @property
    def fingerprint(self) -> str:
        """Identifies config and weights."""
        return self._stages.serving.weights

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: Outputs | Sequence[Outputs | None] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Return a completion for each prompt, in order; one prompt gives a list of one.

        A prompt is plain text, a list of messages (through the model's chat template) or a list of token ids. The
        parameters are for all of them, or one for each; who has no seed in them gets a random one.
        *structured_outputs*, for all or for each, says what an answer must be, such as ``{"json": schema}``,
        ``{"regex": pattern}`` or ``{"choice": texts}``. *progress* draws a bar on stderr, when that is a terminal.
        Ctrl-C lets go of what runs.

        Raises:
            ValueError: A prompt or its parameters are wrong; the message has the index, and nothing has run.
            GenerationFailed: Some failed while running, after the others have ended.
        """
        if not self._end.alive:
            raise MiniSGLError("this LLM is closed; make a new one")
        encoder, limits = self._stages.encoder, self.settings.limits
        requests = checked_requests(prompts, sampling_params, encoder, limits, structured_outputs)
        with progress_bar(len(requests), wanted=progress) as report:
            return Call(self._stages, requests).run(report)

    def flush_cache(self) -> None:
        """Clear the prefix cache, except prefixes of running requests."""
        self._stages.flush_cache()

    def close(self) -> None:
        """End the threads and free the memory. A second call does nothing."""
        self._end()
        self._stages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close(stages: weakref.ref[Stages]) -> None:
    if (left := stages()) is not None:
        left.close()


def _config(model: str, options: Mapping[str, Any]) -> GenerateConfig:
    """Return the config of the engine that --model *model* and *options* would start."""
    known = {item.name: item.metadata["flags"][0] for item in flags_of([ModelConfig, EngineConfig])}
    arguments = ["--model", model] if model else []
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"LLM() has no option {name!r}; it has {', '.join(known)}")
        arguments += [known[name], str(value)]
    return parse_config("stage generate", GenerateConfig, arguments, {})


def quieten_logs() -> None:
    """Log only warnings, to stderr, unless the program has configured structlog."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=lambda *args: structlog.PrintLogger(sys.stderr),
        )
