"""What the commands that look into a running server have in common: their flags, and what they say without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import main

COMMANDS = ("top", "trace u", "dead ls", "dead show u", "dead requeue u", "dead drop u", "replay dump f")


@pytest.mark.parametrize("line", COMMANDS)
def test_no_server_is_one_line_that_says_where_it_was_looked_for(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), "--data-dir", str(tmp_path)]) == 1
    assert main([*line.split(), "--redis-url", f"unix://{tmp_path}/none.sock"]) == 1
    out, err = capsys.readouterr()
    no_folder, no_redis = err.splitlines()
    assert out == "" and no_folder.startswith(f"minisgl: no server runs in {tmp_path}; name it with --port")
    assert no_redis.startswith("minisgl: the Redis of --redis-url cannot be used: ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("top now", "now"),
        ("top --interval 0", "seconds above 0"),
        ("top --redis-url http://here", "--redis-url: "),
        ("trace", "minisgl: trace: nothing given, expected the uid of a request (see minisgl trace --help)"),
        ("trace --port 8000", "minisgl: trace: nothing given, expected the uid of a request (see"),
        ("trace ab cd", "cd"),
        ("trace ab --lease 3", "--lease"),
        ("trace ab --redis-url http://here", "--redis-url: "),
        ("dead bury", "minisgl: dead: bury given, expected one of ls, show, requeue, drop"),
        ("dead show", "minisgl: dead show: nothing given, expected the id or uid of a dead letter (see"),
        ("dead ls ab", "ab"),
        ("dead ls --request-timeout 7", "--request-timeout"),
        ("dead drop ab --retention 7", "--retention"),
        ("replay forgett ab", "minisgl: replay: forgett given, expected one of show, run,"),
        ("replay dump --since soon FILE", "(see minisgl replay dump --help)"),
        ("replay drive --since soon", "(see minisgl replay drive --help)"),
        ("replay run ab --times 0", "(see minisgl replay run --help)"),
        ("replay run --times 2", "minisgl: replay run: no UID given, expected one or more (see"),
        ("replay show ab cd", "minisgl: replay show: ab cd given, expected the uid of a request (see"),
        ("replay forget ab --user u", "minisgl: replay forget: name UIDs, or"),
        ("dead requeue ab --request-timeout soon", "--request-timeout"),
    ],
)
def test_a_command_line_that_cannot_work_ends_with_2(
    line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and expected in err


@pytest.mark.parametrize(
    ("line", "usage"),
    [("trace", "trace UID"), ("trace ab", "trace UID")]
    + [(f"dead {action}", f"dead {action}") for action in ("ls", "show", "requeue", "drop")]
    + [(f"replay {action}", f"replay {action}") for action in ("dump", "import")],
)
def test_help_names_the_flags(line: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: minisgl {usage}") and "--data-dir" in said
    assert ("--request-timeout" in said) is (line == "dead requeue")


ACTIONS = {
    "dead": ("ls", "show", "requeue", "drop"),
    "replay": ("dump", "import"),
    "keys": ("add", "ls", "revoke", "rotate"),
}


@pytest.mark.parametrize("command", ACTIONS)
@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_help_of_a_tool_names_its_actions(command: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *flags]) == 0
    said = capsys.readouterr().out
    assert all(f"minisgl {command} {action}" in said for action in ACTIONS[command])
