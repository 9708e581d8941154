"""Dockerfile and compose files, read as a machine reads them: what they start, open, and let be set."""

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
import yaml
from support.redis_servers import STARTED, Servers, until

from ops.serve.config import COMMANDS, ServerConfig, parse_command
from pipeline.flags import flags_of, owners_of
from pipeline.log.address import connect, parse_address
from pipeline.log.check import check_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "containers.md").read_text()
FILE = ROOT / "docker" / "compose.yaml"
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
}
"""What a user may set each variable to."""
REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


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


@pytest.mark.parametrize("name", OURS)
def test_the_command_of_a_service_is_a_command_line_of_ours(name: str) -> None:
    service = OURS[name]
    command = service["command"]
    assert command == {"minisgl": "serve", "gpu": "serve --device cuda"}.get(name, f"stage {name}")
    set_here = {variable for variable in service["environment"] if variable.startswith("MINISGL_")}
    assert set_here <= variables(command.partition(" --")[0]), "what the command does not heed is not offered to be set"
    values = VALUES | {"MINISGL_REDIS_URL": service["environment"]["MINISGL_REDIS_URL"]}
    config = parse_command(command.split(), {variable: values[variable] for variable in set_here})
    assert config.log.redis_url == service["environment"]["MINISGL_REDIS_URL"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_comes_to_redis_as_its_own_user(name: str, tmp_path: Path) -> None:
    url = OURS[name]["environment"]["MINISGL_REDIS_URL"]
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


def test_every_variable_is_documented() -> None:
    referred = {found[1] for found in REFERENCE.finditer(FILE.read_text())}
    passed_on = {
        variable for service in RAW["services"].values() for variable in service.get("environment", {}) if variable
    } - {"MINISGL_REDIS_URL"}
    missing = {variable for variable in referred | passed_on if f"`{variable}`" not in PAGE}
    assert not missing


# The image


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
def test_redis_starts_with_our_file_and_passwords_that_are_made_once(
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
    for _ in range(2):
        for process in _started(["sh", "-c", script], environment):
            until(lambda process=process: process.poll() is not None or _lets_in(as_user("minisgl")))  # type: ignore[misc]
            assert process.poll() is None
            for user in ("minisgl", "web", "tokenize", "generate", "detokenize", "operator"):
                check_server(as_user(user))
            made.append((tmp_path / "passwords" / "minisgl").read_text())
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
