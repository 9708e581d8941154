"""What a precision changes, measured with the demo model and with a random one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.kernel_variants import VARIANTS

from ops.demo_model import precision
from ops.demo_model.precision import Question, cross_entropy, loaded, main, num_equal
from stages.generate.model.checkpoint import DEMO_FOLDER


def test_tokens_after_the_first_difference_do_not_count() -> None:
    assert [num_equal((1, 2, 3), other) for other in ((1, 2, 3), (1, 5, 3), (1, 2), (2,), ())] == [3, 1, 2, 0, 0]


@pytest.mark.skipif(not VARIANTS, reason="int8 needs kernels")
def test_the_table_has_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "random", "qwen3", dtype="bfloat16")
    monkeypatch.setattr(precision, "FAMILIES", ("count", "compare"))
    main(["--random", str(folder), "--number", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 held-out questions; 32 random prompts for random; ")
    figures = {line.split()[0]: [float(text) for text in re.findall(r"[\d.]+", line)[-4:]] for line in lines[3:]}
    right, same, exact_nats, error = figures["float32"]
    assert (right, same, error) == (100, 100, 0) and 0 < exact_nats < 0.1
    errors = [figures[name][3] for name in ("bfloat16", "int8")]
    assert all(0 < each < 10 for each in errors)
    assert [figures[name][2] for name in ("bfloat16", "int8")] == pytest.approx([exact_nats] * 2, abs=0.01)


def test_the_cross_entropy_is_that_of_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "FAMILIES", ("count",))
    engine = loaded(DEMO_FOLDER, "float32", 1)
    (asked,) = precision.questions(DEMO_FOLDER, 1)
    wrong = Question(asked.prompt_ids, asked.answer_ids[::-1], "")
    assert cross_entropy(engine, [asked]) < 0.5 < 2 < cross_entropy(engine, [wrong])
