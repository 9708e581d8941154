"""Requests of every kind are recorded, in a pipeline whose engine runs short of pages and dies, and computed again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import TEXT, make_checkpoint
from support.dialects import make_tokenizer
from support.kernel_variants import VARIANTS
from support.redis_servers import until
from support.selection import by_night, rest_at_night

from ops.offline import stages as offline_stages
from ops.offline.local_log import LocalLog
from ops.offline.stages import LIMITS, Wrap
from ops.replay.compute import Computer
from ops.replay.isolated import local_engine
from ops.replay.report import computed_report, lines_of
from pipeline import VERSION
from pipeline.errors import MiniSGLError
from pipeline.events import (
    Admitted,
    Calls,
    Cancelled,
    Constraint,
    Finished,
    Preempted,
    SamplingParams,
    Submitted,
    TakenOver,
    Templating,
    Tokenized,
    TokensProduced,
    new_uid,
)
from pipeline.log.protocol import Submission
from pipeline.names import sibling_uids
from pipeline.process.config import ModelConfig
from pipeline.recording import Recording
from pipeline.replaying import again
from pipeline.views.recorded import History
from stages.generate.forward.engine import Engine
from stages.generate.loop.flights import Forward
from stages.generate.model.checkpoint import fingerprint
from stages.generate.schedule.plan import BatchPlan, Computed
from stages.generate.setup.config import EngineConfig

pytestmark = [
    pytest.mark.slow,  # each test loads a model several times
    pytest.mark.skipif(not VARIANTS, reason="torch alone promises no equal tokens"),
]

NUM_REQUESTS = by_night(30, 300)
NUM_TOKENS = 24
ALL = 1000
"""Computed at once: all of them."""
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1, "logit_bias": ((70, 5.0), (80, -5.0))},
    {"temperature": 1, "allowed_token_ids": tuple(range(60, 110))},
    {"temperature": 1, "stop": ("a", "e", "o")},
    {"temperature": 1, "stop_token_ids": tuple(range(60, 160)), "min_tokens": 9},
    {"temperature": 1, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    {"temperature": 0.8, "bad_words": ("the", "log is")},
)
TOOL = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["id"],
    "additionalProperties": False,
}
CALLS: dict[str, Any] = {
    "calls": Calls(choice="required", parallel=False),
    "templating": Templating(tools=({"type": "function", "function": {"name": "look", "parameters": TOOL}},)),
}
BOUND: Sequence[dict[str, Any]] = (
    {"constraint": Constraint(kind="json", text=json.dumps(TOOL), param="response_format"), "thinking_budget": 0},
    {"constraint": Constraint(kind="regex", text="[a-f]{3,9}", param="regex"), "thinking_budget": 5},
    {"constraint": Constraint(kind="choice", text='["the log", "the sea"]', param="choice"), "thinking_budget": 1},
    {"constraint": Constraint(kind="grammar", text='root ::= ("she " | "sea ")+', param="grammar")},
    CALLS | {"thinking_budget": 3},
    {"thinking_budget": 7},
)
"""Kinds of answers that are bound to something, by a model that thinks."""
SMALL = EngineConfig(threads=1, page_size=16, num_pages=33, max_prefill_length=64, max_running_requests=16)
"""Too few pages for all that run, and prompts of several chunks."""
ROOMY = EngineConfig(threads=1, page_size=16, num_pages=400)


class Killed(BaseException):
    """Ends an engine as a signal would: no error of a request."""


@dataclass
class Disturbed:
    """An engine that dies in a step, or before one flips the signs in the first page that it filled."""

    engine: Forward
    dies_in: int = 0
    flips_in: int = 0
    step: int = 0
    page: int = 0

    def forward(self, plan: BatchPlan) -> Computed:
        self.step += 1
        if self.step == 1:
            self.page = plan.rows[0].new_pages[0]
        if self.step == self.dies_in:
            raise Killed
        if self.step == self.flips_in:
            assert isinstance(self.engine, Engine)
            self.engine.kv_L2PKSD[:, :, self.page] *= -1
        return self.engine.forward(plan)


def checkpoint(folder: Path) -> Path:
    """Make a model that thinks and calls tools."""
    make_checkpoint(folder, "llama3", dtype="bfloat16", max_positions=512)
    return make_tokenizer(folder, "qwq", num_tokens=440)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("replayed") / "model")


def request(index: int) -> Submitted:
    """Return the request *index*; many of them begin alike."""
    draw = random.Random(index)
    begin = "" if index % 3 else TEXT[:120]
    prompt = begin + TEXT[draw.randrange(400) :][: draw.choice((5, 40, 300))]
    kind = index % (len(KINDS) + len(BOUND))
    if kind >= len(KINDS):
        return Submitted(
            endpoint="/v1/chat/completions",
            frontend="",
            messages=({"role": "user", "content": prompt},),
            sampling=SamplingParams(seed=index, max_tokens=NUM_TOKENS),
            owner="team-a",
            **BOUND[kind - len(KINDS)],
        )
    sampling = SamplingParams(seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[kind])
    return Submitted(endpoint="/v1/completions", frontend="", prompt=prompt, sampling=sampling, owner="team-a")


def ask(log: LocalLog, *events: Submitted) -> list[str]:
    uid = new_uid()
    assert log.submit(uid, events).submission is Submission.ACCEPTED
    return list(sibling_uids(uid, len(events)))


def all_kinds(log: LocalLog) -> list[str]:
    """Send requests of every kind; return their uids. The last one will be cancelled."""
    uids = [uid for index in range(NUM_REQUESTS - 4) for uid in ask(log, request(index))]
    first = request(1)
    seeds = [first.sampling.model_copy(update={"seed": seed}) for seed in range(3)]
    uids += ask(log, *(first.model_copy(update={"sampling": each, "siblings": 3}) for each in seeds))
    endless = SamplingParams(seed=9, max_tokens=400, ignore_eos=True)
    return uids + ask(log, Submitted(endpoint="e", frontend="", prompt="On", sampling=endless))


def history_of(log: LocalLog, uid: str) -> History:
    return History(Recording(uid, tuple(log.histories([uid])[0])))


def tokens_of(log: LocalLog, uid: str) -> int:
    return len(history_of(log, uid).tokens)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LocalLog:
    """The log of the next engines: what one leaves, the next one takes over."""
    log = LocalLog(LIMITS)
    monkeypatch.setattr(offline_stages, "LocalLog", lambda limits: log)
    return log


def record(log: LocalLog, model: Path, dtype: str) -> list[History]:
    """Have requests of every kind computed by an engine that dies, and by another one, with overlap."""
    config = replace(SMALL, dtype=dtype)
    dies = partial(Disturbed, dies_in=35)
    with local_engine(ModelConfig(str(model)), config, at_once=1, wrap=dies) as first:
        uids = all_kinds(log)
        until(lambda: has_died(first), timeout_s=20)
    with local_engine(ModelConfig(str(model)), replace(config, overlap="on"), at_once=1):
        until(lambda: tokens_of(log, uids[-1]) > 3, timeout_s=20)
        log.end(uids[-1], Cancelled(by="client"), frontend="")
        until(lambda: not log.alive(uids), timeout_s=60)
    return [history_of(log, uid) for uid in uids]


def has_died(computer: Computer) -> bool:
    try:
        computer.check()
    except MiniSGLError:
        return True
    return False


def assert_of_every_kind(histories: Sequence[History]) -> None:
    events = [moment.event for history in histories for moment in history.walk()]
    assert any(isinstance(event, TakenOver) for event in events)
    assert any(isinstance(event, Preempted) for event in events)
    assert any(isinstance(event, Admitted) and event.cached_tokens for event in events)
    assert any(isinstance(event, TokensProduced) and event.chunks > 1 for event in events)
    assert any(isinstance(event, TokensProduced) and event.scores for event in events)
    assert any(isinstance(event, Finished) and event.stop_string for event in events)
    assert any(isinstance(event, Finished) and event.reason == "stop" and not event.stop_string for event in events)
    assert any(isinstance(event, Tokenized) and event.bad_words for event in events)
    bound = [each for each in histories if each.tokenized is not None and each.tokenized.grammar and each.tokens]
    asked = [each.submitted for each in bound if each.submitted is not None]
    kinds = {each.constraint.kind for each in asked if each.constraint is not None}
    assert kinds == {"json", "regex", "choice", "grammar"}
    assert any(each.calls is not None for each in asked)
    assert any(each.constraint is None and each.calls is None for each in asked), "a budget alone"
    assert any(isinstance(each.end, Finished) and each.end.reason == "stop" for each in bound)
    assert isinstance(histories[-1].end, Cancelled)
    assert len(histories) == NUM_REQUESTS
    assert {token.by.version for history in histories for token in history.tokens} == {VERSION}


@pytest.mark.parametrize("dtype", rest_at_night(["bfloat16", "float32"]))
def test_requests_of_every_kind_are_computed_again_alone_and_all_at_once(
    model: Path, log: LocalLog, dtype: str
) -> None:
    histories = record(log, model, dtype)
    assert_of_every_kind(histories)
    events = [again(history) for history in histories]
    with local_engine(ModelConfig(str(model)), replace(ROOMY, dtype=dtype), at_once=1) as alone:
        together = Computer(alone.log, at_once=ALL, check=alone.check)
        for computer in (alone, together):
            replays = computer.compute(events)
            told = [computed_report(history, [now], computer) for history, now in zip(histories, replays, strict=True)]
            assert [each for each in told if each["identical"] != 1] == []
            assert all(each.end is not None and not _read_the_cache(each) for each in replays)


def _read_the_cache(history: History) -> bool:
    return any(isinstance(moment.event, Admitted) and moment.event.cached_tokens for moment in history.walk())


# what differs


LONG = 150


def served(model: Path, config: EngineConfig, indices: Sequence[int], wrap: Wrap = lambda each: each) -> list[History]:
    """Return what requests get that are sent as clients send them."""
    with local_engine(ModelConfig(str(model)), config, at_once=1, wrap=wrap) as computer:
        return computer.compute([longer(index) for index in indices])


def longer(index: int) -> Submitted:
    event = request(index)
    return event.model_copy(update={"sampling": event.sampling.model_copy(update={"max_tokens": LONG})})


def reports(model: Path, config: EngineConfig, recorded: Sequence[History]) -> list[dict[str, Any]]:
    with local_engine(ModelConfig(str(model)), config, at_once=ALL) as computer:
        replays = computer.compute([again(history) for history in recorded])
        return [computed_report(history, [now], computer) for history, now in zip(recorded, replays, strict=True)]


def assert_told(recorded: History, honest: History, told: dict[str, Any]) -> dict[str, Any]:
    """Check that a report names the first token in which the two answers differ; return what it says of it."""
    pairs = list(zip(recorded.token_ids, honest.token_ids, strict=True))
    place = next(place for place, (mine, theirs) in enumerate(pairs) if mine != theirs)
    found: dict[str, Any]
    (found,) = told["differences"]
    assert (found["n"], found["recorded"]["token"], found["now"]["token"]) == (place + 1, *pairs[place])
    assert f"token {place + 1} differs" in lines_of(told)[0]
    assert len(found["most_probable"]) == 5
    logprobs = [each["logprob"] for each in found["most_probable"]]
    assert logprobs == sorted(logprobs, reverse=True)
    return found


def with_a_changed_weight(model: Path, folder: Path) -> Path:
    """Write *model* into *folder* with one other weight, in a place that the fingerprint of weights looks at."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    for name in (name for name in weights if "norm" in name):
        weight = weights[name][3].clone()
        weights[name][3] *= -30
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if fingerprint(folder) != fingerprint(model):
            return folder
        weights[name][3] = weight
    raise AssertionError("the fingerprint sees none of them")


