"""Flags of `minisgl serve`, and which config each command of a server has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

from ops.config import ConnectConfig
from ops.shell.config import ShellConfig
from pipeline.errors import ConfigError
from pipeline.flags import (
    at_least,
    concealed,
    flag,
    flags_for,
    flags_of,
    owners_of,
    parse_config,
    secrets_of,
    variable,
    yes_or_no,
)
from pipeline.log.config import LogConfig
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, TOKENIZE, WEB
from pipeline.process.config import DataConfig, ModelConfig, data_folder
from stages.archive.config import ArchiveConfig
from stages.detokenize.config import DetokenizeConfig
from stages.generate.setup.config import DefaultsConfig, EngineConfig, GenerateConfig, NamesConfig, NodesConfig
from stages.tokenize.config import MarkupConfig, PromptConfig, TokenizeConfig
from web.config import (
    ArchivedConfig,
    BackgroundConfig,
    ClientConfig,
    KeysConfig,
    OriginConfig,
    RequestConfig,
    WebConfig,
    WebStageConfig,
)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Which processes `serve` starts."""

    tokenizers: int = flag(
        "--tokenizers",
        "--num-tokenizer",
        "--tokenizer-count",
        default=1,
        parse=at_least(0),
        help="number of tokenizer processes; 0 means 1",
    )
    dp: int = flag(
        "--dp",
        "--data-parallel-size",
        "--dp-size",
        default=1,
        parse=at_least(1),
        help=(
            "number of engines, each with the whole model; they share the requests, and divide threads and memory, or "
            "GPUs"
        ),
    )
    frontends: int = flag(
        "--frontends",
        default=1,
        parse=at_least(1),
        help="number of web processes; they share the port and the requests, and each keeps the limits of connections",
    )
    shell: bool = flag(
        "--shell",
        "--shell-mode",
        default=False,
        parse=yes_or_no,
        help="start a chat in this terminal when the server is ready; the server ends with the chat",
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The flags of `minisgl serve`."""

    model: ModelConfig
    names: NamesConfig
    defaults: DefaultsConfig
    web: WebConfig
    serve: ServeConfig
    engine: EngineConfig
    nodes: NodesConfig
    log: LogConfig
    prompts: PromptConfig
    markup: MarkupConfig
    requests: RequestConfig
    background: BackgroundConfig
    clients: ClientConfig
    origins: OriginConfig
    keys: KeysConfig
    archived: ArchivedConfig
    data: DataConfig

    @property
    def data_dir(self) -> Path:
        """The folder of this server: given, or one per port in the user's state folder."""
        return data_folder(self.data.data_dir, self.web.port)


StageConfig: TypeAlias = TokenizeConfig | GenerateConfig | DetokenizeConfig | WebStageConfig | ArchiveConfig

STAGE_CONFIGS: Final[Mapping[str, type[StageConfig]]] = {
    TOKENIZE: TokenizeConfig,
    GENERATE: GenerateConfig,
    DETOKENIZE: DetokenizeConfig,
    WEB: WebStageConfig,
    ARCHIVE: ArchiveConfig,
}
COMMANDS: Final[Mapping[str, type[Any]]] = {
    "serve": ServerConfig,
    **{f"stage {stage}": config for stage, config in STAGE_CONFIGS.items()},
}
OF_ONE_PROCESS: Final = ("worker", "listen", "ranks", "share")
"""Config objects of a stage that are about one of its processes."""


def stage_of(arguments: Sequence[str]) -> str:
    """Return the stage that `minisgl stage <arguments>` names.

    Raises:
        ConfigError: There is no such stage.
    """
    if not arguments or arguments[0] not in STAGE_CONFIGS:
        seen = arguments[0] if arguments else "nothing"
        raise ConfigError(f"stage: {seen} given, expected one of {', '.join(STAGE_CONFIGS)}")
    return arguments[0]


def parse_command(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig | StageConfig:
    """Return the config of `serve [flags]` or `stage STAGE [flags]`.

    Raises:
        ConfigError: An unknown stage or flag, or a value out of range.
    """
    words = 2 if arguments[0] == "stage" and stage_of(arguments[1:]) else 1
    name = " ".join(arguments[:words])
    config: ServerConfig | StageConfig = parse_config(name, COMMANDS[name], arguments[words:], environment)
    return config


def stage_flags(config: ServerConfig | StageConfig, stage: str) -> list[str]:
    """Return the flags with which a `minisgl stage <stage>` process has the same config as this one."""
    names = (item.name for item in fields(STAGE_CONFIGS[stage]) if item.name not in OF_ONE_PROCESS)
    return flags_for(getattr(config, name) for name in names if hasattr(config, name))


def stage_secrets(config: ServerConfig | StageConfig, stage: str) -> dict[str, str]:
    """Return the variables with the secrets that a `minisgl stage <stage>` process needs, and no others."""
    needed = {variable(item) for item in flags_of(owners_of(STAGE_CONFIGS[stage]))}
    return {name: value for name, value in secrets_of(config).items() if name in needed}


def without_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of any command without the secrets in it, and the variables that carry them instead."""
    owners = [owner for config in COMMANDS.values() for owner in owners_of(config)]
    return concealed(arguments, [*owners, ConnectConfig, ShellConfig])
