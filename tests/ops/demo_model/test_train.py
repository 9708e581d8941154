"""The training of the demo model: the same network as transformers', the same losses every time, also after a break."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from ops.demo_model.corpus import VERSION, conversations
from ops.demo_model.network import Qwen3, Shape
from ops.demo_model.tokens import Encoder
from ops.demo_model.train import STATE_FILE, Plan, Training, main, pack
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


def test_it_is_the_network_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trained = training(tokenizer, steps=3)
    trained.write_checkpoint(tmp_path)
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = Qwen3(trained.model.shape, dtype=torch.float32)
    for name, weight in ours.weights.items():
        weight.data.copy_(trained.model.weights[name].data.bfloat16())
    batch = Encoder(tokenizer).encode(list(itertools.islice(conversations("network"), 6)))
    with torch.no_grad():
        for packed in pack(batch):
            found = ours.logits(ours.hidden(packed))
            (starts,) = (packed.positions_T == 0).nonzero(as_tuple=True)
            for begin, end in itertools.pairwise((*starts.tolist(), len(packed.tokens_T))):
                expected = theirs(input_ids=packed.tokens_T[None, begin:end]).logits[0]
                torch.testing.assert_close(found[begin:end], expected, atol=2e-5, rtol=1e-4)


def test_every_learned_token_is_a_target_once_after_all_that_comes_before_it(tokenizer: Tokenizer) -> None:
    batch = Encoder(tokenizer).encode(list(itertools.islice(conversations("pack"), 60)))
    expected = sorted(
        (tuple(ids[:place]), ids[place])
        for ids, learned in batch
        for place in itertools.compress(range(len(ids)), learned)
    )
    found = []
    for packed in pack(batch):
        tokens, positions = packed.tokens_T.tolist(), packed.positions_T.tolist()
        for place in packed.learned_N.tolist():
            found.append((tuple(tokens[place - positions[place] : place]), tokens[place]))
    assert sorted(found) == expected


def test_rows_have_every_token_once_in_its_order_and_little_that_fills_up(tokenizer: Tokenizer) -> None:
    batch = Encoder(tokenizer).encode(list(itertools.islice(conversations("rows"), 100)))
    for packed in pack(batch):
        found = torch.cat([each.tokens_BL.flatten()[each.places_T] for each in packed.rows])
        assert found.tolist() == list(range(len(packed.tokens_T)))
        assert sum(each.tokens_BL.numel() for each in packed.rows) < 1.25 * len(packed.tokens_T)


def test_a_conversation_is_computed_as_if_it_were_alone(tokenizer: Tokenizer) -> None:
    batch = Encoder(tokenizer).encode(list(itertools.islice(conversations("alone"), 12)))
    model = Qwen3(Shape(tokenizer.get_vocab_size(), **SMALL), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        together = sum(model.loss(packed).item() for packed in pack(batch))
        alone = sum(model.loss(packed).item() for each in batch for packed in pack([each]))
    assert together == pytest.approx(alone, rel=1e-5)


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
    for name, weight in whole.model.weights.items():
        assert torch.equal(weight, longer.model.weights[name]), name


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
def test_the_fourth_phase_begins_with_a_checkpoint_as_it_goes_on_after_the_third(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plan = replace(PLAN, second_phase=2, third_phase=4, fourth_phase=6, steps=9)
    whole = training(tokenizer, plan, steps=6)
    whole.write_checkpoint(tmp_path)
    begun = training(tokenizer, plan)
    begun.begin_with(tmp_path)
    assert [begun.advance() for _ in range(3)] == [whole.advance() for _ in range(3)]
    assert (begun.step, begun.num_tokens, begun.losses) == (whole.step, whole.num_tokens, whole.losses)
    for name, weight in whole.model.weights.items():
        assert torch.equal(weight, begun.model.weights[name]), name


@pytest.mark.parametrize("change", [{"seed": 2}, {"fourth_phase": 4}])
def test_a_checkpoint_of_another_plan_or_step_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any]
) -> None:
    plan = replace(PLAN, second_phase=1, third_phase=2, fourth_phase=3)
    training(tokenizer, plan, steps=3).write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="shape, step and plan"):
        training(tokenizer, replace(plan, **change)).begin_with(tmp_path)


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