def test_one_changed_weight_is_told_at_the_first_token_that_it_changes(model: Path, tmp_path: Path) -> None:
    changed = with_a_changed_weight(model, tmp_path / "model")
    recorded, honest = (served(each, ROOMY, (0, 7)) for each in (model, changed))
    told = reports(changed, ROOMY, recorded)
    greedy, scored = (assert_told(*each) for each in zip(recorded, honest, told, strict=True))
    reason = f"weights: recorded {recorded[0].maker.weights}, now {honest[0].maker.weights}"
    assert greedy["explained_by"] == scored["explained_by"] == [reason]
    assert greedy["now"]["rank"] == 1 and greedy["recorded"]["rank"] != 1
    assert greedy["recorded"]["text"] and "recorded_scores" not in greedy
    written = recorded[1].tokens[scored["n"] - 1].score
    assert written is not None and scored["recorded_scores"]["logprob"] == written.logprob
    assert f"  explained by {reason}" in lines_of(told[0])


def test_another_dtype_is_told_where_it_changes_a_token(model: Path) -> None:
    indices, float32, bfloat16 = (1, 5, 17, 33), replace(ROOMY, dtype="float32"), replace(ROOMY, dtype="bfloat16")
    recorded, honest = (served(model, config, indices) for config in (float32, bfloat16))
    told = reports(model, bfloat16, recorded)
    differing = [each for each in zip(recorded, honest, told, strict=True) if each[0].token_ids != each[1].token_ids]
    assert differing and len(differing) == sum(1 - each["identical"] for each in told)
    for each in differing:
        assert assert_told(*each)["explained_by"] == ["dtype: recorded float32, now bfloat16"]


def test_a_page_that_was_flipped_while_the_request_ran_is_explained_by_nothing(model: Path) -> None:
    recorded = served(model, ROOMY, (0,), wrap=partial(Disturbed, flips_in=20))
    honest = served(model, ROOMY, (0,))
    told = reports(model, ROOMY, recorded)
    found = assert_told(recorded[0], honest[0], told[0])
    assert found["n"] >= 20 and found["explained_by"] == []
    assert "  nothing recorded explains it" in lines_of(told[0])
