"""Trains the demo model on a CPU: `python -m ops.demo_model.train --out FOLDER`. It resumes after an interruption.

The same seed gives the same losses on one thread: conversations, first weights and the rate of learning are functions
of the seed and the step. What is served is written at the end, and when the time is up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ops.demo_model.corpus import VERSION, conversations
from ops.demo_model.network import Packed, Qwen3, Rows, Shape
from ops.demo_model.tokens import END, STOP, Encoder, id_of, make_tokenizer, write_tokenizer

STATE_FILE: Final = "state.pt"
RECORD_FILE: Final = "training.json"
NUM_RECORDED: Final = 50
"""A checkpoint names the losses of the first steps, to compare trainings. These steps use float32: between two kinds of
CPU the losses differ by 6e-4 after 50 steps, in bfloat16 by 4e-3."""
MICRO_TOKENS: Final = 2048
"""Tokens per pass; the last conversation may exceed it."""
UNEVEN: Final = 1.25
"""How much longer than the shortest conversation the longest one of an attention batch may be."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that determines the result."""

    seed: int = 1
    steps: int = 6590
    first_tokens: int = 2048
    """Tokens per step at first: many small steps."""
    tokens: int = 4096
    """Tokens per step after `small_steps`."""
    small_steps: int = 1000
    second_phase: int = 2100
    third_phase: int = 5000
    fourth_phase: int = 5750
    fifth_phase: int = 6450
    """The steps at which the phases of the corpus begin. The fourth one begins with weights that are rounded as in a
    checkpoint, and with new optimizers, so that it can also begin with a checkpoint."""
    warmup_steps: int = 50
    decay: float = 0.3
    """The last part of the first two phases, in which the rate falls to 0."""
    third_rate: float = 0.3
    """The share of the full rate at the start of the third phase; it falls to 0 again."""
    fourth_rate: float = 0.3
    """The highest share of the full rate in the fourth phase, after `fourth_warmup` steps."""
    fourth_warmup: int = 15
    slow_fall: int = 800
    fast_fall: int = 6360
    """The rate of the fourth phase falls as if it reached 0 after `slow_fall` steps. From the step `fast_fall` on it
    falls faster, to 0 after the last step."""
    fifth_rate: float = 0.12
    """The share of the full rate at the start of the fifth phase; it falls to 0."""
    matrix_rate: float = 3e-3
    rate: float = 3e-3
    """Learning rates: Muon for matrices, AdamW for the rest."""
    weight_decay: float = 0.05

    def tokens_at(self, step: int) -> int:
        return self.first_tokens if step < self.small_steps else self.tokens

    def phase_at(self, step: int) -> int:
        begins = (self.second_phase, self.third_phase, self.fourth_phase, self.fifth_phase)
        return sum(step >= begin for begin in begins)

    def rate_at(self, step: int) -> float:
        """Return the share of the full rate in a step."""
        if step >= self.fifth_phase:
            return self.fifth_rate * (self.steps - step) / (self.steps - self.fifth_phase)
        if step >= self.fourth_phase:
            left = (self.fourth_phase + self.slow_fall - min(step, self.fast_fall)) / self.slow_fall
            if step > self.fast_fall:
                left *= (self.fifth_phase - step) / (self.fifth_phase - self.fast_fall)
            return self.fourth_rate * min((step - self.fourth_phase + 1) / self.fourth_warmup, left)
        if step >= self.third_phase:
            return self.third_rate * (self.fourth_phase - step) / (self.fourth_phase - self.third_phase)
        left = (self.third_phase - step) / (self.third_phase * self.decay)
        return min(1.0, (step + 1) / self.warmup_steps, left)


