"""Plans made by hand, through the engine, give the logits and tokens of transformers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import noted
from support.checkpoints import FAMILIES, Family, make_checkpoint, make_engine, reference_model, reference_tokens
from support.devices import DEVICES, need_flashinfer
from support.plans import NUM_PAGES, Request, generate, plan, shuffled_pages
from support.schedules import make_schedule, steps, steps_ahead
from support.selection import rest_at_night

import stages.generate.forward.engine as engine_module
from pipeline.errors import DeviceFull
from pipeline.events import SamplingParams
from stages.generate.batch import ForwardBatch, copied
from stages.generate.forward.engine import Engine
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling import sampler
from stages.generate.schedule.plan import PlanRow
from stages.generate.schedule.request import NewRequest

pytestmark = pytest.mark.usefixtures("kernels")

PROMPT = random.Random(3).choices(range(4, 480), k=61)
OTHER = random.Random(4).choices(range(4, 480), k=23)


def logits(engine: Engine, *rows: PlanRow) -> torch.Tensor:
    """Return logits_RV on the CPU."""
    return engine.logits(plan(*rows)).cpu()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = 2 if family == "qwen2" else 0  # with which the two best logits are never close
    return make_checkpoint(tmp_path_factory.mktemp(family), family, seed=seed)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    model = reference_model(folder)

    def their_logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return result

    return their_logits


@functools.cache
def expected_tokens(folder: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens, smallest_gap = reference_tokens(folder, prompt, count)
    assert smallest_gap > 1e-3
    assert len(set(tokens)) > count // 2, "a model that repeats itself proves nothing"
    return tokens


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_request_in_chunks_or_whole_gives_the_tokens_of_transformers(folder: Path, chunk: int) -> None:
    tokens = generate(make_engine(folder), Request(0, list(PROMPT), shuffled_pages()), 24, chunk)
    assert tokens == expected_tokens(folder, tuple(PROMPT), 24)


def test_a_chunk_continues_where_the_last_one_ended(folder: Path, theirs: Callable[[list[int]], torch.Tensor]) -> None:
    engine, request = make_engine(folder), Request(0, list(PROMPT), shuffled_pages())
    for count in (1, 10, 3, 40):
        assert engine.forward(plan(request.row(count))).token_ids == []
    logits_RV = logits(engine, request.row(7))
    assert logits_RV.dtype == torch.float32
    torch.testing.assert_close(logits_RV, theirs(PROMPT)[-1:], atol=1e-4, rtol=0)


def test_a_decode_row_and_a_chunk_share_a_step(folder: Path, theirs: Callable[[list[int]], torch.Tensor]) -> None:
    engine, pool = make_engine(folder), shuffled_pages()
    decoding, arriving = Request(3, list(OTHER), pool), Request(1, list(PROMPT), pool)
    decoding.tokens += engine.forward(plan(decoding.row(64))).token_ids
    for _ in range(3):
        decoding.tokens += engine.forward(plan(decoding.row(1), arriving.row(20))).token_ids
    logits_RV = logits(engine, decoding.row(1), arriving.row(20))
    expected = torch.stack([theirs(decoding.tokens)[-1], theirs(PROMPT)[-1]])
    torch.testing.assert_close(logits_RV, expected, atol=1e-4, rtol=0)
    assert decoding.tokens[len(OTHER) :] == expected_tokens(folder, tuple(OTHER), 8)[:4]


def test_pages_computed_by_one_request_serve_another(folder: Path, theirs: Callable[[list[int]], torch.Tensor]) -> None:
    engine, pool = make_engine(folder), shuffled_pages()
    first = Request(0, list(PROMPT), pool)
    second = Request(1, PROMPT[:32] + OTHER, pool)
    rows = [first.row(64)]
    second.pages, second.computed = first.pages[:8], 32
    row = second.row(64)
    rows.append(replace(row, new_pages=(*first.pages[:8], *row.new_pages), first_page=0))
    expected = torch.stack([theirs(first.tokens)[-1], theirs(second.tokens)[-1]])
    torch.testing.assert_close(logits(engine, *rows), expected, atol=1e-4, rtol=0)


def test_pages_swapped_without_their_values_change_the_logits(
    folder: Path, theirs: Callable[[list[int]], torch.Tensor]
) -> None:
    """The parity tests can fail: which page is read matters.

    Two whole pages of one row, swapped with all they hold, change nothing for the tokens after them: attention is a sum
    over a set, and a key carries its position with it. So keys are swapped here, or a page with another request's.
    """
    engine, pool = make_engine(folder), shuffled_pages()
    request, other = Request(0, list(PROMPT), pool), Request(1, list(OTHER), pool)
    engine.forward(plan(request.row(60), other.row(64)))

    def difference(pages: list[int], of: slice) -> float:
        kv_before, request.computed = engine.kv_L2PKSD.clone(), 60
        engine.kv_L2PKSD[:, of, pages] = engine.kv_L2PKSD[:, of, pages[::-1]]
        difference = (logits(engine, request.row(1)) - theirs(PROMPT)[-1:]).abs().max()
        engine.kv_L2PKSD.copy_(kv_before)
        return float(difference)

    # Pages that every family still sees from position 60, also the one with a window.
    mine, keys, keys_and_values = [request.pages[11], request.pages[13]], slice(0, 1), slice(0, 2)
    assert difference(mine, keys_and_values) < 1e-4
    assert difference(mine, keys) > 0.1
    assert difference([request.pages[11], other.pages[2]], keys_and_values) > 0.1


def test_positions_shifted_by_one_change_the_logits(
    folder: Path, theirs: Callable[[list[int]], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parity tests can fail: the positions of a chunk matter."""

    def shifted(*arguments: Any) -> ForwardBatch:
        batch = copied(*arguments)
        return replace(batch, positions_T=batch.positions_T + 1)

    engine, request = make_engine(folder, kernels="torch"), Request(0, list(PROMPT), shuffled_pages())
    engine.forward(plan(request.row(40)))
    monkeypatch.setattr(engine_module, "copied", shifted)
    assert (logits(engine, request.row(64)) - theirs(PROMPT)[-1:]).abs().max() > 0.1


