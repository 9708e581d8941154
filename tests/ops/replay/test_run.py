"""`minisgl replay run` on a pipeline whose engine counts on from the prompt, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from support.checkpoints import make_checkpoint
from support.engine_rig import LIMITS, POISON, Pipeline
from support.histories import answered, entries_of
from support.lived_requests import LivedRequests
from support.log_contract import put
from support.redis_servers import until

from minisgl import main
from ops.replay import isolated
from ops.replay.files import write_dump
from ops.replay.report import lines_of
from ops.replay.sender import body_of
from pipeline.errors import ConfigError
from pipeline.events import (
    Admitted,
    Answered,
    AnyEvent,
    Cancelled,
    Failed,
    Finished,
    Markup,
    Replay,
    SamplingParams,
    Submitted,
    new_uid,
)
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import GENERATE, SEAL, Names
from pipeline.process.config import ModelConfig
from pipeline.recording import Recording
from pipeline.replaying import LOWEST, NotComputed, again
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.views.recorded import History
from stages.generate.loop.past import TOKENS_IN_DOUBT
from stages.generate.setup.config import EngineConfig
from web.wire.openai.schemas import parse_completion
from web.wire.submit import completion_events

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def pipeline(redis_url: str) -> Iterator[Pipeline]:
    """One request at a time: an engine of which all requests of a step fail takes itself for broken, and ends."""
    with contextlib.ExitStack() as logs:

        def another_log() -> RedisLog:
            return logs.enter_context(contextlib.closing(RedisLog(redis_url, Names(), RequestLimits(timeout_s=60))))

        with Pipeline(another_log).running(replace(LIMITS, max_running_requests=1)) as pipeline:
            yield pipeline


@pytest.fixture
def run(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command; it returns its exit code and the lines that it wrote."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = main(["replay", "run", *arguments, "--redis-url", redis_url])
        out, err = capsys.readouterr()
        return code, (out + err).splitlines()

    return run


def entries(
    prompt: Sequence[int], *token_ids: int, end: AnyEvent | None = None, **sampling: object
) -> list[tuple[str, AnyEvent]]:
    """Return the history of a request that was served, with an end of its own or another one."""
    params = SamplingParams.model_validate({"max_tokens": 9, "seed": 3} | sampling)
    asked = {"sampling": params, "owner": "team-a", "prompt": "p", "labels": {"user": "u1"}}
    admitted = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="adding", numerics="a")
    begun, (at, tokenized), *rest = answered(*token_ids, ids=prompt, end=end, admitted=admitted, **asked)
    return [begun, (at, tokenized.model_copy(update={"bad_words": ((1, 2),)})), *rest]


def recorded(pipeline: Pipeline, pairs: Sequence[tuple[str, AnyEvent]]) -> str:
    """Put a history into the log; return its uid."""
    uid = new_uid()
    for entry in entries_of(pairs):
        put(pipeline.log, pipeline.names.request(uid), entry.fields, entry.id)
    return uid


def after_logs(uid: str, lines: list[str]) -> list[str]:
    """Return what the command said of *uid*: the engine of the same process logs before that."""
    return lines[next(place for place, line in enumerate(lines) if line.startswith(uid)) :]


def history(pairs: Sequence[tuple[str, AnyEvent]]) -> History:
    return History(Recording("u", tuple(entries_of(pairs))))


# what is submitted


def test_a_replay_has_the_recorded_tokens_seed_and_owner_and_the_lowest_priority() -> None:
    event = again(history(entries((97, 98), 99, 100, logprobs=2)))
    assert (event.prompt_ids, event.prompt, event.messages) == ((97, 98), "", ())
    assert event.sampling == SamplingParams(max_tokens=2, seed=3, logprobs=2)
    assert (event.owner, event.labels, event.frontend) == ("team-a", {"user": "u1"}, "")
    assert event.replay == Replay(of="u", bad_words=((1, 2),))
    assert event.priority == LOWEST > 2**31 - 1
    assert again(history(entries((97,), 99)), cached=True).replay == Replay(of="u", bad_words=((1, 2),), cached=True)


def test_a_replay_has_the_recorded_markup() -> None:
    pairs, markup = entries((97,), 99), Markup(tools="hermes", opens_thinking=True, tokens=(3,))
    tokenized = pairs[1][1].model_copy(update={"markup": markup})
    assert again(history([pairs[0], (pairs[1][0], tokenized), *pairs[2:]])).replay == Replay(
        of="u", bad_words=((1, 2),), markup=markup
    )


def test_a_replay_ends_after_the_recorded_tokens_unless_the_model_ended_them() -> None:
    cancelled, failed = Cancelled(by="client"), Failed(status=500, code="log_lost", message="No.")
    finished = entries((97,), 98)[-1][1]
    assert isinstance(finished, Finished)
    stopped = finished.model_copy(update={"reason": "stop"})
    mosts = [again(history(entries((97,), 98, end=end))).sampling.max_tokens for end in (cancelled, failed, stopped)]
    assert mosts == [1, 1, 9]
    assert again(history(entries((97,), 98, end=failed)), beyond=3).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (entries((97,), end=Cancelled(by="client")), "u: has no tokens to compare with"),
        (entries((97,), 98)[1:], "begins with another event than `submitted`"),
        (entries((97,), 98)[:1], "ended before its prompt was tokenized"),
        (
            [
                ("0-1", Submitted(endpoint="e", frontend="", task="tokenize", sampling=SamplingParams())),
                (SEAL, Answered(by="tokenize-0")),
            ],
            r"the tokenizer alone answered it \(tokenize\)",
        ),
    ],
)
def test_what_cannot_be_computed_again_says_why(pairs: Sequence[tuple[str, AnyEvent]], said: str) -> None:
    with pytest.raises(NotComputed, match=said):
        again(history(pairs))


# on a running server


def test_an_identical_answer_is_said_so_and_its_replay_is_a_request_of_its_own(pipeline: Pipeline, run: Run) -> None:
    uid = pipeline.ask("abc")
    pipeline.answer(uid)
    assert run(uid) == run("--cached", uid) == run("--at-once", "1", uid) == (0, [f"{uid}: identical, 4 tokens"])
    code, lines = run(uid, "--json", "--times", "3")
    (told,) = orjson.loads("\n".join(lines))
    assert code == 0 and (told["times"], told["identical"], told["differences"]) == (3, 3, [])
    for replay in told["replays"]:
        submitted, *_, end = pipeline.history(replay)
        assert isinstance(submitted, Submitted) and submitted.replay == Replay(of=uid)
        assert isinstance(end, Finished)
    assert run(uid, "--times", "2") == (0, [f"{uid}: 2 of 2 identical, 4 tokens"])


def test_the_first_difference_is_shown_and_the_exit_code_is_1(pipeline: Pipeline, run: Run) -> None:
    uid = recorded(pipeline, entries((97,), 98, 99, 120, 101))
    code, lines = run(uid)
    assert code == 1
    assert lines == [
        f"{uid}: token 3 differs, of 4 tokens",
        "  recorded  token 120",
        "  now       token 100",
        "  explained by weights: recorded adding, now counting",
        "  explained by one of the histories does not say how its engine computed",
        "  recorded with weights adding, computed with counting",
    ]
    _, lines = run(uid, "--times", "2")
    assert lines[:2] == [f"{uid}: 0 of 2 identical, 4 tokens", f"{uid}: 2 times: token 3 differs, of 4 tokens"]


def test_an_imported_answer_of_other_weights_is_said_so_although_its_tokens_are_equal(
    pipeline: Pipeline, run: Run, redis_url: str, tmp_path: Path
) -> None:
    uids, file = [new_uid(), new_uid()], tmp_path / "dump.zst"
    failing = entries((POISON,), 98, end=Cancelled(by="client"))
    dumped = []
    for uid, pairs in zip(uids, (entries((97,), 98, 99, end=Cancelled(by="client")), failing), strict=True):
        named = pairs[0][1].model_copy(update={"model": "gone"})
        dumped.append(Recording(uid, tuple(entries_of([("0-1", named), *pairs[1:]]))))
    write_dump(file, dumped)
    assert main(["replay", "import", str(file), "--redis-url", redis_url]) == 0
    weights = "  recorded with weights adding (model gone), computed with counting"
    code, lines = run(uids[0])
    assert (code, lines[-2:]) == (0, [f"{uids[0]}: identical, 2 tokens", weights])
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        engine = SlotLease(log, acquire_slot(log, GENERATE, 60_000), 60_000)
        engine.say(models=("demo", "mini"))
        until(lambda: any(status.models for status in read_statuses(log, GENERATE)))
        _, lines = run(uids[0])
        assert lines[1:] == [weights, "  the recorded model gone is not served there; served: demo, mini"]
        code, lines = run(uids[1])
        said = after_logs(uids[1], lines)
        assert code == 2 and "engine_error" in said[0]
        assert said[1:] == [weights, "  the recorded model gone is not served there; served: demo, mini"]
        engine.leave()


def test_the_uid_of_a_body_means_all_of_its_requests(pipeline: Pipeline, run: Run) -> None:
    base = new_uid()
    event = Submitted(endpoint="e", frontend="", prompt="abc", sampling=SamplingParams(max_tokens=4))
    pipeline.log.submit(base, [event, event.model_copy(update={"prompt": "xyz"})])
    uids = [f"{base}.0", f"{base}.1"]
    for uid in uids:
        pipeline.answer(uid)
    assert run(base) == (0, [f"{uid}: identical, 4 tokens" for uid in uids])
    assert run(uids[1], uids[0], "--at-once", "1")[1] == [f"{uid}: identical, 4 tokens" for uid in reversed(uids)]


def test_a_replay_that_fails_is_no_answer(pipeline: Pipeline, run: Run) -> None:
    uid = recorded(pipeline, entries((POISON,), 98, end=Cancelled(by="client")))
    code, lines = run(uid)
    assert code == 2
    lines = after_logs(uid, lines)
    assert lines[0].startswith(f"{uid}: could not be computed again: engine_error: The engine failed on this request")
    assert lines[1:] == ["  recorded with weights adding, computed with counting"]
    lines = after_logs(uid, run(uid, "--times", "2")[1])
    assert lines[1] == f"{uid}: 0 of 2 identical, 1 token"
    assert lines[2].startswith(f"{uid}: 2 times: it failed after 0 of 1 tokens: engine_error: The engine failed")
    assert "., of" not in "".join(lines) and len(lines) == 4


def test_what_is_not_there_or_cannot_be_computed_exits_with_2(pipeline: Pipeline, run: Run) -> None:
    code, (line,) = run(uid := new_uid())
    assert code == 2 and uid in line
    uid = recorded(pipeline, entries((97,), end=Cancelled(by="client")))
    code, (line,) = run(uid)
    none = f"{uid}: could not be computed again: has no tokens to compare with; it ended before its first one"
    assert (code, line) == (2, none)
    poisonous = Failed(status=500, code="poisonous", message="No.")
    bad, good = recorded(pipeline, entries((97,), 98, end=poisonous)), recorded(pipeline, entries((97,), 98))
    code, lines = run(uid, bad, good)
    assert code == 2 and lines[0] == none
    assert lines[1].startswith(f"{bad}: could not be computed again: it killed its engine, so the server does not")
    assert lines[2] == f"{good}: identical, 1 token"


def test_without_an_engine_nothing_waits(lived: LivedRequests, run: Run) -> None:
    uid = lived.answered("a")
    code, (line,) = run(uid)
    assert code == 2 and "--model" in line
    assert lived.log.living() == []


def test_a_request_that_killed_its_engine_is_not_given_to_the_server(lived: LivedRequests, run: Run) -> None:
    uid = lived.dead()
    code, (line,) = run(uid)
    assert code == 2 and uid in line and "--model" in line
    assert lived.log.living() == []
    code, (line,) = run(uid, "--model", "nowhere")
    assert code == 2 and "/nowhere" in line and "--model" in line
    assert line.endswith("; recorded: model nonsense with weights w1")


# in a process of its own


def died(code: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60) -> dict[str, object]:
    monkeypatch.setattr(isolated, "PROGRAM", (sys.executable, "-c", code))
    pairs = entries((97,), end=Failed(status=500, code="poisonous", message="No."))  # it died in the prompt
    return isolated.compute_isolated(history(pairs), (ModelConfig(), EngineConfig()), timeout_s)


@pytest.mark.parametrize(
    ("code", "how", "wrote"),
    [
        ("import os, sys; print('here', file=sys.stderr); sys.stderr.flush(); os.abort()", "SIGABRT", ["here"]),
        ("import sys; sys.exit('no weights')", "exit code 1", ["no weights"]),
    ],
)
def test_what_a_process_died_of_is_told_with_its_last_lines(
    code: str, how: str, wrote: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = died(code, monkeypatch)
    assert (told["died"], told["output"], told["identical"], told["times"]) == (how, wrote, 0, 1)


def test_what_the_flags_of_a_process_lack_is_an_error_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--num-pages 1: too few$"):
        died("import sys; print('log', '--num-pages 1: too few', sep='\\n', file=sys.stderr); sys.exit(2)", monkeypatch)


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told = died("import time; time.sleep(60)", monkeypatch, timeout_s=0.2)
    assert told["died"] == "it had not ended after 0.2 s (--request-timeout)"


@pytest.mark.slow  # it loads a model in another process
@pytest.mark.night  # by day a stand-in of that process dies
def test_a_request_that_killed_its_engine_is_computed_in_a_process_of_its_own(
    lived: LivedRequests, run: Run, tmp_path: Path
) -> None:
    uid, model = lived.dead(), make_checkpoint(tmp_path / "model", "llama3")
    code, lines = run(uid, "--model", str(model), "--num-pages", "16", "--threads", "1", "--json")
    (told,) = orjson.loads("\n".join(lines[: lines.index("]") + 1]))  # before what was written to stderr
    assert code == 1
    assert (told["uid"], told["tokens"], told["times"], "died" in told) == (uid, 1, 1, False)
    more = f"{uid}: its process made {TOKENS_IN_DOUBT} tokens more than were recorded, and did not die"
    assert told["beyond"] == TOKENS_IN_DOUBT and more in lines_of(told)
    (found,) = told["differences"]
    assert (found["n"], found["recorded"]["token"], len(found["most_probable"])) == (1, 41, 5)
    assert found["explained_by"][0].startswith("weights: recorded w1, now ")
    assert lived.log.living() == []


# on another server


RICH = SamplingParams(
    temperature=0.75,
    top_p=0.5,
    top_k=7,
    min_p=0.25,
    typical_p=0.875,
    seed=-5,
    max_tokens=9,
    min_tokens=2,
    stop=("a", "b"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    presence_penalty=1,
    frequency_penalty=-1,
    repetition_penalty=1.5,
    logit_bias=((3, 2.0), (4, -2.0)),
    allowed_token_ids=(3, 4, 5),
    bad_words=("c",),
    logprobs=3,
    prompt_logprobs=2,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)


@pytest.mark.parametrize(
    "sampling",
    [
        RICH,
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(logprobs=0, logprob_token_ids=(7,), max_tokens=1),
    ],
)
def test_the_body_for_another_server_asks_for_the_same_tokens_whatever_its_defaults_are(
    sampling: SamplingParams,
) -> None:
    event = Submitted(endpoint="e", frontend="", prompt_ids=(5, 6), sampling=sampling)
    request = parse_completion(orjson.dumps(body_of(event)))
    defaults = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "repetition_penalty": 0.5}
    (asked,) = completion_events(request, frontend="", model="", defaults=defaults)
    assert (asked.prompt_ids, asked.sampling) == (event.prompt_ids, sampling)
    assert asked.priority == 2**31 - 1 and not request.unknown


def test_the_other_server_is_told_the_user_whom_it_may_have_to_forget() -> None:
    asked = {"endpoint": "e", "frontend": "", "prompt_ids": (5,), "sampling": SamplingParams()}
    event = Submitted.model_validate(asked | {"labels": {"user": "ann", "custom_id": "7"}})
    (again,) = completion_events(parse_completion(orjson.dumps(body_of(event))), frontend="", model="", defaults={})
    assert again.labels == {"user": "ann"}


def test_without_a_limit_the_body_asks_for_the_rest_of_the_context() -> None:
    body = body_of(Submitted(endpoint="e", frontend="", prompt_ids=(5,), sampling=SamplingParams()))
    (asked,) = completion_events(parse_completion(orjson.dumps(body)), frontend="", model="", defaults={})
    assert asked.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: cannot connect: Connection refused"),
        (("--url", "nonsense"), "not a server address"),
        (("--url", "http://127.0.0.1:1", "--dtype", "float32"), "both say who computes; pass one of them"),
    ],
)
def test_another_server_that_cannot_compute_is_named(
    lived: LivedRequests, run: Run, flags: Sequence[str], said: str
) -> None:
    uid = lived.answered("a")
    code, (line,) = run(uid, *flags)
    assert code == 2 and said in line
