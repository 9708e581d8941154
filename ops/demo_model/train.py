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
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from ops.demo_model.corpus import VERSION, conversations
from ops.demo_model.tokens import CONTEXT, END, STOP, Encoder, id_of, make_tokenizer, write_tokenizer

# B = conversations, L = tokens of the longest one, V = vocabulary

STATE_FILE: Final = "state.pt"
RECORD_FILE: Final = "training.json"
NUM_RECORDED: Final = 50
"""A checkpoint names the losses of the first steps, to compare trainings. These steps use float32: between two kinds of
CPU the losses differ by 6e-4 after 50 steps, in bfloat16 by 4e-3."""
MICRO_TOKENS: Final = 2048
"""Tokens per pass, with what fills up; the last conversation may exceed it."""


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
    checkpoint, and with new optimizers."""
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


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model, a Qwen3."""

    vocab_size: int
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 640
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model, without its tokens."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
        }

    def new_model(self, seed: int) -> Qwen3ForCausalLM:
        """Return a model in float32: norms are 1, projections into the residual stream 0, all else is random."""
        model = Qwen3ForCausalLM(Qwen3Config(**self.config() | {"dtype": "float32"}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
                else:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        return model


class Training:
    """A model, its optimizers, and their progress."""

    def __init__(self, plan: Plan, shape: Shape, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.shape = shape
        self.step = 0
        self.num_tokens = 0
        self.losses: list[float] = []
        self.model = shape.new_model(plan.seed)
        self.weights = dict(self.model.named_parameters())
        """By their names in a checkpoint."""
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._fill, self._stop = (id_of(tokenizer, token) for token in (END, STOP))
        self._optimizers = self._new_optimizers()

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        plan, weights = self.plan, self.weights
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
            for weight in self.weights.values():
                weight.data.copy_(weight.data.bfloat16())
            self._optimizers = self._new_optimizers()
        batch = self._batch()
        num_learned = sum(sum(learned) for _, learned in batch)
        total = 0.0
        for ids_BL, learned_BL in padded(batch, self._fill):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.step >= NUM_RECORDED):
                logits_BLV = self.model(input_ids=ids_BL).logits
            # what fills up comes after all that counts, so causal attention needs no mask
            told_BL = learned_BL[:, 1:]
            loss = functional.cross_entropy(
                logits_BLV[:, :-1][told_BL].float(), ids_BL[:, 1:][told_BL], reduction="sum"
            )
            (loss / num_learned).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / num_learned
        rate = self.plan.rate_at(self.step)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
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
            "weights": {name: weight.data for name, weight in self.weights.items()},
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
        expected = (asdict(self.shape), VERSION, asdict(self.plan))
        if seen != expected:
            raise ValueError(f"{path}: shape, corpus and plan are {seen}, expected {expected}; use another --out")
        self.step, self.num_tokens, self.losses = state["step"], state["num_tokens"], state["losses"]
        for name, weight in self.weights.items():
            weight.data.copy_(state["weights"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _described(self) -> dict[str, Any]:
        return {
            "corpus_version": VERSION,
            "plan": asdict(self.plan),
            "shape": asdict(self.shape),
            "step": self.step,
            "num_tokens": self.num_tokens,
        }

    def write_checkpoint(self, folder: Path) -> None:
        """Write the checkpoint to serve, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(self._tokenizer, folder)
        _write_json(folder / "config.json", self.shape.config() | {"eos_token_id": self._stop})
        generation = {"eos_token_id": [self._stop, self._fill], "pad_token_id": self._fill, "temperature": 0.0}
        _write_json(folder / "generation_config.json", generation)
        _write_json(folder / RECORD_FILE, self._described() | {"first_losses": self.losses[:NUM_RECORDED]})
        weights = {name: weight.data.bfloat16().contiguous() for name, weight in self.weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def padded(batch: Sequence[tuple[list[int], list[bool]]], fill: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids_BL and learned_BL of the conversations of *batch*, about MICRO_TOKENS at a time, the short ones first.

    A conversation sees itself alone, from position 0, as when it is served.
    """
    rest = sorted(batch, key=lambda each: len(each[0]))
    while rest:
        number = next((n for n in range(1, len(rest)) if n * len(rest[n - 1][0]) >= MICRO_TOKENS), len(rest))
        group, rest = rest[:number], rest[number:]
        length = len(group[-1][0])
        yield (
            torch.tensor([[*ids, *[fill] * (length - len(ids))] for ids, _ in group]),
            torch.tensor([[*learned, *[False] * (length - len(learned))] for _, learned in group]),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train until all steps are done or the time is up."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m ops.demo_model.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the state, the log and the checkpoint")
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
