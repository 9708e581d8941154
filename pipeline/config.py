"""Every flag, its default and its meaning, and how a command line becomes frozen config objects.

A flag is declared beside the field that it fills, once. `MINISGL_<FLAG>` in the environment sets any flag; the command
line wins. Abbreviations are off. Nothing here reads the environment or the machine at import.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from pipeline.errors import ConfigError
from pipeline.names import STAGES

C = TypeVar("C")

DEFAULT_PORT: Final = 1919
DEFAULT_NAMESPACE: Final = "minisgl"
DEFAULT_RETENTION_S: Final = 900.0


def flag(
    name: str,
    *aliases: str,
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    choices: Sequence[Any] | None = None,
    repeated: bool = False,
    secret: bool = False,
) -> Any:
    """Declare a dataclass field that a flag fills; *repeated* ones take several values, *secret* ones are not shown."""
    metadata = {
        "flags": (name, *aliases),
        "help": help,
        "parse": parse,
        "choices": choices,
        "repeated": repeated,
        "secret": secret,
    }
    return field(default=default, metadata=metadata, repr=not secret)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that refuses what is below *lowest*."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {lowest}")
        return value

    return number


def auto_or(lowest: int) -> Callable[[str], int]:
    """As `at_least`, and `auto` is 0."""

    def number(text: str) -> int:
        return 0 if text == "auto" else at_least(lowest)(text)

    return number


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")
    return value


def seconds_or_0(text: str) -> float:
    """Parse a number of seconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, at least 0")
    return value


