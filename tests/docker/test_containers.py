"""Dockerfile, compose file and stack file, read as a machine reads them: what they start, open, and let be set."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from support.redis_servers import STARTED, Servers, command, until

from ops.serve.config import COMMANDS, ServerConfig, parse_command
from pipeline.flags import flags_of, owners_of
from pipeline.log.address import connect, parse_address
from pipeline.log.check import check_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "containers.md").read_text()
FILE = ROOT / "docker" / "compose.yaml"
STACK_FILE = ROOT / "docker" / "stack.yaml"
VALUES = {
    "MINISGL_MODEL": "M",
    "MINISGL_RETENTION": "60",
    "MINISGL_LEASE": "3",
    "MINISGL_DTYPE": "bfloat16",
    "MINISGL_QUANTIZATION": "int8",
    "MINISGL_KERNELS": "avx2",
    "MINISGL_THREADS": "2",
    "MINISGL_MAX_SEQ_LEN": "1024",
    "MINISGL_SERVED_MODEL_NAME": "a b",
    "MINISGL_API_KEY": "k",
    "MINISGL_ADMIN_KEY": "k",
    "MINISGL_REQUEST_TIMEOUT": "60",
    "MINISGL_MAX_QUEUED_REQUESTS": "8",
    "MINISGL_MAX_LOG_BYTES": "64M",
    "MINISGL_ALLOW_HOST": "localhost gpu-box",
    "MINISGL_ALLOW_ORIGIN": "https://chat.example.com",
    "MINISGL_TOKENIZERS": "2",
    "MINISGL_DP": "2",
    "MINISGL_GRAPH": "64",
    "MINISGL_ATTN": "fi",
    "MINISGL_HOST": "0.0.0.0",
    "MINISGL_DATA_DIR": "/data",
    "MINISGL_ARCHIVE": "/archive",
    "MINISGL_TO": "/archive",
    "MINISGL_RETAIN": "7d",
    "MINISGL_MAX_BYTES": "5G",
    "MINISGL_READY_FILE": "/tmp/ready",
    "MINISGL_WAIT_FOR_REDIS": "600",
}
"""What a user may set each variable to."""
TWO = ("{minisgl:0}:balance:a", "{minisgl:0}:balance:b")
"""Two keys that the user `minisgl` may write."""
USER_ID = "10001"
"""The image's user."""
REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^}]*)|:?\?[^}]*)?\}")


def settled(value: Any) -> Any:
    """Return *value* as Compose reads it where no variable is set: `${NAME:-default}` is the default, `$$` a `$`."""
    if isinstance(value, dict):
        return {name: settled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [settled(each) for each in value]
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: found[2] or "", value).replace("$$", "$")
    return value


