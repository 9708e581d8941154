"""The training of the demo model: the same losses every time, also after a break."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ops.demo_model.corpus import VERSION, conversations
from ops.demo_model.tokens import Encoder
from ops.demo_model.train import STATE_FILE, Plan, Shape, Training, main, padded
from stages.generate.model.checkpoint import check_folder

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 128}
PLAN = Plan(
    steps=85,
    first_tokens=512,
    tokens=1024,
    small_steps=20,
    second_phase=30,
    third_phase=60,
    fourth_phase=70,
    fifth_phase=80,
    warmup_steps=10,
    fourth_warmup=2,
    slow_fall=20,
    fast_fall=75,
)


def training(tokenizer: Tokenizer, plan: Plan = PLAN, *, steps: int = 0) -> Training:
    """Return a small training after so many steps."""
    begun = Training(plan, Shape(tokenizer.get_vocab_size(), **SMALL), tokenizer)
    for _ in range(steps):
        begun.advance()
    return begun


def test_every_learned_token_is_a_target_once_after_all_that_comes_before_it(tokenizer: Tokenizer) -> None:
    batch = Encoder(tokenizer).encode(list(itertools.islice(conversations("pack"), 60)))
    expected = sorted(
        (tuple(ids[:place]), ids[place])
        for ids, learned in batch
        for place in itertools.compress(range(len(ids)), learned)
    )
    found = []
    for ids_BL, learned_BL in padded(batch, fill=0):
        for row, place in learned_BL.nonzero().tolist():
            ids = ids_BL[row].tolist()
            found.append((tuple(ids[:place]), ids[place]))
    assert sorted(found) == expected


@pytest.mark.night  # trains twice
def test_an_interrupted_training_goes_on_as_if_nothing_had_been_also_to_a_later_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole = training(tokenizer, steps=12)
    training(tokenizer, steps=7).save(tmp_path / STATE_FILE)
    longer = training(tokenizer, replace(PLAN, steps=PLAN.steps + 10))
    longer.load(tmp_path / STATE_FILE)
    assert longer.plan.steps == PLAN.steps + 10
    for _ in range(5):
        longer.advance()
    assert longer.losses == whole.losses and longer.num_tokens == whole.num_tokens
    for name, weight in whole.weights.items():
        assert torch.equal(weight, longer.weights[name]), name


@pytest.mark.parametrize("change", [{"seed": 2}, {"rate": 1e-3}, {"third_phase": 50}])
def test_a_state_of_another_plan_is_refused(tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any]) -> None:
    training(tokenizer).save(tmp_path / STATE_FILE)
    with pytest.raises(ValueError, match="plan"):
        training(tokenizer, replace(PLAN, **change)).load(tmp_path / STATE_FILE)


def test_the_rate_rises_stays_and_falls_to_nothing_and_twice_more_for_the_last_phases() -> None:
    rates = [PLAN.rate_at(step) for step in range(PLAN.steps)]
    assert rates[0] == pytest.approx(0.1) and set(rates[10:42]) == {1.0}
    assert rates[42:60] == sorted(rates[42:60], reverse=True) and 0 < rates[59] < 0.06
    third, fourth, fifth = rates[60:70], rates[71:80], rates[80:]
    assert third[0] == pytest.approx(0.3) and third == sorted(third, reverse=True) and 0 < third[-1] < 0.04
    assert rates[70] == pytest.approx(0.15) and fourth[0] == pytest.approx(0.285)
    falls = [before - after for before, after in itertools.pairwise(fourth)]
    assert falls == pytest.approx([0.015] * 4 + [0.045] * 4) and fourth[-1] == pytest.approx(0.045)
    assert fifth == pytest.approx([0.12, 0.096, 0.072, 0.048, 0.024])
    assert [PLAN.phase_at(step) for step in (0, 29, 30, 59, 60, 69, 70, 79, 80)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.night
def test_the_command_writes_a_checkpoint_that_can_be_served_and_says_how_it_came_to_be(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--steps", "2"])
    spec = check_folder(tmp_path / "checkpoint")
    assert spec.architecture == "Qwen3ForCausalLM" and spec.tie_embeddings and spec.dtype == "bfloat16"
    files = list((tmp_path / "checkpoint").iterdir())
    assert sum(file.stat().st_size for file in files) < 10_000_000
    record = json.loads((tmp_path / "checkpoint" / "training.json").read_text())
    assert (record["corpus_version"], record["step"], record["plan"]["seed"]) == (VERSION, 2, Plan().seed)
    assert len(record["first_losses"]) == 2
    main(["--out", str(tmp_path), "--steps", "3"])
    again = json.loads((tmp_path / "checkpoint" / "training.json").read_text())
    assert again["first_losses"][:2] == record["first_losses"] and len(again["first_losses"]) == 3