def share(text: str) -> float:
    """Parse a share above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a share above 0 and up to 1")
    return value


def port_number(text: str) -> int:
    """Parse a TCP port."""
    value = at_least(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is at most 65535")
    return value


def yes_or_no(text: str) -> bool:
    """Parse what a flag that may stand alone is set to."""
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be yes or no")
    return text.lower() in ("yes", "true", "1")


def first_word(text: str) -> str:
    """Parse one of several words: a server may have many keys, and a client sends one."""
    return next(iter(text.split()), "")


def page_size(text: str) -> int:
    """Parse a power of two, or `auto` as 0."""
    value = auto_or(1)(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a power of two; use 16, 32 or 64")
    return value


def one_of(choices: Sequence[Any], parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """As *parse*, and refuse what is not among *choices*."""

    def choice(text: str) -> Any:
        value = parse(text)
        if value not in choices:
            expected = f"only {choices[0]} so far" if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"
            raise argparse.ArgumentTypeError(f"{text!r}: must be {expected}")
        return value

    return choice


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where the log is, and what every stage does to it."""

    redis_url: str = flag(
        "--redis-url",
        default="",
        help="redis://, rediss://, unix:// or redis+sentinel:// URL; without it `serve` starts a Valkey of its own",
        secret=True,
    )
    namespace: str = flag("--namespace", default=DEFAULT_NAMESPACE, help="first part of every key in Redis")
    retention_s: float = flag(
        "--retention",
        default=DEFAULT_RETENTION_S,
        parse=seconds,
        help="seconds for which a finished request can still be opened",
    )
    lease_s: float = flag(
        "--lease", default=3.0, parse=seconds, help="seconds of silence after which a worker's slot may be taken over"
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """What a frontend takes."""

    request_timeout_s: float = flag(
        "--request-timeout", default=600.0, parse=seconds, help="seconds after which a request fails"
    )
    max_queued_requests: int = flag(
        "--max-queued-requests",
        default=1024,
        parse=at_least(1),
        help="requests waiting or running beyond which new ones get 503",
    )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What a frontend does for its clients."""

    disconnect_grace_s: float = flag(
        "--disconnect-grace",
        default=0.0,
        parse=seconds_or_0,
        help="seconds after which a request is cancelled that its client left and nobody reads [0: at once]",
    )


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """Who may send requests, and how many."""

    api_key: tuple[str, ...] = flag(
        "--api-key",
        default=(),
        repeated=True,
        secret=True,
        help="keys that clients must send; rather set MINISGL_API_KEY: everybody here can read a command line [none]",
    )
    limits: str = flag(
        "--limits", default="", help="TOML file of the API keys and how many requests each may send [no limits]"
    )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where files are kept."""

    data_dir: str = flag(
        "--data-dir",
        default="",
        help="folder of the embedded Redis [state folder/port]",
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served."""

    model: str = flag(
        "--model",
        "--model-path",
        default="",
        help="folder of the model, or owner/name[@revision] on the Hugging Face hub [the demo model]",
    )


@dataclass(frozen=True, slots=True)
class NamesConfig:
    """Under which names the model is served."""

    served_model_name: tuple[str, ...] = flag(
        "--served-model-name", default=(), repeated=True, help="names clients may use [the hub's or the folder's name]"
    )


@dataclass(frozen=True, slots=True)
class DefaultsConfig:
    """What a request means that does not say it."""

    generation_config: str = flag(
        "--generation-config",
        default="auto",
        choices=("auto", "none"),
        help="auto: who asks for no temperature, top_p, top_k, min_p or repetition_penalty gets those of the model's"
        " generation_config.json; none: OpenAI's defaults",
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine computes."""

    dtype: str = flag(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and cache; auto is the checkpoint's",
    )
    tp: int = flag(
        "--tp",
        "--tensor-parallel-size",
        "--tp-size",
        default=1,
        parse=at_least(1),
        choices=(1,),
        help="devices that share one model",
    )
    dummy_weight: bool = flag(
        "--dummy-weight", default=False, parse=yes_or_no, help="random weights: no checkpoint but its config is needed"
    )
    device: str = flag("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where the model runs")
    threads: int = flag(
        "--threads", default=0, parse=auto_or(1), help="CPU threads of an engine [cores minus one in four]"
    )
    attention: str = flag(
        "--attn",
        "--attention-backend",
        default="auto",
        choices=("auto", "cpu", "fi", "reference"),
        help="attention backend; fi: FlashInfer, for NVIDIA GPUs",
    )
    cache: str = flag(
        "--cache",
        "--cache-type",
        default="radix",
        choices=("radix", "naive"),
        help="prefix cache; naive shares nothing",
    )
    max_prefill_length: int = flag(
        "--max-prefill-length",
        "--max-extend-length",
        default=0,
        parse=auto_or(1),
        help="prompt tokens in a step in which nothing decodes [8192 on CUDA, 2048 on CPU]",
    )
    mixed_prefill_length: int = flag(
        "--mixed-prefill-length",
        default=0,
        parse=auto_or(1),
        help="prompt tokens in a step beside running streams [512 on CUDA; 16 on CPU, or 2 for each request]",
    )
    max_running_requests: int = flag(
        "--max-running-requests", default=256, parse=at_least(1), help="requests an engine computes at once"
    )
    page_size: int = flag(
        "--page-size", default=0, parse=page_size, help="tokens in a page of the cache [16 on CUDA, 64 on CPU]"
    )
    num_pages: int = flag("--num-pages", default=0, parse=auto_or(1), help="pages of the cache [from the memory]")
    memory_ratio: float = flag(
        "--memory-ratio",
        default=0.9,
        parse=share,
        help="share of the free memory for weights and cache; on the CPU the cache takes 4 GiB at most",
    )
    max_seq_len: int = flag(
        "--max-seq-len",
        "--max-seq-len-override",
        default=0,
        parse=auto_or(2),
        help="prompt + output tokens of one request [the model's]",
    )


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where the frontend listens."""

    host: str = flag("--host", default="127.0.0.1", help="address to listen on")
    port: int = flag("--port", default=DEFAULT_PORT, parse=port_number, help="port to listen on")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Which processes `serve` starts."""

    tokenizers: int = flag(
        "--tokenizers",
        "--num-tokenizer",
        "--tokenizer-count",
        default=1,
        parse=at_least(0),
        help="tokenizer processes; 0 means 1",
    )
    shell: bool = flag(
        "--shell",
        "--shell-mode",
        default=False,
        parse=yes_or_no,
        help="chat in this terminal once the server is ready; it ends with the chat",
    )


@dataclass(frozen=True, slots=True)
class StageConfig:
    """How many workers `stage` starts, or which one it is."""

    replicas: int = flag("--replicas", default=1, parse=at_least(1), help="workers of this stage to start here")
    slot: int | None = flag(
        "--slot", default=None, parse=at_least(0), help="be that worker itself, in this slot where it is free"
    )


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """On what a frontend listens instead of an address."""

    listen_fd: int | None = flag(
        "--listen-fd", default=None, parse=at_least(0), help="an inherited socket to listen on, not --host and --port"
    )


@dataclass(frozen=True, slots=True)
class ConnectConfig:
    """Where a tool finds the log of a server that runs."""

    redis_url: str = flag(
        "--redis-url",
        default="",
        help="URL of the server's Redis [its embedded one, on this machine]",
        secret=True,
    )
    data_dir: str = flag("--data-dir", default="", help="folder of the server's embedded Redis [state folder/port]")
    port: int = flag(
        "--port", default=DEFAULT_PORT, parse=port_number, help="port of the server, which names its folder"
    )
    namespace: str = flag("--namespace", default=DEFAULT_NAMESPACE, help="first part of every key in Redis")

    @property
    def folder(self) -> Path:
        """Where the server keeps its embedded Redis."""
        return data_folder(self.data_dir, self.port)


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """How long the server keeps what has ended."""

    retention_s: float = flag(
        "--retention",
        default=DEFAULT_RETENTION_S,
        parse=seconds,
        help="seconds for which a finished request can still be opened, as the server was told",
    )


@dataclass(frozen=True, slots=True)
class PrintConfig:
    """How a tool prints."""

    as_json: bool = flag("--json", default=False, parse=yes_or_no, help="print JSON, for programs")


@dataclass(frozen=True, slots=True)
class TopConfig:
    """How often a picture is made."""

    interval_s: float = flag("--interval", default=1.0, parse=seconds, help="seconds from one picture to the next")
    once: bool = flag(
        "--once", default=False, parse=yes_or_no, help="print one picture, an interval long, as text and end"
    )


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """Whom the shell talks to, and what it begins with."""

    url: str = flag("--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", help="the server, with or without /v1")
    model: str = flag("--model", default="", help="the model's name [the first that the server lists]")
    key: str = flag(
        "--api-key",
        default="",
        parse=first_word,
        secret=True,
        help="key to send; rather set MINISGL_API_KEY: everybody here can read a command line [none]",
    )
    system: str = flag("--system", default="", help="text that comes before the conversation [none]")
    params: tuple[str, ...] = flag(
        "--set",
        default=(),
        repeated=True,
        help="fields of the requests, NAME=VALUE: temperature=0.2 max_tokens=64 [the server's defaults]",
    )
    prompt: str = flag("--prompt", "-q", default="", help="ask this once, print the answer and leave")


@dataclass(frozen=True, slots=True)
class Config:
    """One command line, resolved as far as it can be without looking at the machine."""

    command: str
    """`serve` or `stage`."""
    stage: str
    """The role of `stage`; empty for `serve`."""
    log: LogConfig
    requests: RequestConfig
    clients: ClientConfig
    keys: KeysConfig
    data: DataConfig
    model: ModelConfig
    names: NamesConfig
    defaults: DefaultsConfig
    engine: EngineConfig
    web: WebConfig
    listen: ListenConfig
    serve: ServeConfig
    worker: StageConfig

    @property
    def data_dir(self) -> Path:
        """The folder of this server: given, or one per port in the user's state folder."""
        return data_folder(self.data.data_dir, self.web.port)


def data_folder(data_dir: str, port: int) -> Path:
    """Return the folder that --data-dir names, or the one of the server at *port* in the user's state folder."""
    return Path(data_dir).expanduser().absolute() if data_dir else state_folder() / str(port)


def state_folder() -> Path:
    """Return our folder among those where the user's programs keep their state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "minisgl"


OWNERS: Mapping[str, tuple[type[Any], ...]] = {
    "serve": (
        ModelConfig,
        NamesConfig,
        DefaultsConfig,
        WebConfig,
        ServeConfig,
        EngineConfig,
        LogConfig,
        RequestConfig,
        ClientConfig,
        KeysConfig,
        DataConfig,
    ),
    "stage tokenize": (ModelConfig, StageConfig, LogConfig),
    "stage generate": (ModelConfig, NamesConfig, DefaultsConfig, StageConfig, EngineConfig, LogConfig),
    "stage detokenize": (ModelConfig, StageConfig, LogConfig),
    "stage web": (WebConfig, ListenConfig, StageConfig, LogConfig, RequestConfig, ClientConfig, KeysConfig),
}
"""Which config objects a command fills: what its parser accepts."""


TOOLS: Mapping[str, tuple[type[Any], ...]] = {
    "trace": (ConnectConfig, RetentionConfig, PrintConfig),
    "top": (ConnectConfig, TopConfig, PrintConfig),
    "dead ls": (ConnectConfig, PrintConfig),
    "dead show": (ConnectConfig, PrintConfig),
    "dead requeue": (ConnectConfig, RequestConfig, RetentionConfig, PrintConfig),
    "dead drop": (ConnectConfig, PrintConfig),
    "shell": (ShellConfig,),
}
"""The same of the commands that look into a server that runs, for `parse_flags`."""


def concealed(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line without the secrets in it, and the variables that say them instead.

    Everybody can read a command line: who finds any begins again without them. A URL without a password is none.
    """
    secrets: dict[str, dataclasses.Field[Any]] = {}
    for item in (item for owners in (*OWNERS.values(), *TOOLS.values()) for item in flags_of(owners)):
        if item.metadata["secret"]:
            for name in item.metadata["flags"]:
                secrets.setdefault(name, item)  # a flag of several commands takes what `serve` lets it take
    kept: list[str] = []
    variables: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in secrets:
            kept.append(word)
            continue
        item = secrets[name]
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("-") and (item.metadata["repeated"] or not values):
            values.append(rest.pop(0))
        if not values or ("--redis-url" in item.metadata["flags"] and not _has_password(values[0])):
            kept += [word, *values] if not equals else [word]
        else:
            variables[_variable(item)] = " ".join(values)
    return kept, variables


def _has_password(url: str) -> bool:
    return "@" in url or "sentinel_password=" in url


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def flags_of(owners: Sequence[type[Any]]) -> list[dataclasses.Field[Any]]:
    """Return the fields of every flag that fills one of *owners*."""
    return [item for owner in owners for item in dataclasses.fields(owner)]


def _variable(item: dataclasses.Field[Any]) -> str:
    """Return the name in the environment that sets a flag."""
    name: str = item.metadata["flags"][0]
    return "MINISGL_" + name.lstrip("-").replace("-", "_").upper()


def _default_text(item: dataclasses.Field[Any]) -> str:
    if item.default in (None, "", 0, ()) or "[" in item.metadata["help"]:
        return ""
    return f" [{item.default}]"


def build_parser(
    command: str, owners: Sequence[type[Any]], environment: Mapping[str, str], about: str = ""
) -> argparse.ArgumentParser:
    """Return the parser of `minisgl <command>` with the flags of *owners*; the environment gives the defaults."""
    parser = _Parser(prog=f"minisgl {command}", description=about or None, allow_abbrev=False)
    for item in flags_of(owners):
        names, parse = item.metadata["flags"], item.metadata["parse"]
        options: dict[str, Any] = {
            "dest": item.name,
            "type": parse,
            "default": item.default,
            "help": (item.metadata["help"] + _default_text(item)).replace("%", "%%"),
        }
        if item.metadata["repeated"]:
            options |= {"nargs": "+"}
        if isinstance(item.default, bool):
            options |= {"nargs": "?", "const": "yes", "metavar": "yes|no"}
        if item.metadata["choices"] is not None:  # not argparse's own, which does not look at defaults
            choices = item.metadata["choices"]
            options |= {"type": one_of(choices, parse), "metavar": "{" + ",".join(map(str, choices)) + "}"}
        else:
            options.setdefault("metavar", names[0].lstrip("-").rsplit("-", 1)[-1].upper())
        text = environment.get(_variable(item))
        if text is not None:  # argparse parses a default that is text, so a bad value gets the flag's own error
            options["default"] = text.split() if item.metadata["repeated"] else text
            if item.metadata["repeated"] and item.metadata["secret"] and not text.split():
                options["default"] = [text]  # no keys would let everybody in: an empty one is refused
        parser.add_argument(*names, **options)
    return parser


def parse_command(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Return the config of `serve [flags]` or `stage ROLE [flags]`.

    Raises:
        ConfigError: An unknown command, stage or flag, or a value out of range.
    """
    command, rest = arguments[0], list(arguments[1:])
    stage = ""
    if command == "stage":
        if not rest or rest[0] not in STAGES:
            seen = rest[0] if rest else "nothing"
            raise ConfigError(f"minisgl stage: {seen} given, expected one of {', '.join(STAGES)}")
        stage = rest.pop(0)
    name = f"{command} {stage}".strip()
    parsed = build_parser(name, OWNERS[name], environment).parse_args(rest)
    return Config(
        command=command,
        stage=stage,
        log=_fill(LogConfig, parsed),
        requests=_fill(RequestConfig, parsed),
        clients=_fill(ClientConfig, parsed),
        keys=_fill(KeysConfig, parsed),
        data=_fill(DataConfig, parsed),
        model=_fill(ModelConfig, parsed),
        names=_fill(NamesConfig, parsed),
        defaults=_fill(DefaultsConfig, parsed),
        engine=_fill(EngineConfig, parsed),
        web=_fill(WebConfig, parsed),
        listen=_fill(ListenConfig, parsed),
        serve=_fill(ServeConfig, parsed),
        worker=_fill(StageConfig, parsed),
    )


def parse_flags(
    command: str, owners: Sequence[type[Any]], arguments: Sequence[str], environment: Mapping[str, str], about: str = ""
) -> list[Any]:
    """Return the config objects *owners* of a command that is not about the processes of a server: a tool.

    Raises:
        ConfigError: An unknown flag, or a value out of range.
    """
    parsed = build_parser(command, owners, environment, about).parse_args(arguments)
    return [_fill(owner, parsed) for owner in owners]


def _fill(owner: type[C], parsed: argparse.Namespace) -> C:
    values = {}
    for item in dataclasses.fields(owner):  # type: ignore[arg-type]  # every owner is a dataclass
        value = getattr(parsed, item.name, item.default)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return owner(**values)


def arguments_for(config: Config, stage: str) -> list[str]:
    """Return the flags that make a `minisgl stage <stage>` process see the same config as this one, the secrets in its
    environment aside: everybody can read a command line.
    """
    arguments: list[str] = []
    for owner in OWNERS[f"stage {stage}"]:
        if owner is StageConfig or owner is ListenConfig:
            continue  # they are about one process
        filled = next(value for value in _filled(config) if isinstance(value, owner))
        for item in dataclasses.fields(owner):
            value = getattr(filled, item.name)
            if value == item.default or item.metadata["secret"]:
                continue
            texts = [str(part) for part in value] if item.metadata["repeated"] else [str(value)]
            arguments += [item.metadata["flags"][0], *texts]
    return arguments


def secrets_of(config: Config) -> dict[str, str]:
    """Return what such a process must have in its environment beside those flags."""
    secrets: dict[str, str] = {}
    for filled in (value for value in _filled(config) if dataclasses.is_dataclass(value)):
        for item in dataclasses.fields(filled):
            value = getattr(filled, item.name)
            if item.metadata["secret"] and value != item.default:
                secrets[_variable(item)] = " ".join(value) if item.metadata["repeated"] else value
    return secrets


def _filled(config: Config) -> list[Any]:
    return [getattr(config, item.name) for item in dataclasses.fields(config)]