RAW: Mapping[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: Mapping[str, Any] = settled(RAW)["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "redis"}
STACK: Mapping[str, Any] = settled(yaml.safe_load(STACK_FILE.read_text()))
STAGES = ("web", "tokenize", "generate", "detokenize")
STARTED_BY = {f"{name} of compose": service for name, service in OURS.items()} | {
    f"{name} of the stack": STACK["services"][name] for name in STAGES
}
"""The services that run a command of ours."""


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, continued lines joined and comments left out."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def last_stage() -> list[tuple[str, str]]:
    instructions = dockerfile()
    starts = [index for index, (word, _) in enumerate(instructions) if word == "FROM"]
    return instructions[starts[-1] :]


def variables(command: str) -> set[str]:
    """Return the names in the environment that a command heeds."""
    return {
        "MINISGL_" + item.metadata["flags"][0].lstrip("-").replace("-", "_").upper()
        for item in flags_of(owners_of(COMMANDS[command]))
    }


# The services


@pytest.mark.parametrize("which", STARTED_BY)
def test_the_command_of_a_service_is_a_command_line_of_ours(which: str) -> None:
    name, service = which.split()[0], STARTED_BY[which]
    command = service["command"]
    assert command == {"minisgl": "serve", "gpu": "serve --device cuda"}.get(name, f"stage {name}")
    set_here = {variable for variable in service["environment"] if variable.startswith("MINISGL_")}
    assert set_here <= variables(command.partition(" --")[0]), "what the command does not heed is not offered to be set"
    values = VALUES | {"MINISGL_REDIS_URL": service["environment"]["MINISGL_REDIS_URL"]}
    config = parse_command(command.split(), {variable: values[variable] for variable in set_here})
    assert config.log.redis_url == service["environment"]["MINISGL_REDIS_URL"]


@pytest.mark.parametrize("which", [*STARTED_BY, "operator of the stack"])
def test_a_service_comes_to_redis_as_its_own_user(which: str, tmp_path: Path) -> None:
    name = which.split()[0]
    service = STARTED_BY.get(which) or STACK["services"][name]
    url = service["environment"]["MINISGL_REDIS_URL"]
    name = "minisgl" if name == "gpu" else name  # both are whole servers
    assert f"password_file=/passwords/{name}" in url
    (tmp_path / name).write_text("pw")
    address = parse_address(url.replace("/passwords", str(tmp_path)))
    assert (address.hosts, address.secret.user, address.secret.read()) == ((("redis", 6379),), name, "pw")
    assert re.search(rf"^user {name} reset on ", (ROOT / "ops/redis/users.acl").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", SERVICES)
def test_every_port_is_bound_to_loopback_unless_told_otherwise(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert (len(ports) == 1) is (name in ("minisgl", "gpu", "web"))
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


@pytest.mark.parametrize("file", [FILE, STACK_FILE], ids=lambda file: file.name)
def test_every_variable_is_documented(file: Path) -> None:
    referred = {found[1] for found in REFERENCE.finditer(file.read_text())}
    services = yaml.safe_load(file.read_text())["services"].values()
    passed_on = {variable for service in services for variable in service.get("environment", {}) if variable}
    passed_on -= {"MINISGL_REDIS_URL", "MINISGL_READY_FILE", "MINISGL_WAIT_FOR_REDIS"}  # not for users to set
    missing = {variable for variable in referred | passed_on if f"`{variable}`" not in PAGE}
    assert not missing


# The stack


def test_the_stack_gives_each_user_of_redis_the_password_of_its_own_and_redis_all() -> None:
    services = STACK["services"]
    users = {*STAGES, "operator"}
    assert set(services) == users | {"redis"}
    for name in users:
        (secret,) = services[name]["secrets"]
        assert (secret["source"], secret["target"]) == (name, f"/passwords/{name}")
        assert (secret["uid"], secret["mode"]) == (USER_ID, 0o400)
    given = {secret["source"]: secret["target"] for secret in services["redis"]["secrets"]}
    assert given == {name: f"/passwords/{name}" for name in users}
    assert STACK["secrets"] == {name: {"external": True, "name": f"minisgl-{name}"} for name in users}
    assert f"for user in {' '.join(STAGES)} operator; do" in PAGE


def test_the_files_of_redis_are_where_its_script_reads_them() -> None:
    sources = {name: config["file"] for name, config in STACK["configs"].items()}
    files = {config["target"]: sources[config["source"]] for config in STACK["services"]["redis"]["configs"]}
    assert STACK["services"]["redis"]["entrypoint"] == SERVICES["redis"]["entrypoint"]
    mounted = (text.removeprefix("./").split(":") for text in SERVICES["redis"]["volumes"] if "/minisgl/" in text)
    assert files == {target: source for source, target, _ in mounted}
    assert all((STACK_FILE.parent / source).is_file() for source in files.values())


def test_an_update_of_the_stack_waits_until_a_worker_is_ready_and_no_missing_engine_ends_the_streams() -> None:
    for name in ("tokenize", "generate", "detokenize"):
        service = STACK["services"][name]
        assert service["healthcheck"]["test"] == ["CMD", "test", "-e", service["environment"]["MINISGL_READY_FILE"]]
        update = service["deploy"]["update_config"]
        assert (update["order"], update["parallelism"]) == ("start-first", 1)
    assert "/health'" in STACK["services"]["web"]["healthcheck"]["test"][-1]
    for name, service in STACK["services"].items():
        assert service.get("healthcheck", {}).get("disable", False) is (name == "operator")
        assert service["deploy"]["endpoint_mode"] == "dnsrr"


def test_only_the_web_processes_of_the_stack_have_a_port_and_nobody_gets_in_by_oversight() -> None:
    assert {name for name, service in STACK["services"].items() if "ports" in service} == {"web"}
    assert [port["target"] for port in STACK["services"]["web"]["ports"]] == [1919]
    raw = yaml.safe_load(STACK_FILE.read_text())["services"]["web"]["environment"]
    assert raw["MINISGL_API_KEY"].startswith("${MINISGL_API_KEY:?")


# The image


def test_the_user_of_the_image_is_the_one_that_reads_the_passwords() -> None:
    assert any(f"useradd --uid {USER_ID} " in rest for word, rest in last_stage() if word == "RUN")


def test_what_the_image_starts_is_a_command_line_of_ours() -> None:
    last = dict(last_stage())
    entry, command = (yaml.safe_load(last[word]) for word in ("ENTRYPOINT", "CMD"))
    assert entry == ["minisgl"]
    set_there = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    flags = {name: value for name, value in set_there.items() if name.startswith("MINISGL_")}
    assert set(flags) <= variables("serve") & (variables("stage web") | {"MINISGL_DATA_DIR"})
    config = parse_command(command, flags)
    assert isinstance(config, ServerConfig)
    assert (config.web.host, str(config.data_dir)) == ("0.0.0.0", "/data")


def test_every_build_argument_is_documented_and_offered_by_compose() -> None:
    arguments = {rest.partition("=")[0] for word, rest in dockerfile() if word == "ARG"}
    head = (ROOT / "docker" / "Dockerfile").read_text().partition("\nARG")[0]
    assert all(argument in head for argument in arguments)
    assert set(RAW["x-minisgl"]["build"]["args"]) == arguments
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "cuda" in extras


def test_what_the_wheel_is_made_of_reaches_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert {*targets["wheel"]["only-include"], *targets["sdist"]["only-include"], "pyproject.toml"} == sent


# Redis


@pytest.mark.parametrize("place", STARTED)
def test_redis_starts_with_our_file_and_passwords_that_are_made_once_and_has_what_was_committed_before(
    redis_servers: Servers, place: str, tmp_path: Path
) -> None:
    """The script of the container, with folders of its own and a `docker-entrypoint.sh` that only begins Redis."""
    (tmp_path / "web").parent.mkdir(exist_ok=True)
    for name in ("passwords", "minisgl", "data", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "minisgl" / "users.acl").write_text((ROOT / "ops/redis/users.acl").read_text())
    conf = (ROOT / "docker/redis.conf").read_text().replace("/data", str(tmp_path / "data"))
    socket = tmp_path / "redis.sock"
    (tmp_path / "minisgl" / "redis.conf").write_text(f"{conf}port 0\nunixsocket {socket}\n")
    script = (ROOT / "docker/start-redis.sh").read_text()
    for path in ("/passwords", "/minisgl/", "/run/"):
        script = script.replace(path, str(tmp_path / path.strip("/")) + path[len(path.rstrip("/")) :])
    (tmp_path / "run").mkdir()
    (tmp_path / "passwords" / "operator").write_text("my own\n")
    binary = redis_servers.binary(place)
    for name, text in {"docker-entrypoint.sh": f'shift\nexec {binary} "$@"', "chown": "true"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def as_user(user: str) -> str:
        return f"unix://{user}@{socket}?password_file={tmp_path / 'passwords' / user}"

    made: list[str] = []
    kept: list[object] = []
    for _ in range(2):
        for process in _started(["sh", "-c", script], environment):
            until(lambda process=process: process.poll() is not None or _lets_in(as_user("minisgl")))  # type: ignore[misc]
            assert process.poll() is None
            for user in ("minisgl", "web", "tokenize", "generate", "detokenize", "operator"):
                check_server(as_user(user))
            made.append((tmp_path / "passwords" / "minisgl").read_text())
            with connect(as_user("minisgl")) as client:
                kept.append(client.mget(TWO))
                client.eval("redis.call('SET', KEYS[1], 1) redis.call('SET', KEYS[2], 1)", 2, *TWO)
            with pytest.raises(redis.exceptions.AuthenticationError):
                command(f"unix://{socket}", "PING")
    # Two writes of one script are a transaction in Redis' file. Some versions load one only if `default` may run it.
    assert kept == [[None, None], [b"1", b"1"]]
    assert made[0] == made[1] and re.fullmatch(r"[0-9a-f]{64}", made[0])
    assert (tmp_path / "passwords" / "operator").read_text() == "my own\n"
    acl = (tmp_path / "run" / "minisgl.acl").read_text()
    assert made[0] not in acl and "my own" not in acl
    assert (tmp_path / "run" / "minisgl.acl").stat().st_mode & 0o777 == 0o400


def _started(words: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _lets_in(url: str) -> bool:
    try:
        with connect(url) as client:
            return bool(client.ping())
    except Exception:
        return False