def test_a_sampled_request_gets_the_same_tokens_alone_and_in_company(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    alone = generate(make_engine(folder), Request(0, list(OTHER), shuffled_pages(), params=params), 12, 64)
    engine, pool = make_engine(folder), shuffled_pages(1)
    one, other = Request(2, list(OTHER), pool, params=params), Request(0, list(PROMPT), pool)
    for _ in range(12):
        rows = (one.row(9), other.row(5))
        tokens = iter(engine.forward(plan(*rows)).token_ids)
        for request, row in zip((one, other), rows, strict=True):
            request.tokens += [next(tokens)] if row.sample else []
    together = one.tokens[len(OTHER) :]
    assert together == alone[: len(together)] and len(together) == 10


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(folder: Path) -> None:
    engine, pool = make_engine(folder), shuffled_pages()
    request = Request(0, list(OTHER), pool, params=SamplingParams(seed=5))
    tokens = generate(engine, request, 4, 64)
    again = Request(1, list(request.tokens), pool, params=request.params)
    tokens += generate(engine, again, 4, 16)
    assert tokens == generate(
        make_engine(folder), Request(0, list(OTHER), shuffled_pages(), params=request.params), 8, 64
    )


def test_greedy_output_without_bad_words_is_that_of_transformers(tmp_path: Path) -> None:
    """Each word came where the ones before were forbidden: of one, two and three tokens. Two more begin with the end of
    the prompt, and forbid nothing.
    """
    folder = make_checkpoint(tmp_path, "qwen3")
    bad_words: list[tuple[int, ...]] = []
    expected = expected_tokens(folder, tuple(PROMPT), 16)
    for length in (1, 2, 3):
        bad_words.append(tuple(expected[4 : 4 + length]))
        before = expected
        expected, smallest_gap = reference_tokens(folder, PROMPT, 16, bad_words=bad_words)
        assert smallest_gap > 1e-3 and expected != before
    bad_words += [(PROMPT[-1], expected[0]), (*PROMPT[-2:], *expected[:3])]
    params = SamplingParams(temperature=0, max_tokens=16)
    schedule = make_schedule("radix", num_pages=NUM_PAGES, running=4)
    schedule.add(NewRequest("a", tuple(PROMPT), (), params, bad_words=tuple(bad_words)))
    assert [row.token for _, _, rows in steps(schedule, make_engine(folder).forward) for row in rows] == expected


ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
)


