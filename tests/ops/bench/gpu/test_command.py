"""`minisgl bench gpu`: its flags, its JSON after every phase, its table; and the whole at toy size."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from pydantic import JsonValue, ValidationError
from rich.console import Console
from support.servers import ROOT, eventually

from ops.bench.gpu import command, document, show
from ops.bench.gpu.command import PHASES
from ops.bench.gpu.document import Document, Item, Phase
from ops.bench.gpu.runner import Planned
from pipeline.errors import ConfigError

GPU = (sys.executable, str(ROOT / "minisgl.py"), "bench", "gpu")
STUBS: Mapping[str, str] = {
    "fine": "def run(scale, report): report('sum', ok=True, ms=1.25, counts=[1, 2], kernels=[{'name': 'a'}])",
    "raises": "def run(scale, report): raise ValueError('no such kernel')",
    "skips": "from ops.bench.gpu.phase import Skip\ndef run(scale, report): raise Skip('needs a GPU')",
    "hangs": "import time\ndef run(scale, report):\n    report('before', ok=True)\n    time.sleep(600)",
}


def stand_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str],
    limit_s: float = 60.0,
    by_name: Sequence[str] = (),
) -> None:
    """Put stubs where the phases are."""
    for name in names:
        (tmp_path / f"stub_{name}.py").write_text(STUBS[name])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    planned = (Planned(name, f"stub_{name}", limit_s, by_name=name in by_name) for name in names)
    monkeypatch.setattr(command, "PHASES", tuple(planned))


# the file


def test_the_schema_that_is_committed_is_that_of_the_models() -> None:
    committed = Path(document.__file__).with_name("schema.json").read_text()
    assert committed == document.schema(), "write it again: document.schema()"


def test_the_file_is_whole_after_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, ["fine", "raises", "skips"])
    file, seen = tmp_path / "out.json", []
    write = document.write

    def written(path: Path, found: Document) -> None:
        write(path, found)
        seen.append(Document.model_validate_json(file.read_text()))

    monkeypatch.setattr(document, "write", written)
    arguments = ["--device", "cpu", "--size", "toy", "--json", str(file)]
    assert command.run(arguments, {}, install_s=2.5) == 1
    assert [[phase.status for phase in one.phases] for one in seen] == [
        ["ok"],
        ["ok", "failed"],
        ["ok", "failed", "skipped"],
    ]
    assert [one.finished for one in seen] == [False, False, True]
    last = seen[-1]
    assert (last.device, last.size, last.budget_s, last.install_s) == ("cpu", "toy", 120.0, 2.5)
    assert last.arguments == tuple(arguments)
    assert [path.name for path in tmp_path.glob(".*")] == []
    assert "raises: failed" in capsys.readouterr().err


def test_a_file_with_anything_else_in_it_is_not_ours(tmp_path: Path) -> None:
    text = found([Phase(name="a", status="ok", reason="", limit_s=1, wall_s=1)]).model_dump_json()
    assert Document.model_validate_json(text).ok
    for odd in ({"more": 1}, {"device": "tpu"}, {"phases": [{"name": "a"}]}):
        with pytest.raises(ValidationError):
            Document.model_validate(json.loads(text) | odd)


def test_all_that_ran_was_right_and_some_was_skipped_or_cut_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, ["fine", "skips", "hangs"])
    file = tmp_path / "out.json"
    assert command.run(["--device", "cpu", "--budget", "7", "--json", str(file)], {}, None) == 0
    one = Document.model_validate_json(file.read_text())
    assert one.cut == ("hangs",)
    assert [item.item for item in one.phases[-1].items] == ["before"]
    printed = capsys.readouterr().out
    assert "Cut off (--budget 7): hangs" in printed
    assert "Skipped: skips" in printed


def test_what_an_interrupted_run_found_is_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    (tmp_path / "stub_fine.py").write_text(STUBS["fine"])
    runs = f"open({str(tmp_path / 'runs')!r}, 'w')"
    (tmp_path / "stub_hangs.py").write_text(STUBS["hangs"].replace("    time.sleep", f"    {runs}\n    time.sleep"))
    program = f"""