class Training:
    """A model, its optimizers, and their progress."""

    def __init__(self, plan: Plan, shape: Shape, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.step = 0
        self.num_tokens = 0
        self.losses: list[float] = []
        torch.manual_seed(plan.seed)
        self.model = Qwen3(shape)
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._fill, self._stop = (id_of(tokenizer, token) for token in (END, STOP))
        self._optimizers = self._new_optimizers()

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        plan, weights = self.plan, self.model.weights
        matrices = [weight for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in weights.items() if weight.ndim == 1 or "embed" in name]
        return [
            torch.optim.Muon(
                matrices, lr=plan.matrix_rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def advance(self) -> float:
        """Take one step and return its loss per learned token."""
        if self.step == self.plan.fourth_phase:
            for weight in self.model.weights.values():
                weight.data.copy_(weight.data.bfloat16())
            self._optimizers = self._new_optimizers()
        self.model.dtype = torch.float32 if self.step < NUM_RECORDED else torch.bfloat16
        batch = self._batch()
        num_learned = sum(sum(learned) for _, learned in batch)
        total = 0.0
        for packed in pack(batch):
            loss = self.model.loss(packed) / num_learned
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        rate = self.plan.rate_at(self.step)
        torch.nn.utils.clip_grad_norm_(self.model.weights.values(), 1.0)
        for optimizer, full in zip(self._optimizers, (self.plan.matrix_rate, self.plan.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.num_tokens += sum(len(ids) for ids, _ in batch)
        self.losses.append(total)
        return total

    def _batch(self) -> list[tuple[list[int], list[bool]]]:
        """Return the conversations of this step; they depend only on the seed and the step."""
        wanted = self.plan.tokens_at(self.step)
        source = conversations(f"{self.plan.seed} {self.step}", phase=self.plan.phase_at(self.step))
        batch: list[tuple[list[int], list[bool]]] = []
        while sum(len(ids) for ids, _ in batch) < wanted:
            batch += self._encoder.encode(list(itertools.islice(source, 8)))
        return batch

    def save(self, path: Path) -> None:
        """Write everything needed to resume; a reader of *path* finds the old state or the new one."""
        state = self._described() | {
            "losses": self.losses,
            "weights": {name: weight.data for name, weight in self.model.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Resume from the state that `save` wrote.

        Raises:
            ValueError: It is of another shape, corpus or plan; the number of steps may differ.
        """
        state = torch.load(path, weights_only=True)
        seen = (state["shape"], state["corpus_version"], state["plan"] | {"steps": self.plan.steps})
        expected = (asdict(self.model.shape), VERSION, asdict(self.plan))
        if seen != expected:
            raise ValueError(f"{path}: shape, corpus and plan are {seen}, expected {expected}; use another --out")
        self.step, self.num_tokens, self.losses = state["step"], state["num_tokens"], state["losses"]
        for name, weight in self.model.weights.items():
            weight.data.copy_(state["weights"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def begin_with(self, checkpoint: Path) -> None:
        """Begin with the fourth phase: *checkpoint* was written at its start.

        Raises:
            ValueError: It is of another shape, plan or step.
        """
        record = json.loads((checkpoint / RECORD_FILE).read_text())
        plan = {name: value for name, value in asdict(self.plan).items() if name in record["plan"]}
        seen = (record["shape"], record["step"], record["plan"] | {"steps": self.plan.steps})
        expected = (asdict(self.model.shape), self.plan.fourth_phase, plan)
        if seen != expected:
            raise ValueError(f"{checkpoint}: shape, step and plan are {seen}, expected {expected}")
        saved = load_file(checkpoint / "model.safetensors")
        for name, weight in self.model.weights.items():
            weight.data.copy_(saved[name])
        self.step, self.num_tokens, self.losses = record["step"], record["num_tokens"], record["first_losses"]

    def _described(self) -> dict[str, Any]:
        return {
            "corpus_version": VERSION,
            "plan": asdict(self.plan),
            "shape": asdict(self.model.shape),
            "step": self.step,
            "num_tokens": self.num_tokens,
        }

    def write_checkpoint(self, folder: Path) -> None:
        """Write the checkpoint to serve, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(self._tokenizer, folder)
        _write_json(folder / "config.json", self.model.shape.config() | {"eos_token_id": self._stop})
        generation = {"eos_token_id": [self._stop, self._fill], "pad_token_id": self._fill, "temperature": 0.0}
        _write_json(folder / "generation_config.json", generation)
        _write_json(folder / RECORD_FILE, self._described() | {"first_losses": self.losses[:NUM_RECORDED]})
        weights = {name: weight.data.bfloat16().contiguous() for name, weight in self.model.weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def pack(batch: Sequence[tuple[list[int], list[bool]]]) -> Iterator[Packed]:
    """Yield the conversations of *batch*, about `MICRO_TOKENS` at a time, the short ones first.

    A conversation sees itself alone, from position 0, as when it is served.
    """
    by_length = sorted(batch, key=lambda each: len(each[0]))
    group: list[tuple[list[int], list[bool]]] = []
    for each in by_length:
        group.append(each)
        if sum(len(ids) for ids, _ in group) >= MICRO_TOKENS:
            yield _packed(group)
            group = []
    if group:
        yield _packed(group)


def _packed(group: Sequence[tuple[list[int], list[bool]]]) -> Packed:
    rows: list[Rows] = []
    first, start = 0, 0
    while first < len(group):
        shortest = len(group[first][0])
        last = first
        while last < len(group) and len(group[last][0]) <= shortest * UNEVEN:
            last += 1
        lengths = torch.tensor([len(ids) for ids, _ in group[first:last]])
        length = int(lengths.max())
        columns_L = torch.arange(length)
        starts_B = start + lengths.cumsum(0) - lengths
        is_real_BL = columns_L < lengths[:, None]
        tokens_BL = torch.where(is_real_BL, starts_B[:, None] + columns_L, starts_B[:, None])
        rows.append(Rows(tokens_BL, is_real_BL.flatten().nonzero().flatten()))
        first, start = last, start + int(lengths.sum())
    return Packed(
        tokens_T=torch.tensor([token for ids, _ in group for token in ids]),
        positions_T=torch.cat([torch.arange(len(ids)) for ids, _ in group]),
        rows=tuple(rows),
        learned_N=torch.tensor([one for _, learned in group for one in learned]).nonzero().flatten(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train until all steps are done or the time is up."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m ops.demo_model.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the state, the log and the checkpoint")
    parser.add_argument(
        "--begin-with", type=Path, help="checkpoint of the third phase's end; skips the first three phases"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so many minutes; the next run resumes"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, after the recorded losses")
    parser.add_argument("--steps", type=int, default=plan.steps)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--save-minutes", type=float, default=3, help="minutes between two saved states")
    given = parser.parse_args(arguments)
    tokenizer = make_tokenizer()
    training = Training(Plan(seed=given.seed, steps=given.steps), Shape(tokenizer.get_vocab_size()), tokenizer)
    given.out.mkdir(parents=True, exist_ok=True)
    if (given.out / STATE_FILE).exists():
        training.load(given.out / STATE_FILE)
    elif given.begin_with:
        training.begin_with(given.begin_with)
    _run(training, given.out, given.minutes, given.save_minutes, given.threads)


def _run(training: Training, out: Path, minutes: float, save_minutes: float, threads: int) -> None:
    began_s = saved_s = told_s = time.monotonic()
    began_tokens = training.num_tokens
    recent: list[float] = []
    while training.step < training.plan.steps and time.monotonic() - began_s < minutes * 60:
        torch.set_num_threads(1 if training.step < NUM_RECORDED else threads)
        recent.append(training.advance())
        now_s = time.monotonic()
        if now_s - told_s >= 10 or training.step == training.plan.steps:
            speed = (training.num_tokens - began_tokens) / (now_s - began_s)
            left = (training.plan.steps - training.step) * training.plan.tokens / speed / 60
            print(
                f"step {training.step}/{training.plan.steps}  loss {sum(recent) / len(recent):.4f}  "
                f"{training.num_tokens / 1e6:.2f} M tokens  {speed:.0f} tokens/s  {left:.0f} minutes left",
                flush=True,
            )
            told_s = now_s
            recent.clear()
        if now_s - saved_s >= save_minutes * 60:
            training.save(out / STATE_FILE)
            training.write_checkpoint(out / "checkpoint")
            saved_s = now_s
    training.save(out / STATE_FILE)
    training.write_checkpoint(out / "checkpoint")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
