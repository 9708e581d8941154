"""Fail points in processes of their own: what the environment names happens, at that place, as often as it says."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.redis_servers import until

import minisgl
from ops.serve.processes import worker_environment
from pipeline.errors import ConfigError, LogUnavailable
from pipeline.process.failpoints import FOLDER_VARIABLE, LOSES_A_REPLY, POINTS, VARIABLE, arm, failpoint

ROOT = Path(minisgl.__file__).parent
POINT, OTHER_POINT = "generate.after_take", "generate.before_forward"
PASS_TWICE = f"""
import os
from pipeline.process.failpoints import arm, failpoint
from pipeline.process.observe import configure_logging
configure_logging()
arm(os.environ)
for passing in (1, 2):
    failpoint({POINT!r})
    print("passed", passing, flush=True)
"""


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm({})


def asked(folder: Path, text: str) -> dict[str, str]:
    return {VARIABLE: text, FOLDER_VARIABLE: str(folder)}


def python(*arguments: str, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **asked(folder, text)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def run(folder: Path, text: str) -> tuple[int, list[str]]:
    """Pass a point twice in a process of its own; return its exit code and what it printed."""
    done = python("-c", PASS_TWICE, folder=folder, text=text)
    return done.returncode, done.stdout.splitlines()


def raised(times: int) -> list[type[Exception] | None]:
    """Pass the point *times* times; return what each raised."""
    seen: list[type[Exception] | None] = []
    for _ in range(times):
        try:
            failpoint(POINT)
            seen.append(None)
        except Exception as error:
            seen.append(type(error))
    return seen


def test_without_an_environment_every_point_is_passed() -> None:
    arm({})
    for name in POINTS:
        failpoint(name)
    assert raised(2) == [None, None]


def test_exit_kills_the_process_once_for_the_whole_server_also_when_it_is_started_again(tmp_path: Path) -> None:
    assert run(tmp_path, f"{POINT}=exit") == (-signal.SIGKILL, [])
    assert run(tmp_path, f"{POINT}=exit") == (0, ["passed 1", "passed 2"])
    assert [path.name for path in tmp_path.iterdir()] == [POINT]


def test_a_count_says_how_often_it_fires(tmp_path: Path) -> None:
    codes = [run(tmp_path, f"{POINT}=exit*3")[0] for _ in range(4)]
    assert codes == [-signal.SIGKILL] * 3 + [0]


def test_a_stopped_process_stands_still_and_then_goes_on(tmp_path: Path) -> None:
    stop_s = 0.3
    with subprocess.Popen(
        [sys.executable, "-c", PASS_TWICE],
        env={**os.environ, **asked(tmp_path, f"{POINT}=stop:{stop_s}")},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output.splitlines()) == (0, ["passed 1", "passed 2"])


def test_raise_raises_at_the_point_it_names_and_at_no_other(tmp_path: Path) -> None:
    arm(asked(tmp_path, f"{POINT}=raise*2@2"))
    failpoint(OTHER_POINT)
    assert raised(4) == [None, RuntimeError, RuntimeError, None]


def test_drop_lets_the_caller_believe_that_redis_did_not_answer(tmp_path: Path) -> None:
    arm(asked(tmp_path, f"{POINT}=drop"))
    assert raised(2) == [LogUnavailable, None]


def test_several_points_are_named_with_a_semicolon_between_them(tmp_path: Path) -> None:
    arm(asked(tmp_path, f" {POINT}=raise ; {OTHER_POINT}=raise;"))
    assert raised(1) == [RuntimeError]
    with pytest.raises(RuntimeError, match=OTHER_POINT):
        failpoint(OTHER_POINT)


def test_arming_again_forgets_what_was_armed_before(tmp_path: Path) -> None:
    arm(asked(tmp_path, f"{POINT}=raise"))
    arm({})
    assert raised(1) == [None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("generate.nowhere=exit", "generate.nowhere: no fail point"),
        (f"{POINT}=explode", "explode"),
        (POINT, "name=action"),
        (f"{POINT}=stop", "stop:SECONDS"),
        (f"{POINT}=stop:soon", "stop:SECONDS"),
        (f"{POINT}=exit:3", "exit takes no seconds"),
        (f"{POINT}=exit*0", r"exit\*0"),
        (f"{POINT}=exit@0", "exit@0"),
        (f"{OTHER_POINT}=drop", "nothing was sent to Redis"),
        (f"{POINT}=exit;{POINT}=raise", "twice"),
    ],
)
def test_what_the_environment_cannot_mean_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        arm(asked(tmp_path, text))


def test_it_is_refused_without_a_folder_that_remembers_what_fired(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        arm({VARIABLE: f"{POINT}=exit"})
    with pytest.raises(ConfigError, match="not a folder"):
        arm(asked(tmp_path / "missing", f"{POINT}=exit"))


def test_importing_the_module_arms_nothing(tmp_path: Path) -> None:
    program = f"from pipeline.process.failpoints import failpoint; failpoint({POINT!r})"
    done = python("-c", program, folder=tmp_path, text=f"{POINT}=exit")
    assert done.returncode == 0


def test_workers_get_both_variables_and_no_other_of_ours() -> None:
    given = {**asked(Path("/x"), "a=b"), "MINISGL_PORT": "1", "HOME": "/home"}
    child = worker_environment(given, "unix://s")
    assert (child.pop("MALLOC_ARENA_MAX"), child.pop("TORCH_CPP_LOG_LEVEL")) == ("1", "ERROR")
    assert child == {**asked(Path("/x"), "a=b"), "HOME": "/home", "MINISGL_REDIS_URL": "unix://s"}
    assert worker_environment({"MALLOC_ARENA_MAX": "4"}, "unix://s")["MALLOC_ARENA_MAX"] == "4"


def test_a_worker_ends_with_the_code_for_configuration_when_a_point_is_unknown(tmp_path: Path) -> None:
    arguments = ("minisgl.py", "stage", "tokenize", "--slot", "0", "--redis-url", "unix:///none")
    done = python(*arguments, folder=tmp_path, text="nowhere=exit")
    assert done.returncode == minisgl.EXIT_CONFIG
    assert "nowhere: no fail point" in done.stderr


def placed() -> dict[str, list[str]]:
    """Return name -> the files of shipped code whose `failpoint(name)` it is."""
    found: dict[str, list[str]] = {}
    for path in (path for room in ("pipeline", "stages", "web", "ops") for path in ROOT.glob(f"{room}/**/*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "failpoint(" in text else ():
            match node:
                case ast.Call(func=ast.Name("failpoint"), args=[ast.Constant(value=str() as name)]):
                    found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def test_shipped_code_passes_every_registered_point_and_no_other() -> None:
    assert sorted(placed()) == sorted(POINTS)


def test_a_name_says_its_stage_or_command_first_and_only_names_of_points_lose_replies() -> None:
    said = {"web", "janitor", "tokenize", "generate", "detokenize", "archive", "forget"}
    assert {name.partition(".")[0] for name in POINTS} == said
    assert set(POINTS) > LOSES_A_REPLY
