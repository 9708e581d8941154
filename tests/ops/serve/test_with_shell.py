"""`serve --shell`: which key the chat has."""

from __future__ import annotations

from ops.serve.config import ServerConfig, parse_command, stage_flags, stage_secrets
from ops.serve.with_shell import with_shell_key
from pipeline.names import GENERATE, WEB


def parsed(environment: dict[str, str]) -> ServerConfig:
    config = parse_command(["serve", "--shell"], environment)
    assert isinstance(config, ServerConfig)
    return config


def test_where_the_keys_are_in_a_file_the_shell_has_one_of_its_own_for_this_run() -> None:
    before = parsed({"MINISGL_LIMITS": "limits.toml", "MINISGL_ADMIN_KEY": "root"})
    config, other = with_shell_key(before), with_shell_key(before)
    (key,) = config.keys.api_key
    assert len(key) > 40 and other.keys.api_key != (key,)
    assert stage_secrets(config, WEB) == {"MINISGL_API_KEY": key, "MINISGL_ADMIN_KEY": "root"}
    assert key not in " ".join(stage_flags(config, WEB)) and key not in repr(config)
    assert not stage_secrets(config, GENERATE)


def test_without_such_a_file_nothing_changes() -> None:
    for environment in ({}, {"MINISGL_ADMIN_KEY": "root"}, {"MINISGL_API_KEY": "k1 k2", "MINISGL_LIMITS": "x"}):
        assert with_shell_key(parsed(environment)) == parsed(environment)
