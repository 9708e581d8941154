"""`minisgl replay drive` as a user runs it, against another server, and its figures; tests/end_to_end has ours."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
from support.histories import recording, uid
from support.lived_requests import LivedRequests
from support.openai_stand_in import (
    DONE,
    FINISH,
    ROLE,
    Body,
    Frames,
    Hold,
    OpenAIStandIn,
    data,
    text_chunk,
    usage_chunk,
    whole,
)
from support.redis_servers import until
from support.servers import free_port
from support.tool import Tool

from ops.replay import drive as driving
from ops.replay.files import write_dump
from ops.replay.redact import redacted
from ops.replay.sender import Sent
from ops.replay.traffic import Outcome, Target, outcome_of, traffic_of
from pipeline.events import Presentation, SamplingParams
from pipeline.log.redis import RedisLog
from pipeline.names import WEB, sibling_uids
from pipeline.recording import Recording
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.walk import walk

FOUR = SamplingParams(seed=7, max_tokens=4)
"""The stand-in answers with as many tokens."""


def dump(folder: Path, *recordings: Recording) -> str:
    write_dump(folder / "dump.zst", recordings)
    return str(folder / "dump.zst")


@pytest.fixture
def drive(capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool("replay drive", "", capsys)


def test_requests_are_sent_at_their_times_and_measured(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    file = dump(
        tmp_path,
        *(recording(("ab", "ab"), "length", name=uid(each), sampling=FOUR, ms=1000 + 100 * each) for each in range(4)),
        recording(name=uid(9), endpoint="/tokenize", task="tokenize"),
    )
    flags = ("--url", stand_in.url, "--speed", "2", "--compare", "--api-key", "secret")
    lines = drive(file, *flags, "--plot", str(tmp_path / "plot.png"))
    assert lines[0] == f"{file}: 4 requests, recorded within 0.3 s, sent to {stand_in.url} at 2x"
    assert "Times after: by this client's clock, and not Redis' as before." in lines
    assert "left out: 1 request of /tokenize" in lines
    assert "identical answers: 4 of 4 (100.0%)" in lines
    assert not any("secret" in line for line in lines)
    assert stand_in.headers[0]["authorization"] == "Bearer secret"
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert [body["seed"] for body in stand_in.bodies] == [7] * 4

    document = drive.json(file, *flags)
    assert [row["due_ms"] for row in document["requests"]] == [0, 50, 100, 150]
    assert all(0 <= row["late_ms"] < 50 for row in document["requests"])
    assert document["clock_after"] == "client" and document["answers"]["identical"] == 4
    assert "secret" not in json.dumps(document)


def test_what_differs_ends_it_with_1_if_it_is_asked_for(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    file = dump(tmp_path, recording(("ab", "xy"), "stop", sampling=FOUR))
    drive(file, "--url", stand_in.url)
    document = drive.json(file, "--url", stand_in.url, "--compare", code=1)
    [row] = document["requests"]
    assert row["difference"] == {"token": None, "character": 2, "before": "xy", "after": "ab"}
    assert document["answers"]["changed_ends"] == {"stop -> length": 1}


def test_a_server_that_cannot_be_reached_is_told_at_once(tmp_path: Path, drive: Tool) -> None:
    file = dump(tmp_path, *(recording(("ab",), name=uid(each), ms=1_000_000 * each) for each in range(3)))
    url = f"http://127.0.0.1:{free_port()}"
    refused = "cannot connect: Connection refused"
    assert drive.failure(file, "--url", url) == f"minisgl: {url}: {refused}; none of 3 requests was sent\n"
    code, out, err = drive.run(file, "--url", url, "--json")
    assert (code, err) == (1, f"minisgl: 3 of 3 requests failed: 3x {refused}\n")
    errors = [row["after"]["error"] for row in json.loads(out)["requests"]]
    assert errors == [refused] * 3


def test_without_a_url_the_server_at_port_gets_the_requests(
    stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool
) -> None:
    drive(dump(tmp_path, recording(("ab", "ab"), sampling=FOUR)), "--port", stand_in.url.rpartition(":")[2])
    assert len(stand_in.bodies) == 1


def published(log: RedisLog) -> list[tuple[str, str]]:
    return [(status.address, status.host) for status in read_statuses(log, WEB)]


def test_without_a_url_the_server_whose_log_is_named_gets_the_requests(
    stand_in: OpenAIStandIn, lived: LivedRequests, redis_url: str, drive: Tool
) -> None:
    lived.finished(lived.running(), 0)
    asked = ("--since", "-1h", "--redis-url", redis_url)
    assert drive.refusal(*asked) == (
        "minisgl: --redis-url names a Redis in which no web process of this machine says where it listens; "
        "pass --url with the server that gets the requests\n"
    )
    web = SlotLease(lived.log, acquire_slot(lived.log, WEB, 60_000), 60_000)
    port = stand_in.url.rpartition(":")[2]
    here = socket.gethostname()
    for address, host, code in (("127.0.0.1", "elsewhere", 2), ("127.0.0.1", here, 0), ("0.0.0.0", here, 0)):
        web.say(address=f"http://{address}:{port}", host=host)
        until(lambda: published(lived.log) == [(f"http://{address}:{port}", host)])  # noqa: B023
        assert drive.run(*asked)[0] == code, (address, host)
    web.leave()
    assert len(stand_in.bodies) == 2


def test_without_a_url_a_folder_in_which_no_server_runs_is_refused(tmp_path: Path, drive: Tool) -> None:
    file = dump(tmp_path, recording(("ab",)))
    assert "--url" in drive.refusal(file, "--data-dir", str(tmp_path / "none"))


def test_a_request_that_is_refused_keeps_none_of_the_others(
    stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool
) -> None:
    def script(body: Body) -> Frames | tuple[int, object]:
        return whole(body) if len(stand_in.bodies) != 1 else (503, {"error": {"message": "full"}})

    stand_in.script = script
    file = dump(tmp_path, *(recording(("ab", "ab"), "length", name=uid(each), sampling=FOUR) for each in range(3)))
    document = drive.json(file, "--url", stand_in.url, "--compare", code=1)
    assert sorted(row["after"]["error"] for row in document["requests"]) == ["", "", "HTTP 503: full"]
    assert document["answers"] == {"compared": 2, "identical": 2, "changed_ends": {"length -> failed": 1}}


def test_the_client_leaves_after_as_much_of_the_answer(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    stand_in.script = lambda body: [ROLE, text_chunk("ab"), text_chunk("abc")]  # without an end it is no whole answer
    file = dump(tmp_path, recording(("ab", "a"), "cancelled"))
    document = drive.json(file, "--url", stand_in.url, "--compare")
    [row] = document["requests"]
    assert (row["after"]["end"], row["after"]["error"], row["identical"]) == ("cancelled", "", True)


def test_the_client_leaves_after_the_same_time_where_it_had_nothing(
    stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool
) -> None:
    stand_in.gate = hold = Hold()
    file = dump(tmp_path, recording((), "cancelled", presentation=Presentation()))
    try:
        document = drive.json(file, "--url", stand_in.url, "--compare")
    finally:
        hold.may_go_on.set()
    [row] = document["requests"]
    assert (row["after"]["end"], row["after"]["error"], row["identical"]) == ("cancelled", "", None)


def test_each_sibling_is_compared_with_its_own_choice(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    def chunk(index: int, text: str, reason: str | None = None) -> bytes:
        return data({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]})

    shown = Presentation(stream=True, choices=2)
    texts: Sequence[str] = ("ab", "cd")
    stand_in.script = lambda body: [chunk(1, "cd", "stop"), chunk(0, "ab", "stop"), usage_chunk(1, 2), DONE]
    recordings = [
        recording((text,), name=name, siblings=2, presentation=shown)
        for text, name in zip(texts, sibling_uids(uid(0), 2), strict=True)
    ]
    document = drive.json(dump(tmp_path, *recordings), "--url", stand_in.url, "--compare")
    assert [row["identical"] for row in document["requests"]] == [True, True]
    assert len(stand_in.bodies) == 1 and stand_in.bodies[0]["n"] == 2


def test_an_answer_without_token_counts_is_an_answer(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    stand_in.script = lambda body: [text_chunk("a"), text_chunk("b"), FINISH, DONE]
    document = drive.json(dump(tmp_path, recording(("a", "b"), "length")), "--url", stand_in.url, "--compare")
    [row] = document["requests"]
    assert row["identical"] and row["after"]["tpot_ms"] is None and row["after"]["ttft_ms"] is not None


def test_fields_are_set_and_left_out_as_the_user_says(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    file = dump(tmp_path, recording(("ab", "ab"), sampling=FOUR))
    drive(file, "--url", stand_in.url, "--set", "temperature=0", "seed=", "top_k=3")
    [body] = stand_in.bodies
    assert (body["temperature"], body["top_k"], "seed" in body, body["model"]) == (0, 3, False, "stand-in")


def test_redacted_requests_get_made_up_prompts_and_are_not_compared(
    stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool
) -> None:
    stand_in.script = lambda body: [text_chunk("a"), FINISH, DONE]
    file = dump(tmp_path, redacted(recording(("ab", "a"), "length"), b"salt"))
    assert f"--compare: {file}" in drive.refusal(file, "--url", stand_in.url, "--compare")
    assert stand_in.bodies == []
    said = "made-up prompts, because they were redacted or come from a trace: 1 request"
    assert said in drive(file, "--url", stand_in.url) and len(stand_in.bodies) == 1
    assert drive.json(file, "--url", stand_in.url)["made_up_prompts"] == 1


def test_a_damaged_file_sends_nothing(stand_in: OpenAIStandIn, tmp_path: Path, drive: Tool) -> None:
    file = Path(dump(tmp_path, recording(("ab",))))
    file.write_bytes(file.read_bytes()[:-9])
    assert "cut off" in drive.failure(str(file), "--url", stand_in.url) and stand_in.bodies == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "minisgl: replay drive: nothing given, expected the "),
        (("FILE", "--url", "ftp://a"), "--url ftp://a: must begin with http"),
        (("FILE", "--speed", "0"), "--speed '0': must be a number above 0"),
        (("FILE", "--plot", "a.txt"), "--plot a.txt: must end in"),
        (("FILE", "--set", "messages=1"), "--set: messages cannot be set: it is recorded"),
        (("FILE", "--set", "model=x"), "--set: model cannot be set: use --model"),
        (("FILE.missing",), "FILE.missing: cannot be read: No such file"),
        (("--where", "user=x"), "nothing given"),
        (("FILE", "FILE"), "FILE and FILE given"),
        (("FILE", "--until", "-1h"), "FILE and --since or --until given"),
        (("FILE",), "FILE: no request of it can be sent; left out: 1 request of /tokenize"),
    ],
)
def test_what_cannot_work_ends_with_2_and_says_why(
    arguments: Sequence[str], said: str, tmp_path: Path, drive: Tool
) -> None:
    file = dump(tmp_path, recording(endpoint="/tokenize", task="tokenize"))
    unused = ("--url", f"http://127.0.0.1:{free_port()}") if "--url" not in arguments and arguments else ()
    told = drive.refusal(*(each.replace("FILE", file) for each in arguments), *unused)
    assert said.replace("FILE", file) in told


WORDS = ("a ", "b ", "c ")


def outcome(words: Sequence[str] = WORDS, end: str = "stop", *, first_ms: int = 20, pause_ms: int = 10) -> Outcome:
    history = recording(words, end, first_ms=first_ms, pause_ms=pause_ms).entries
    return outcome_of(moment.event for moment in walk(history))


def sent_again(*pairs: tuple[Outcome, Outcome | None]) -> list[Sent]:
    """Return what was sent, each a millisecond later than the one before."""
    recordings = [recording(name=uid(number)) for number in range(len(pairs))]
    planned = traffic_of(recordings, Target(is_ours=True)).planned
    return [
        Sent(
            dataclasses.replace(one, before=(before,)),
            late_s=number / 1000,
            uids=(uid(100 + number),),
            after=(after,),
            unread="" if after else "it is gone",
        )
        for number, (one, (before, after)) in enumerate(zip(planned, pairs, strict=True))
    ]


def with_greedy(one: Sent) -> Sent:
    return dataclasses.replace(one, planned=dataclasses.replace(one.planned, is_sampled=False))


def test_the_table_has_both_sides_and_says_by_which_clock() -> None:
    sent = sent_again((outcome(), outcome(first_ms=1040)), (outcome(), outcome(end="failed", pause_ms=30)))
    pairs = driving.pairs_of(sent)
    assert driving.table(pairs, same_clock=True).splitlines() == [
        "                             before   p50   p90   p99  after      p50      p90      p99",
        "time to first token, ms              20.0  20.0  20.0           530.0    938.0  1,029.8",
        "time per token after it, ms          10.0  10.0  10.0            20.0     28.0     29.8",
        "whole request, ms                    45.0  45.0  45.0         1,065.0  1,065.0  1,065.0",
        "whole answers                     2                        1",
        "cancelled                         0                        0",
        "errors                            0                        1",
        "prompts from the cache          44%                      44%",
        "Times after: by Redis' clock.",
    ]
    assert driving.table(pairs, same_clock=False).endswith("by this client's clock, and not Redis' as before.")
    assert driving.lateness(sent) == "sent late by: p50 0.5 ms, p99 1.0 ms"


def test_a_side_without_times_has_none() -> None:
    pairs = driving.pairs_of(sent_again((outcome(), Outcome("failed", error="refused"))))
    lines = driving.table(pairs, same_clock=True).splitlines()
    assert lines[1].split()[-3:] == ["-", "-", "-"] and lines[7].split()[-2:] == ["44%", "-"]


def test_a_sender_without_time_says_so() -> None:
    [one] = sent_again((outcome(), outcome()))
    late = driving.lateness([dataclasses.replace(one, late_s=0.5)])
    assert late.startswith("sent late by: p50 500.0 ms") and "Lower --speed" in late


def test_the_comparison_counts_what_has_an_answer_and_names_each_difference() -> None:
    sent = sent_again(
        (outcome(), outcome()),
        (outcome(), outcome(("a ", "x ", "c "), "length")),
        (outcome(end="failed"), outcome()),
        (outcome(), None),
        (outcome(end="cancelled"), outcome(WORDS[:2], end="cancelled")),
    )
    pairs = driving.pairs_of(sent)
    assert driving.comparison(driving.compared(pairs)).splitlines() == [
        "identical answers: 2 of 3 (66.7%)",
        f"  {uid(1)} differs at token 2: 'b c ', now 'x c '",
        "changed finish reasons: 1x stop -> length, 1x failed -> stop",
    ]
    assert driving.comparison(driving.compared(pairs[3:4])) == "no answers to compare"


def test_what_another_engine_drew_is_told_from_what_it_computed_otherwise() -> None:
    drawn, greedy, wrong = sent_again(
        (outcome(), outcome(("x",))), (outcome(), outcome()), (outcome(), outcome(("x", "y")))
    )
    sent = [drawn, *(with_greedy(one) for one in (greedy, wrong))]
    found = driving.compared(driving.pairs_of(sent))
    said = driving.comparison(found, draws_alike=False).splitlines()
    assert said[:2] == [
        "identical answers: 1 of 3 (33.3%)",
        "of those at temperature 0: 1 of 2; another engine draws other tokens",
    ]
    assert driving.comparison(found).splitlines() == [said[0], *said[2:]]
    only_greedy = driving.compared(driving.pairs_of(sent[1:]))
    assert "temperature" not in driving.comparison(only_greedy, draws_alike=False)


def test_prompts_of_other_lengths_are_counted_where_both_sides_say_them() -> None:
    told = (3, 4), (3, 3), (3, 0), (0, 3)
    sides = [(dataclasses.replace(outcome(), prompt_tokens=n) for n in lengths) for lengths in told]
    pairs = driving.pairs_of(sent_again(*[(before, after) for before, after in sides], (outcome(), None)))
    assert driving.other_prompts(pairs) == 1


def test_of_many_differences_the_first_are_shown() -> None:
    pairs = driving.pairs_of(sent_again(*[(outcome(), outcome(("x",)))] * 23))
    lines = driving.comparison(driving.compared(pairs)).splitlines()
    assert len(lines) == 1 + driving.DIFFERENCES_SHOWN + 1 and lines[-1] == "  and 3 more; --json has all"


def test_an_error_that_was_there_before_is_no_new_failure() -> None:
    pairs = driving.pairs_of(
        sent_again((outcome(end="failed"), outcome(end="failed")), (outcome(), outcome(end="failed")))
    )
    assert [pair.has_failed for pair in pairs] == [False, True]


def test_the_json_has_every_request() -> None:
    sent = sent_again((outcome(), outcome(("a ", "x ", "c "))), (outcome(), None))
    document = orjson.loads(orjson.dumps(driving.document(driving.pairs_of(sent), sent, with_answers=True)))
    assert document["before"]["ttft_ms"]["p50"] == 20 and document["after"]["num_requests"] == 1
    assert document["answers"] == {"compared": 1, "identical": 0, "changed_ends": {}}
    first, second = document["requests"]
    assert (first["uid"], first["new_uid"], first["due_ms"], first["late_ms"]) == (uid(0), uid(100), 0, 0)
    assert first["before"]["e2e_ms"] == first["after"]["e2e_ms"] == 45
    assert (first["identical"], first["difference"]["token"]) == (False, 2)
    assert (second["after"], second["identical"], second["unread"]) == (None, None, "it is gone")
