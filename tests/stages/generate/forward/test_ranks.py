"""Ranks together compute what one rank computes, and a token's bits do not depend on the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import FAMILIES, Family, make_checkpoint, make_engine
from support.gguf_files import WIDE, make_gguf, mixed
from support.kernel_variants import VARIANTS
from support.plans import Request, plan, shuffled_pages
from support.quantized import KINDS, quantize
from support.ranks import Ranks
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine
from stages.generate.forward.gguf_weights import load_blocks
from stages.generate.model.checkpoint import check_folder
from stages.generate.model.folder import model_folder
from stages.generate.sampling import scores as scores_module
from stages.generate.schedule.plan import BatchPlan, Scoring

PROMPT = random.Random(3).choices(range(4, 480), k=61)
OTHER = random.Random(4).choices(range(4, 480), k=23)
GIVEN = random.Random(5).choices(range(4, 480), k=24)
CLEAR = 1e-3
"""The two best logits are at least so far apart where tokens must be equal."""
Compute = Callable[[BatchPlan], Tensor]
Folders = Callable[[Family], Path]

pytestmark = pytest.mark.usefixtures("torch_threads")


@dataclass(frozen=True)
class Case:
    """Which model is computed how, by how many ranks."""

    family: Family
    kernels: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.family}-{self.kernels}-{self.num_ranks}"


def cases() -> list[object]:
    """Return every family on two ranks, on the best kernels, and one in all ways; at night all of them."""
    best = VARIANTS[-1] if VARIANTS else "torch"
    return [
        pytest.param(
            Case(family, kernels, size),
            marks=[] if (kernels == best and size == 2) or family == "odd" else pytest.mark.night,
        )
        for family in FAMILIES
        for kernels in ("torch", *VARIANTS)
        for size in ((2, 3, 6) if family == "odd" else (2, 4))
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that makes the checkpoint of a family once."""
    made: dict[Family, Path] = {}

    def folder(family: Family) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family, bias=True)
        return made[family]

    return folder


def steps_of(compute: Compute) -> Tensor:
    """Return logits_RV of all steps: a prompt in chunks beside another request, then both decode the given tokens."""
    pool, given = shuffled_pages(), iter(GIVEN)
    one, other = Request(2, list(PROMPT), pool), Request(0, list(OTHER), pool)
    found = [compute(plan(other.row(64)))]
    for count in (25, 25, 11, *[1] * 8):
        for request in (one, other):
            if request.computed == len(request.tokens):
                request.tokens.append(next(given))
        found.append(compute(plan(other.row(1), one.row(count))))
    return torch.cat(found)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_ranks_compute_the_logits_of_one(folders: Folders, case: Case) -> None:
    folder = folders(case.family)
    alone_RV = steps_of(make_engine(folder, "float32", kernels=case.kernels).logits)
    together_RV = steps_of(Ranks(case.num_ranks, folder, "float32", kernels=case.kernels).logits)
    assert len(alone_RV) == 21
    torch.testing.assert_close(together_RV, alone_RV, atol=1e-4, rtol=0)
    best = alone_RV.topk(2)
    clear_R = best.values[:, 0] - best.values[:, 1] > CLEAR
    assert clear_R.sum() > 15
    assert torch.equal(together_RV.argmax(-1)[clear_R], best.indices[clear_R, 0])


@pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")
@pytest.mark.parametrize(
    ("family", "num_ranks", "dtype"),
    [
        ("odd", 2, "bfloat16"),
        ("odd", 3, "float32"),
        *(pytest.param(family, 4, "bfloat16", marks=pytest.mark.night) for family in FAMILIES[:-1]),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_company(
    folders: Folders, family: Family, num_ranks: int, dtype: str
) -> None:
    """Of more than two ranks the order of the sum counts. Products in bfloat16 round most of it away."""
    draw, pool = random.Random(0), shuffled_pages(num_pages=512)
    sizes: dict[str, Any] = {"num_pages": 512, "max_running_requests": 16}
    ranks = Ranks(num_ranks, folders(family), dtype, kernels=VARIANTS[-1], **sizes)
    prompts = [draw.choices(range(4, 400), k=draw.randrange(2, 90)) for _ in range(8)]
    expected = []
    for table, prompt in enumerate(prompts):
        request = Request(table, list(prompt), pool)
        first_1V = ranks.logits(plan(request.row(160)))
        request.tokens.append(7)
        expected.append((first_1V[0], ranks.logits(plan(request.row(1)))[0]))
    twins = [Request(8 + table, list(prompt), pool) for table, prompt in enumerate(prompts)]
    firsts: dict[int, Tensor] = {}
    while len(firsts) < len(twins):
        waiting = [twin for twin in twins if twin.computed < len(twin.tokens)]
        rows = [twin.row(13) for twin in waiting]
        logits_RV = ranks.logits(plan(*rows))
        firsts |= zip((row.table - 8 for row in rows if row.sample), logits_RV, strict=True)
    for twin in twins:
        twin.tokens.append(7)
    seconds_RV = ranks.logits(plan(*(twin.row(1) for twin in twins)))
    for index, (first_V, second_V) in enumerate(expected):
        assert torch.equal(firsts[index], first_V), index
        assert torch.equal(seconds_RV[index], second_V), index


@pytest.mark.parametrize("kernels", [*VARIANTS[-1:], "torch"])
def test_rank_0_draws_and_scores_as_a_single_one(
    folders: Folders, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a prompt's tokens, for which the head is called several times."""
    monkeypatch.setattr(scores_module, "AT_ONCE", 16)
    params = SamplingParams(seed=3, top_p=0.9, logprobs=2)

    def drawn(engine: Engine | Ranks) -> tuple[list[int], list[float]]:
        pool = shuffled_pages()
        scored, greedy = Request(1, list(PROMPT), pool, params=params), Request(0, list(OTHER), pool)
        chunk = replace(scored.row(50), scoring=Scoring(tuple(PROMPT[1:51]), 1))
        steps = [engine.forward(plan(chunk)), engine.forward(plan(scored.row(50), greedy.row(50)))]
        scores = steps[0].scores[1].prompt
        (token,) = steps[1].scores[1].tokens
        assert len(scores) == 50
        return list(steps[1].token_ids), [token.logprob, *(score.logprob for score in scores)]

    folder = folders("qwen3")
    tokens, logprobs = drawn(make_engine(folder, kernels=kernels))
    tokens_of_ranks, logprobs_of_ranks = drawn(Ranks(2, folder, kernels=kernels))
    assert tokens_of_ranks == tokens and len(tokens) == 2
    assert logprobs_of_ranks == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")
@pytest.mark.parametrize("family", ["llama3", "qwen3moe"])
def test_int8_on_ranks_is_as_near_to_float32_as_on_one(folders: Folders, family: Family) -> None:
    folder = folders(family)
    options: dict[str, Any] = {"kernels": VARIANTS[-1], "quantization": "int8"}
    exact_RV = steps_of(make_engine(folder, kernels=VARIANTS[-1]).logits)
    alone_RV = steps_of(make_engine(folder, **options).logits)
    together_RV = steps_of(Ranks(2, folder, **options).logits)
    assert 0 < (together_RV - exact_RV).norm() < 1.5 * (alone_RV - exact_RV).norm()


@pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")
@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3moe"])
def test_ranks_divide_a_gguf_file_between_its_blocks(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kinds = {"v.weight": "Q8_0", "down.weight": "Q5_1", "embd.weight": "Q5_0"}
    make_gguf(tmp_path / "model.gguf", family, lambda name: kinds.get(name.rsplit("_", 1)[-1], "Q4_0"))
    folder = model_folder(str(tmp_path / "model.gguf"))
    for quantization, largest in (("none", 1e-5), ("q4_0", 0.02)):  # tiny differences make some activations round apart
        options: dict[str, Any] = {"kernels": VARIANTS[-1], "quantization": quantization}
        alone_RV = steps_of(make_engine(folder, "float32", **options).logits)
        together_RV = steps_of(Ranks(2, folder, "float32", **options).logits)
        assert (together_RV - alone_RV).norm() < largest * alone_RV.norm()


@pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")
@pytest.mark.parametrize("family", ["llama3", "qwen3moe"])
@pytest.mark.parametrize("kind", ["awq-64", "gptq-zeros", "packed-32-zeros", "int8-128"])
def test_ranks_divide_a_quantized_checkpoint_between_its_groups(family: Family, kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", family, num_layers=3, sizes=WIDE)
    quantize(tmp_path / "plain", KINDS[kind], tmp_path / "quantized", tmp_path / "meant")
    for quantization, largest in (("none", 1e-5), (kind, 0.02)):  # tiny differences make some activations round apart
        options: dict[str, Any] = {"kernels": VARIANTS[-1], "quantization": quantization}
        alone_RV = steps_of(make_engine(tmp_path / "quantized", "float32", **options).logits)
        together_RV = steps_of(Ranks(2, tmp_path / "quantized", "float32", **options).logits)
        assert (together_RV - alone_RV).norm() < largest * alone_RV.norm()


def test_ranks_do_not_divide_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama3", sizes=WIDE)
    quantize(tmp_path / "plain", KINDS["gptq-order"], tmp_path / "quantized", tmp_path / "meant")
    spec = check_folder(tmp_path / "quantized")
    with pytest.raises(ConfigError, match=r"o_proj.weight have an order \(desc_act\), which .*; pass --tp 1"):
        load_blocks(spec, tmp_path / "quantized", shard=spec.sharded(0, 2))


def test_ranks_never_cut_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_gguf(tmp_path / "model.gguf", "qwen2", mixed)
    spec = check_folder(model_folder(str(tmp_path / "model.gguf")))
    with pytest.raises(ConfigError, match=r"--tp 2: .* blocks of 256 weights.* pass one of 1"):
        spec.sharded(0, 2)


@pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")
def test_every_rank_refuses_a_token_beyond_the_vocabulary_and_goes_on(folders: Folders) -> None:
    ranks = Ranks(2, folders("odd"), kernels=VARIANTS[-1])
    row = Request(0, list(PROMPT), shuffled_pages()).row(64)
    before_RV = ranks.logits(plan(row))
    for token in (497, 498, -1):
        with pytest.raises(ValueError, match="497"):
            ranks.logits(plan(replace(row, token_ids=(*row.token_ids[:5], token))))
    assert torch.equal(ranks.logits(plan(row)), before_RV)