import sys
from ops.bench.gpu import command
from ops.bench.gpu.runner import Planned
command.PHASES = tuple(Planned(name, "stub_" + name, 60.0) for name in ("fine", "hangs"))
sys.path.insert(0, {str(tmp_path)!r})
sys.exit(command.run(["--device", "cpu", "--json", {str(file)!r}], {{}}, None))
"""
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually((tmp_path / "runs").exists, "the second phase runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
    one = Document.model_validate_json(file.read_text())
    assert [(phase.name, phase.status) for phase in one.phases] == [("fine", "ok"), ("hangs", "cut")]
    assert [item.item for item in one.phases[1].items] == ["before"]
    assert not one.finished


# the flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--phases", "machine,kernels"], "--phases 'kernels': no such phase; expected some of machine,probes"),
        (["--phases", ","], "must be phases with commas between them"),
        (["--budget", "0"], "must be a number of seconds above 0"),
        (["--json", "/nowhere/a.json"], "--json /nowhere/a.json: not a file in a folder that exists"),
        (["--size", "huge"], "--size"),
        (["--fast"], "--fast"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(flags: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        command.run(flags, {}, None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_phases_that_hang_leave_time_for_the_rest() -> None:
    assert all(phase.limit_s <= command.BUDGET_S["cuda"] / 3 for phase in PHASES if not phase.by_name)


def test_a_gpu_that_is_asked_for_and_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"^--device cuda: NVIDIA's driver .* or pass --device cpu$"):
        command.run(["--device", "cuda"], {}, None)


def test_the_time_that_the_page_adds_up_fits_the_budget_and_the_budget_is_below_eight_minutes() -> None:
    page = (ROOT / "docs" / "gpu-check.md").read_text()
    table = page[page.index("| phase | seconds measured |") : page.index("Together")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    expected_s = {name: int(measured or 0) + int(more or 0) for name, measured, more, _ in rows}
    usual = [phase for phase in PHASES if not phase.by_name]
    assert list(expected_s) == [phase.name for phase in usual]
    assert all(expected_s[phase.name] < phase.limit_s for phase in usual)
    assert f"Together {sum(expected_s.values())} s." in page
    assert sum(expected_s.values()) <= command.BUDGET_S["cuda"] - 20
    assert command.BUDGET_S["cuda"] <= 480 - 20


def test_a_phase_that_takes_long_runs_only_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, ["fine", "skips", "raises"], by_name=["raises"])
    file = tmp_path / "out.json"
    for flags, ran in (([], ["fine", "skips"]), (["--phases", "raises"], ["raises"])):
        command.run([*flags, "--device", "cpu", "--json", str(file)], {}, None)
        assert [phase.name for phase in Document.model_validate_json(file.read_text()).phases] == ran


def test_the_phases_that_are_chosen_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, ["fine", "raises", "skips"])
    file = tmp_path / "out.json"
    assert command.run(["--phases", "skips,fine", "--device", "cpu", "--json", str(file)], {}, None) == 0
    assert [phase.name for phase in Document.model_validate_json(file.read_text()).phases] == ["fine", "skips"]


# the table


def found(phases: Sequence[Phase]) -> Document:
    return Document(
        arguments=(),
        began="2026-01-01T00:00:00+00:00",
        device="cuda",
        size="full",
        budget_s=450,
        install_s=None,
        wall_s=12.3,
        finished=True,
        cut=tuple(phase.name for phase in phases if phase.status == "cut"),
        phases=tuple(phases),
    )


def printed(one: Document) -> str:
    console = Console(file=io.StringIO(), width=300)
    show.table(one, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_is_plain_text_of_at_most_110_columns() -> None:
    item = Item(item="copy " * 20, ok=False, error="a [red]long[/red] text " * 20, figures={"gb_per_s": 1234.5})
    text = printed(
        found([Phase(name="probes", status="wrong", reason="wrong: copy", limit_s=1, wall_s=2, items=(item,))])
    )
    assert "\x1b" not in text
    assert "[red]long[/red]" in text
    assert max(map(len, text.splitlines())) <= show.WIDTH
    assert "WRONG" in text


def test_the_table_shows_figures_and_counts_long_lists() -> None:
    figures: dict[str, JsonValue] = {
        "ms": 1.23456,
        "tokens": 123456,
        "works": True,
        "none": None,
        "list": [1, 2],
        "kernels": [{"a": 1}] * 10,
    }
    text = show.found(Item(item="a", ok=None, figures={**figures, "nested": {"rows": 3}}))
    assert text == ("ms 1.235, tokens 123,456, works yes, none -, list [1, 2], kernels (10 in the JSON), nested.rows 3")


def test_what_is_right_is_shown_without_its_yes_and_no() -> None:
    figures: dict[str, JsonValue] = {"is_nan": False, "replay_is_eager": True, "why": "", "missing": [], "ms": 2}
    assert show.found(Item(item="a", ok=True, figures=figures)) == "missing [], ms 2"
    wrong = show.found(Item(item="a", ok=False, figures=figures))
    assert wrong == "is_nan no, replay_is_eager yes, why , missing [], ms 2"


def test_the_first_lines_say_whether_and_what_is_bad() -> None:
    fine = Phase(name="machine", status="ok", reason="", limit_s=1, wall_s=2)
    dead = Phase(name="engine", status="killed", reason="by SIGKILL", limit_s=1, wall_s=2)
    late = Phase(name="server", status="cut", reason="no time", limit_s=1, wall_s=0)
    one = found([fine, dead, late])
    lines = [
        "1 of 3 phases went wrong",
        "engine: killed, 2.0 s: by SIGKILL",
        "Cut off (--budget 450): server",
        "cuda, size full: 12 s",
    ]
    assert printed(one).splitlines()[: len(lines)] == lines
    assert not one.ok
    assert printed(found([fine])).startswith("Nothing is wrong, in 1 phases\n")


# the whole


ALL = tuple(phase.name for phase in PHASES)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("size", ["toy", "small"])
def test_every_phase_runs_or_is_skipped_by_name_on_a_cpu(size: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--size", size, "--device", "cpu", "--json", str(file), "--budget", "400"]  # other tests run beside it
    flags += ["--phases", ",".join(ALL)]
    done = subprocess.run([*GPU, *flags], capture_output=True, text=True, check=False, cwd=tmp_path)
    one = Document.model_validate_json(file.read_text())
    assert [phase.name for phase in one.phases] == list(ALL)
    assert {phase.name: phase.reason for phase in one.phases if phase.status not in ("ok", "skipped")} == {}
    assert all(phase.reason for phase in one.phases if phase.status == "skipped")
    assert all(phase.items for phase in one.phases if phase.status == "ok")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= show.WIDTH
    load = [item for phase in one.phases for item in phase.items if item.item == "32 requests at once"]
    assert [item.ok for item in load] == [True]


@pytest.mark.slow
@pytest.mark.night
def test_a_server_phase_that_is_cut_off_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    temporary = Path(tempfile.mkdtemp())  # a short path: that of a socket has at most 107 letters
    flags = ["--size", "toy", "--device", "cpu", "--json", str(file), "--phases", "server"]
    process = subprocess.Popen(
        [*GPU, *flags], env={"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    )

    def below() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    try:
        eventually(lambda: len(below()) >= 7, "server, Redis, four stages", timeout_s=60)
        family = below()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [one.cmdline() for one in alive] == []
    temporary.rmdir()  # nothing is in it
    assert Document.model_validate_json(file.read_text()).cut == ("server",)
