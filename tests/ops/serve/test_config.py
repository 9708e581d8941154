"""The command line is a contract: what there is, what it means, and what is said when it is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from typing import Any

import pytest

from ops import dead, trace
from ops.config import ConnectConfig
from ops.replay import drive, forget, schedule
from ops.serve.config import (
    COMMANDS,
    ServerConfig,
    StageConfig,
    parse_command,
    stage_flags,
    stage_secrets,
    without_secrets,
)
from ops.shell.config import ShellConfig
from ops.top import command as top
from pipeline.errors import ConfigError
from pipeline.flags import build_parser, flags_of, owners_of, parse_flags, secrets_of

TOOLS = {
    "trace": trace.FLAGS,
    "top": top.FLAGS,
    "dead ls": dead.FLAGS,
    "dead show": dead.FLAGS,
    "dead requeue": dead.REQUEUE_FLAGS,
    "dead drop": dead.FLAGS,
    "replay drive": drive.FLAGS,
    "replay schedule": schedule.FLAGS,
    "replay forget": forget.FLAGS,
    "shell": (ShellConfig,),
}
OWNERS = {command: owners_of(config) for command, config in COMMANDS.items()} | TOOLS


def flags(text: str) -> set[tuple[str, ...]]:
    """Return the flags that *text* names, each with its aliases after strokes."""
    return {tuple(each.split("|")) for each in text.split()}


MODEL = flags("--model|--model-path --tokenizer")
DATA = flags("--data-dir --repair")
NAMES = flags("--served-model-name")
DEFAULTS = flags("--generation-config")
WEB = flags("--host --port")
REQUESTS = flags("--request-timeout --max-queued-requests --acks --acks-disk")
ORIGINS = flags("--allow-host --allow-origin")
KEYS = flags("--api-key --limits --admin-key")
ARCHIVED = flags("--archive")
HTTP = REQUESTS | ORIGINS | KEYS | ARCHIVED
HTTP |= flags("--background-timeout --max-background")
HTTP |= flags("--disconnect-grace --max-body-bytes --max-log-bytes --pages --trusted-proxies --strict-model-names")
DEMAND = flags("--engines-on-demand")
FILES = flags("--to --retain --max-bytes --leave")
LOG = flags("--redis-url --namespace --retention --response-retention --journal-bytes --lease")
ENGINE = flags(
    "--dtype --quantization --tp|--tensor-parallel-size|--tp-size --dummy-weight --model-impl --trust-remote-code "
    "--device --threads --kernels "
    "--attn|--attention-backend --cache|--cache-type --max-prefill-length|--max-extend-length --mixed-prefill-length "
    "--target-itl --max-running-requests --overlap --speculate --commit-interval --steal-after "
    "--graph|--cuda-graph-max-bs --deterministic --gpu-new "
    "--page-size --num-pages --memory-ratio --max-seq-len|--max-seq-len-override"
)
PROMPTS = flags("--tokenize-timeout --tool-parser|--tool-call-parser")
SERVE = flags("--tokenizers|--num-tokenizer|--tokenizer-count --dp|--data-parallel-size|--dp-size --shell|--shell-mode")
SERVE |= flags("--frontends")
WORKER = flags("--replicas --slot --ready-file --wait-for-redis")
NODES = flags("--nnodes --node-rank --group --rank-address")
RANK = flags("--rank")
SHARE = flags("--engine --engines --free-bytes")
LISTEN = flags("--listen-fd")
CONNECT = flags("--redis-url --data-dir --port --namespace")
RETENTION = flags("--retention")
JSON = flags("--json")
CLIENT = flags("--url --model --api-key --set")
STEPS = flags("--from --to")
CHOICE = flags("--since --until --where")
LIMITS = flags("--max-prefill-length --mixed-prefill-length --max-running-requests --num-pages")
FLAGS: Mapping[str, Set[tuple[str, ...]]] = {
    "serve": MODEL | DATA | NAMES | DEFAULTS | WEB | SERVE | ENGINE | NODES | LOG | PROMPTS | HTTP,
    "stage tokenize": MODEL | WORKER | LOG | PROMPTS,
    "stage generate": MODEL | NAMES | DEFAULTS | WORKER | ENGINE | LOG | NODES | RANK | SHARE,
    "stage detokenize": MODEL | WORKER | LOG,
    "stage web": WEB | LISTEN | WORKER | LOG | HTTP | DEMAND,
    "stage archive": WORKER | LOG | FILES,
    "trace": CONNECT | RETENTION | ARCHIVED | JSON,
    "top": CONNECT | JSON | flags("--interval --once"),
    "dead ls": CONNECT | JSON,
    "dead show": CONNECT | JSON,
    "dead requeue": CONNECT | REQUESTS | RETENTION | JSON,
    "dead drop": CONNECT | JSON,
    "replay schedule": CONNECT | ARCHIVED | JSON | STEPS | LIMITS,
    "replay forget": CONNECT | RETENTION | ARCHIVED | JSON | flags("--user"),
    "replay drive": CONNECT
    | (ARCHIVED | CHOICE | JSON | CLIENT | flags("--speed --compare --client-clock --timeout --plot")),
    "shell": CLIENT | flags("--system --prompt|-q"),
}
"""Every flag with its aliases. A flag is declared by the change that makes it work; that change adds it here."""

SECRET = ("--redis-url", "--api-key", "--admin-key")


def pairs(text: str) -> list[tuple[str, str]]:
    """Return flags and values of a *text* in which they take turns."""
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


TEXTS = pairs(
    "--generation-config none --host :: --speculate off --redis-url redis://u:p@h:1/2 --namespace blue --data-dir /d "
    "--limits /l.toml --admin-key k3 --archive /a --to /a --dtype float32 --quantization int8 --device cpu "
    "--kernels avx2 --attn fa,fi --cache naive --overlap on --tool-parser hermes --group run.0 --rank-address 10.0.0.5 "
    "--from 7-1200 --user ann --url http://h:1 --tokenizer /t --prompt Hi --plot /p.png --model-impl native "
    "--ready-file /tmp/ready"
)
NUMBERS = pairs(
    "--port 8000 --max-queued-requests 1 --max-body-bytes 2048 --tp 2 --threads 3 --max-prefill-length 100 "
    "--mixed-prefill-length 10 --target-itl 60 --max-running-requests 2 --commit-interval 0 --graph 16 --page-size 32 "
    "--num-pages 5 --max-seq-len 2 --tokenizers 0 --dp 2 --replicas 2 --slot 0 --rank 1 --nnodes 2 --node-rank 1 "
    "--engine 1 --engines 2 --free-bytes 5 --listen-fd 3 --max-background 3 --steal-after 1 --acks 2 "
    "--frontends 3"
)
MEASURES = pairs(
    "--retention 0.5 --request-timeout 7 --lease 1e1 --disconnect-grace 0.5 --memory-ratio 1 --tokenize-timeout 2.5 "
    "--response-retention 9 --background-timeout 8 --interval 0.5 --speed 2.5 --timeout 7 "
    "--wait-for-redis 60"
)
SWITCHES = (
    "--repair --strict-model-names --leave --dummy-weight --trust-remote-code --deterministic --json --once --shell "
    "--acks-disk --compare --client-clock --engines-on-demand --gpu-new"
)
SEVERAL = {
    "--served-model-name": "a b",
    "--trusted-proxies": "10.0.0.5 fd00::/8",
    "--allow-host": "a b",
    "--allow-origin": "http://a http://b",
    "--api-key": "k1 k2",
    "--set": "seed=1",
}
VALUES: dict[str, tuple[str, object]] = {
    **{flag: (text, text) for flag, text in TEXTS},
    **{flag: (text, int(text)) for flag, text in NUMBERS},
    **{flag: (text, float(text)) for flag, text in MEASURES},
    **dict.fromkeys(SWITCHES.split(), ("yes", True)),
    **{flag: (text, tuple(text.split())) for flag, text in SEVERAL.items()},
    "--model": ("/m o d e l", "/m o d e l"),
    "--system": ("Be kind.", "Be kind."),
    "--pages": ("no", False),
    "--journal-bytes": ("8M", 8 << 20),
    "--max-log-bytes": ("64m", 64 << 20),
    "--max-bytes": ("1G", 1 << 30),
    "--retain": ("2d", 172800.0),
    "--since": ("2026-11-23T09:00", 1_795_424_400_000),
    "--until": ("2026-11-23T10:00+01:00", 1_795_424_400_000),
    "--where": ("model=demo", (("model", "demo"),)),
}
"""A value for each flag, and what it becomes; a tuple is of a flag that takes several words."""
SHELL_VALUES = VALUES | {"--api-key": ("k1 k2", "k1")}
"""A client sends one key of those that a server has."""

BAD = {
    "at least 1": "--port eighty --port 0 --max-queued-requests 0 --tp 0 --nnodes 0 --threads -1 "
    "--max-prefill-length none --mixed-prefill-length -5 --target-itl 0.5 --max-running-requests 0 "
    "--num-pages -2 --dp 0 --frontends 0",
    "at least 0": "--disconnect-grace -1 --disconnect-grace nan --node-rank -1 --commit-interval -1 --steal-after -1 "
    "--commit-interval 0.5 --graph -1 --tokenizers -1 --acks -1",
    "at least 2": "--max-seq-len 1",
    "at least 1024": "--max-body-bytes 1023",
    "at most 65535": "--port 65536",
    "seconds above 0": "--retention 0 --retention soon --request-timeout inf --lease -1 --lease nan "
    "--tokenize-timeout 0",
    "seconds": "--disconnect-grace soon",
    "whole number": "--max-queued-requests 1.5 --tp many",
    "0, or at least 1M (1048576 bytes)": "--journal-bytes 1000000",
    "0, or at least 1M": "--max-bytes 1000",
    "0, or at least 16M (16777216 bytes)": "--max-log-bytes 16777215",
    "0, or at least 16M": "--max-log-bytes -1 --max-log-bytes 1.5G --max-log-bytes all",
    "K, M and G stand for KiB, MiB and GiB": "--max-log-bytes G",
    "one of auto, none": "--generation-config vllm",
    "one of auto, none, hermes": "--tool-parser qwen",
    "one of auto, fi, fa,fi, torch": "--attn trtllm",
    "one of auto": "--attn fi,fa",
    "one of auto, on, off": "--overlap yes",
    "one of radix, naive": "--cache lru",
    "reference": "--attn fast",
    "bfloat16": "--dtype int8",
    "int8": "--quantization int3",
    "cuda": "--device tpu",
    "avx512": "--kernels sse",
    "letters, digits, dots, dashes and underscores": "--group a/b",
    "one IP address of this machine": "--rank-address node-1 --rank-address 0.0.0.0",
    "yes or no": "--dummy-weight perhaps",
    "power of two": "--page-size 24",
    "up to 1": "--memory-ratio 0 --memory-ratio 1.1",
    "share": "--memory-ratio most",
    "a number of s, m, h or d": "--retain -1 --retain nan",
    "such as 30d": "--retain d",
}
"""What is said -> of which flags with which values."""
BAD_VALUES = [
    *((flag, value, expected) for expected, text in BAD.items() for flag, value in pairs(text)),
    ("--group", "my group", "letters, digits, dots, dashes and underscores"),
    ("--retain", "a month", "such as 30d"),
]


def parse(*arguments: str, **environment: str) -> ServerConfig | StageConfig:
    return parse_command(arguments, environment)


def parse_serve(*arguments: str, **environment: str) -> ServerConfig:
    config = parse_command(["serve", *arguments], environment)
    assert isinstance(config, ServerConfig)
    return config


def command_with(flag: str) -> str:
    """Return a command that has *flag*."""
    return "serve" if any(flag in names for names in FLAGS["serve"]) else "stage archive"


def value_of(config: ServerConfig | StageConfig, flag: str) -> object:
    """Return what *flag* became."""
    return values_in(getattr(config, item.name) for item in dataclasses.fields(config))[flag]


def values_in(owners: Iterable[Any]) -> dict[str, object]:
    """Return flag -> value."""
    return {
        item.metadata["flags"][0]: getattr(owner, item.name) for owner in owners for item in dataclasses.fields(owner)
    }


def words_of(flag: str, values: Mapping[str, tuple[str, object]] = VALUES) -> list[str]:
    text, value = values[flag]
    return text.split() if isinstance(value, tuple) else [text]


def variable(flag: str) -> str:
    return "MINISGL_" + flag.removeprefix("--").replace("-", "_").upper()


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_and_aliases_are_these(command: str) -> None:
    assert {item.metadata["flags"] for item in flags_of(OWNERS[command])} == FLAGS[command]


def test_the_commands_are_these_and_every_flag_is_tried_here() -> None:
    assert set(OWNERS) == set(FLAGS)
    assert {names[0] for flags in FLAGS.values() for names in flags} == set(VALUES)
    assert {flag for flag, *_ in BAD_VALUES} <= set(VALUES)


@pytest.mark.parametrize("command", FLAGS)
def test_no_two_flags_share_a_name_or_a_field(command: str) -> None:
    names = [name for item in flags_of(OWNERS[command]) for name in item.metadata["flags"]]
    fields = [item.name for item in flags_of(OWNERS[command])]
    assert len(names) == len(set(names))
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize("command", FLAGS)
def test_help_names_every_flag(command: str) -> None:
    text = build_parser(command, OWNERS[command], {}).format_help()
    assert all(name in text for names in FLAGS[command] for name in names)


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_and_alias_and_the_environment_set_its_value(command: str) -> None:
    values = SHELL_VALUES if command in ("shell", "replay drive") else VALUES
    for flag, *aliases in FLAGS[command]:
        text, value = values[flag]
        for name in (flag, *aliases):
            configs = parse_flags(command, OWNERS[command], [name, *words_of(flag, values)], {})
            assert values_in(configs)[flag] == value
        assert values_in(parse_flags(command, OWNERS[command], [], {variable(flag): text}))[flag] == value


def test_the_command_line_wins_over_the_environment() -> None:
    assert parse_serve("--port", "1", MINISGL_PORT="2").web.port == 1
    assert parse_serve("--served-model-name", "c", MINISGL_SERVED_MODEL_NAME="a b").names.served_model_name == ("c",)
    assert parse_serve("--device", "cpu", MINISGL_DEVICE="cuda").engine.device == "cpu"


def test_the_environment_of_the_process_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_PORT", "2")
    assert parse_serve().web.port == 1919


def test_a_flag_that_a_tool_shares_with_serve_has_the_same_default() -> None:
    defaults = {item.name: item.default for item in flags_of(OWNERS["serve"])}
    defaults["retention_s"] = None  # the workers tell the tools what the server was given
    shared = [item for owners in TOOLS.values() for item in flags_of(owners) if item.name in defaults]
    assert {item.name: item.default for item in shared} == {item.name: defaults[item.name] for item in shared}


def test_abbreviations_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-que"):
        parse_serve("--max-que", "5")
    with pytest.raises(ConfigError, match="--por=5"):
        parse_serve("--por=5")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stage"], "nothing given, expected one of tokenize, generate, detokenize, web, archive"),
        (["stage", "cook"], "cook given, expected one of tokenize, generate, detokenize, web, archive"),
        (["stage", "web", "--page-size", "16"], "--page-size"),
        (["serve", "--replicas", "2"], "--replicas"),
        (["serve", "--port"], "--port"),
        (["serve", "model"], "model"),
    ],
)
def test_what_a_command_does_not_know_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(*arguments)


@pytest.mark.parametrize(("flag", "value", "expected"), BAD_VALUES)
@pytest.mark.parametrize("source", ["command line", "environment"])
def test_a_bad_value_is_refused_with_flag_value_and_what_is_expected(
    source: str, flag: str, value: str, expected: str
) -> None:
    arguments = [] if source == "environment" else [f"{flag}={value}"]
    environment = {variable(flag): value} if source == "environment" else {}
    with pytest.raises(ConfigError) as caught:
        parse_command([*command_with(flag).split(), *arguments], environment)
    message = str(caught.value)
    assert flag in message
    assert repr(value) in message
    assert expected in message.replace(repr(value), "")
    assert "\n" not in message


def test_a_bad_value_in_the_environment_does_not_matter_when_the_command_line_wins() -> None:
    for flag, bad, _ in BAD_VALUES:
        good, value = VALUES[flag]
        assert value_of(parse(*command_with(flag).split(), flag, good, **{variable(flag): bad}), flag) == value


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [("--retain", *each) for each in (("0", 0), ("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("30d", 2592000))]
    + [("--max-log-bytes", "0", 0)]
    + [("--max-log-bytes", text, 16 << 20) for text in ("16777216", "16384K", "16M")]
    + [("--max-log-bytes", "2g", 2 << 30)]
    + [
        (f"--{name}", "auto", 0)  # the machine decides
        for name in (
            "threads",
            "max-prefill-length",
            "mixed-prefill-length",
            "target-itl",
            "page-size",
            "num-pages",
            "max-seq-len",
        )
    ],
)
def test_an_age_or_a_size_may_have_a_unit_and_auto_is_zero(flag: str, text: str, value: float) -> None:
    command = command_with(flag).split()
    config = parse(*command, flag, text)
    assert value_of(config, flag) == value
    if command[1:]:
        assert value_of(parse(*command, *stage_flags(config, command[1])), flag) == value


@pytest.mark.parametrize(
    ("flags", "expected"), [([], False), (["--dummy-weight"], True), (["--dummy-weight", "no"], False)], ids=str
)
def test_a_flag_that_is_yes_or_no_may_stand_alone(flags: list[str], expected: bool) -> None:
    config = parse_serve(*flags, "--port", "8000")
    assert (config.engine.dummy_weight, config.web.port) == (expected, 8000)


@pytest.mark.parametrize("stage", ["tokenize", "generate", "detokenize", "web"])
def test_a_stage_that_serve_starts_sees_the_same_config(stage: str) -> None:
    for flags in ([], [word for (flag, *_) in FLAGS["serve"] for word in (flag, *words_of(flag))]):
        serve = parse_serve(*flags)
        again = parse("stage", stage, *stage_flags(serve, stage), **secrets_of(serve))
        accepted = {names[0] for names in FLAGS[f"stage {stage}"] - WORKER - LISTEN - DEMAND - RANK - SHARE}
        for flag in accepted:
            assert value_of(again, flag) == value_of(serve, flag)


def test_the_flags_for_a_stage_leave_out_defaults_and_which_worker_it_is() -> None:
    assert stage_flags(parse_serve(), "generate") == []
    config = parse("stage", "generate", "--slot", "2", "--page-size", "16")
    assert stage_flags(config, "generate") == ["--page-size", "16"]


def test_what_is_secret_is_in_no_command_line_and_in_no_text_of_the_config() -> None:
    given = {"--redis-url": ["redis://u:hidden@h"], "--api-key": ["hidden1", "hidden2"], "--admin-key": ["hidden3"]}
    assert set(given) == set(SECRET)
    config = parse_serve(*(word for flag, words in given.items() for word in (flag, *words)))
    assert stage_flags(config, "web") == []
    assert "hidden" not in repr(config)
    assert secrets_of(config) == {variable(flag): " ".join(words) for flag, words in given.items()}
    assert secrets_of(parse_serve()) == {}


def test_each_stage_has_the_secrets_that_it_needs_and_no_others() -> None:
    keys = ("--api-key", "hidden1", "hidden2", "--admin-key", "hidden3")
    config = parse_serve("--redis-url", "redis://u:hidden@h", *keys)
    url = {"MINISGL_REDIS_URL": "redis://u:hidden@h"}
    assert [stage_secrets(config, stage) for stage in ("tokenize", "generate", "detokenize")] == [url] * 3
    both = {"MINISGL_API_KEY": "hidden1 hidden2", "MINISGL_ADMIN_KEY": "hidden3"}
    assert stage_secrets(config, "web") == url | both
    assert stage_secrets(parse("stage", "web", "--api-key", "hidden1"), "web") == {"MINISGL_API_KEY": "hidden1"}


@pytest.mark.parametrize("text", ["", "  "])
def test_no_keys_in_the_environment_is_an_empty_key_which_is_refused_later(text: str) -> None:
    assert parse_serve(MINISGL_API_KEY=text).keys.api_key == (text,)
    assert parse_serve("--api-key", "k", MINISGL_API_KEY=text).keys.api_key == ("k",)
    assert (parse_serve().keys.admin_key, parse_serve(MINISGL_ADMIN_KEY=text).keys.admin_key) == (None, text)


def test_the_data_folder_is_given_or_one_for_each_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(parse_serve("--port", "8000").data_dir) == "/state/minisgl/8000"
    assert str(parse_serve("--data-dir", "/d").data_dir) == "/d"
    assert str(ConnectConfig(port=8000).folder) == "/state/minisgl/8000"
    assert str(ConnectConfig(data_dir="/d", port=8000).folder) == "/d"


@pytest.mark.parametrize(
    ("line", "kept", "secret"),
    [
        ("serve --redis-url redis://me:pw@box --port 80", "serve --port 80", "REDIS_URL=redis://me:pw@box"),
        ("trace u --redis-url=redis://:pw@box --json", "trace u --json", "REDIS_URL=redis://:pw@box"),
        ("serve --api-key a b --port 80", "serve --port 80", "API_KEY=a b"),
        ("serve --api-key a", "serve", "API_KEY=a"),
        ("serve --admin-key a --port 80", "serve --port 80", "ADMIN_KEY=a"),
        ("stage web --admin-key=a", "stage web", "ADMIN_KEY=a"),
        (
            "top --redis-url redis+sentinel://h?sentinel_password=p",
            "top",
            "REDIS_URL=redis+sentinel://h?sentinel_password=p",
        ),
    ],
)
def test_a_secret_on_the_command_line_is_taken_out_of_it(line: str, kept: str, secret: str) -> None:
    name, _, value = secret.partition("=")
    assert without_secrets(line.split()) == (kept.split(), {f"MINISGL_{name}": value})


@pytest.mark.parametrize(
    "line",
    [
        "serve --port 80 --model M",
        "stage web --redis-url redis://box:6379/0",
        "stage web --redis-url=redis://box/?password_file=/run/secret",
        "serve --redis-url",
        "serve --api-key",
        "serve --redis-url --port 80",
    ],
)
def test_a_command_line_without_secrets_stays_as_it_is(line: str) -> None:
    assert without_secrets(line.split()) == (line.split(), {})
