"""The checkpoint in the box: small, of this corpus and tokenizer, and trained as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.selection import rest_at_night
from tokenizers import Tokenizer

from ops.demo_model.corpus import VERSION
from ops.demo_model.tokens import make_tokenizer, write_tokenizer
from ops.demo_model.train import NUM_RECORDED, RECORD_FILE, Plan, Shape, Training
from stages.generate.model.checkpoint import DEMO_FOLDER, check_folder
from stages.generate.model.recommended import read_recommended


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEMO_FOLDER / RECORD_FILE).read_text())
    return found


def test_it_can_be_served_and_is_small() -> None:
    spec = check_folder(DEMO_FOLDER)
    assert (spec.architecture, spec.dtype) == ("Qwen3ForCausalLM", "bfloat16")
    assert sum(file.stat().st_size for file in DEMO_FOLDER.iterdir()) < 10_000_000


def read_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


@pytest.mark.parametrize("make", rest_at_night([read_tokenizer, make_tokenizer]))
def test_its_tokenizer_and_template_are_those_of_this_corpus(
    make: Callable[[], Tokenizer], tmp_path: Path, record: dict[str, Any]
) -> None:
    """Made from the corpus at night, which takes seconds; by day `test_corpus.py` shows another corpus."""
    assert record["corpus_version"] == VERSION, "the corpus has changed: train again"
    write_tokenizer(make(), tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text() == (DEMO_FOLDER / file.name).read_text(), file.name


def test_it_answers_greedily_where_a_request_does_not_say_otherwise() -> None:
    assert read_recommended(DEMO_FOLDER).sampling == {"temperature": 0.0}


def test_its_training_is_that_of_this_code_and_went_to_the_end(record: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert record["plan"] == asdict(Plan()) and record["shape"] == asdict(Shape(tokenizer.get_vocab_size()))
    assert record["step"] == record["plan"]["steps"] and len(record["first_losses"]) == NUM_RECORDED


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.usefixtures("one_thread")
def test_the_recorded_seed_gives_the_recorded_losses_on_one_thread(
    record: dict[str, Any], tokenizer: Tokenizer
) -> None:
    training = Training(Plan(**record["plan"]), Shape(**record["shape"]), tokenizer)
    recorded: list[float] = record["first_losses"]
    losses = [training.advance() for _ in recorded]
    assert losses == pytest.approx(recorded, abs=1e-3)
    assert record["first_losses"][-1] < losses[0] - 2