@pytest.mark.parametrize("again", ["", "before the next step", "late"])
def test_steps_that_are_launched_ahead_give_the_same_tokens_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Also if tokens must be drawn again, and if the next step has computed with others by then."""
    if again:
        monkeypatch.setattr(sampling, "functions", lambda: None)
        monkeypatch.setattr(sampler, "FEW", 2)
    if again == "late":
        monkeypatch.setattr(Engine, "_settles_first", lambda *_: False)
    folder, found = make_checkpoint(tmp_path, "qwen3"), []
    for run in (lambda schedule, engine: steps(schedule, engine.forward), steps_ahead):
        schedule, engine = make_schedule("radix", num_pages=NUM_PAGES, running=4, mixed=24), make_engine(folder)
        for number, asked in enumerate(ASKED):
            params = SamplingParams(max_tokens=20 - number, seed=number, ignore_eos=True, min_tokens=3, **asked)
            bad_words = ((7, 8), (9,)) if number == 1 else ()
            prompt = (*PROMPT[:30], *OTHER[: 3 * number])
            schedule.add(NewRequest(str(number), prompt, (), params, bad_words=bad_words))
        rows = [row for _, _, made in run(schedule, engine) for row in made]
        found.append([[row for row in rows if row.uid == str(number)] for number in range(len(ASKED))])
    without, ahead = found
    assert [len(rows) for rows in ahead] == [20, 19, 18, 17] and ahead[3][0].score and ahead[3][0].prompt_scores
    assert ahead == without


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)  # a GPU begins the next step before it knows
@pytest.mark.parametrize("params", [{"typical_p": 0.5}, {"top_k": 3}, {"top_p": 0.99}], ids=str)
def test_a_step_is_not_computed_twice_for_a_row_that_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling, "functions", lambda: None)
    monkeypatch.setattr(sampler, "FEW", 2)
    engine = make_engine(make_checkpoint(tmp_path, "qwen3"))
    schedule = make_schedule("radix", num_pages=NUM_PAGES, running=4)
    again, begun = noted(monkeypatch, engine_module, "draw_again"), noted(monkeypatch, engine, "_begun")
    sampling_params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, **params)
    schedule.add(NewRequest("a", tuple(PROMPT[:20]), (), sampling_params))
    made = list(steps_ahead(schedule, engine))
    assert len(made) == len(begun) == 8 and again


@pytest.mark.parametrize("name", ["launch", "wait"])
def test_a_full_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = make_engine(make_checkpoint(tmp_path, "qwen3"))
    text = "CUDA out of memory. Tried to allocate 2.00 GiB."

    def full(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError(f"{text} If reserved but unallocated memory is large try setting ..")

    owner, part = (engine._tables, "update") if name == "launch" else (engine_module, "_sampling")
    monkeypatch.setattr(owner, part, full)
    with pytest.raises(DeviceFull) as told:
        engine.forward(plan(Request(0, PROMPT, shuffled_pages()).row(64)))
    assert str(told.value) == text


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_tokens_are_read_while_the_device_computes_what_came_after_them() -> None:
    with torch.inference_mode():
        told_R = engine_module.ToHost(torch.arange(5, device="cuda"))
        torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
        assert told_R.tolist() == [0, 1, 2, 3, 4]
        assert not ended.query()  # type: ignore[no-untyped-call]
        ended.synchronize()


@pytest.mark.parametrize("attention", ["torch", pytest.param("reference", marks=pytest.mark.night), "fi"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_bfloat16_is_as_near_to_float64_as_that_of_transformers(
    folder: Path, family: Family, device: torch.device, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median over the prompts counts: a router of experts that is undecided may turn with any rounding."""
    if attention == "fi":  # it knows no smaller head_dim
        need_flashinfer(device, monkeypatch)
        folder = make_checkpoint(tmp_path, family, head_dim=64)
    engine = make_engine(folder, "bfloat16", device=device, attention=attention, max_running_requests=8)
    lengths, pool = (5, 17, 24, 33, 40, 49, 56, 60), shuffled_pages()
    requests = [Request(table, PROMPT[:length], pool) for table, length in enumerate(lengths)]
    prefill_RV = logits(engine, *(request.row(64) for request in requests))
    for request, length in zip(requests, lengths, strict=True):
        request.tokens.append(PROMPT[length])
    decode_RV = logits(engine, *(request.row(1) for request in requests))
    with torch.inference_mode():
        narrow = reference_model(folder, torch.bfloat16)
        theirs_TV = narrow(torch.tensor([PROMPT])).logits[0].double()
        exact_TV = narrow.double()(torch.tensor([PROMPT])).logits[0]
    for places, ours_RV in (([length - 1 for length in lengths], prefill_RV), (list(lengths), decode_RV)):
        exact_RV = exact_TV[places]
        ours, theirs = ((each - exact_RV).norm(dim=-1).median() for each in (ours_RV, theirs_TV[places]))
        assert 0 < ours < 2 * theirs


@pytest.mark.parametrize("tie", rest_at_night([False, True]))
def test_biases_and_either_kind_of_head_agree_with_transformers(tmp_path: Path, family: Family, tie: bool) -> None:
    folder = make_checkpoint(tmp_path, family, tie=tie, bias=True, num_layers=3)
    tokens = generate(make_engine(folder), Request(0, list(PROMPT), shuffled_pages()), 8, 64)
    assert tokens == expected_tokens(folder, tuple(PROMPT), 8)
