"""The states of a listener: what moves it from which to which, what it asks of the tail, what it hands out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies
from support.stand_in_stages import finished, tokens

import web.live.listener
from pipeline.events import Cancelled, Failed, Finished, Logprob, Preempted, TokensProduced, decode, encode, new_uid
from pipeline.log.protocol import Entry, Reply
from pipeline.names import SEAL, parse_id, tokens_id
from web.live.listener import KEEP_ALIVE_S, Listener, News, State, Wake, live_events, next_of

LIVE, BEHIND, READING, LOST, ENDED = State.LIVE, State.BEHIND, State.READING, State.LOST, State.ENDED
NEW, NEW_BEHIND = State.NEW, State.NEW_BEHIND


class Feed:
    """What a listener asks of its tail."""

    def __init__(self) -> None:
        self.looks = 0
        self.gap_fills: list[str] = []

    def look(self) -> None:
        self.looks += 1

    def drop(self, listener: Listener) -> None:
        raise AssertionError

    def touch(self, wake: Wake) -> None:
        asyncio.get_running_loop().call_soon(wake.push)

    def count_gap_fill(self, reason: str) -> None:
        self.gap_fills.append(reason)


def in_state(state: State, feed: Feed | None = None, *, room: int = 2, expires_s: float = math.inf) -> Listener:
    """Return a listener that has taken token 1, and was brought into *state* by what brings it there."""
    listener = Listener(new_uid(), feed or Feed(), room=room, expires_s=expires_s)
    listener.apply_reply(reply(listener, 1))
    listener.drain()
    if state is NEW_BEHIND:
        listener.check()
    if state not in (NEW, NEW_BEHIND):
        listener.submitted()
    if state in (BEHIND, READING, LOST):
        listener.check()
    if state in (READING, LOST):
        listener.begin_read(0.0)
    if state is LOST:
        listener.apply_history(None)
    if state is ENDED:
        listener.fail("any", "Any.")
        listener.drain()
    assert listener.state is state
    return listener


def reply(listener: Listener, n: int) -> Reply:
    return Reply(listener.uid, tokens_id(n), n, tokens(n, str(n)))


def entry(n: int) -> Entry:
    return Entry(tokens_id(n), encode(tokens(n, str(n))))


def read(*numbers: int) -> Callable[[Listener], None]:
    return lambda listener: listener.apply_history([entry(n) for n in numbers])


def hear(n: int) -> Callable[[Listener], None]:
    return lambda listener: listener.apply_reply(reply(listener, n))


def test_the_table_of_states_holds() -> None:
    every = dict.fromkeys(State)
    table: list[tuple[str, Callable[[Listener], None], dict[State, State]]] = [
        ("submitted", Listener.submitted, {NEW: LIVE, NEW_BEHIND: BEHIND}),
        ("check", Listener.check, {NEW: NEW_BEHIND, LIVE: BEHIND, READING: BEHIND}),
        ("the next reply", hear(2), {}),
        ("a duplicate", hear(1), {}),
        ("a gap", hear(3), {NEW: NEW_BEHIND, LIVE: BEHIND, READING: BEHIND}),
        ("no history", lambda each: each.apply_history(None), dict.fromkeys((LIVE, READING, BEHIND), LOST)),
        ("a history", read(1, 2), {READING: LIVE}),
        ("a longer history", read(2, 3, 4), {READING: BEHIND, LIVE: BEHIND}),
        ("resume", Listener.resume, {LOST: LIVE}),
        ("give up", Listener.give_up, dict.fromkeys(every, ENDED)),
    ]
    for name, step, moves in table:
        for state in every:
            if name in ("no history", "a history", "a longer history") and state in (NEW, NEW_BEHIND, LOST):
                continue  # its history is not read
            listener = in_state(state)
            step(listener)
            assert (name, state, listener.state) == (name, state, moves.get(state, state))


@pytest.mark.parametrize("state", [LIVE, BEHIND])
def test_a_read_begins_only_where_it_is_due_and_asking_changes_nothing(state: State) -> None:
    listener = in_state(state)
    for _ in range(2):
        assert listener.is_due(time.monotonic()) is (state is BEHIND)
        assert listener.state is state
    listener.wait(True)
    assert listener.is_due(time.monotonic() + 2)  # a client has waited in vain for more than a second
    listener.begin_read(time.monotonic())
    assert (listener.state, listener.is_due(time.monotonic() + 2)) == (READING, False)


@pytest.mark.parametrize("state", [NEW, NEW_BEHIND, LOST, ENDED])
def test_no_history_is_read_before_the_submit_nor_of_what_is_over(state: State) -> None:
    listener = in_state(state)
    listener.wait(True)
    assert not listener.is_due(time.monotonic() + 1000)


def test_what_is_missed_during_a_read_is_read_after_it() -> None:
    feed = Feed()
    listener = in_state(READING, feed)
    hear(4)(listener)
    read(2)(listener)
    assert (listener.state, listener.n, feed.gap_fills) == (BEHIND, 2, ["gap"])
    assert not listener.is_due(0.0)  # first its client takes what is there
    listener.drain()
    assert listener.is_due(0.0)


def test_a_full_queue_waits_for_its_client() -> None:
    feed = Feed()
    listener = in_state(LIVE, feed, room=2)
    for n in (2, 3, 4, 5):
        hear(n)(listener)
    assert (listener.state, listener.n, feed.gap_fills, feed.looks) == (BEHIND, 3, ["slow_client"], 0)
    assert [event.n for event in listener.drain()] == [2, 3]
    listener.wait(True)
    assert feed.looks == 1


@pytest.mark.parametrize("end", [finished(1), Cancelled(by="me")])
def test_nothing_is_taken_after_the_end(end: Finished | Cancelled) -> None:
    listener = in_state(LIVE)
    listener.apply_reply(Reply(listener.uid, SEAL, 1, end))
    listener.apply_reply(reply(listener, 2))
    listener.apply_history([entry(2)])
    listener.apply_history(None)
    listener.fail("any", "Any.")
    assert [event.event for event in listener.drain()] == [end] and listener.state is ENDED


async def test_what_is_lost_is_told_to_the_caller_who_decides() -> None:
    kept, lost = in_state(LIVE), in_state(LOST)
    lost.wake = kept.wake
    hear(2)(kept)
    events, those = await next_of((kept, lost))
    assert ([event.n for event in events], those) == ([2], [lost])
    assert await next_of((kept, lost)) == ([], [lost])  # until something is done about it
    lost.give_up()
    ((event,), those) = await next_of((kept, lost))
    assert isinstance(event.event, Failed) and event.event.code == "log_lost" and those == []


class Pushed:
    """What a client was given while its task waits."""

    def __init__(self, *listeners: Listener, takes: bool = True) -> None:
        self.listeners = listeners
        self.numbers: list[list[int]] = []
        self.takes = takes

    def __call__(self) -> bool:
        events = live_events(self.listeners)
        if events:
            self.numbers.append([event.n for event in events])
        if events and self.takes:
            for listener in self.listeners:
                listener.drain()
        return bool(events) and self.takes


async def waiting(passed: Pushed) -> asyncio.Task[News]:
    """Return a task that waits for events of listeners, which share one `wake`."""
    passed.listeners[0].wake.clear()
    passed.listeners[0].wake.sink = passed
    task = asyncio.create_task(next_of(passed.listeners))
    await asyncio.sleep(0)
    return task


async def turns() -> None:
    """Give every task that can run a few turns."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_are_passed_on_together_without_the_task_that_waits_until_the_end_comes() -> None:
    one, other = in_state(LIVE), in_state(LIVE)
    other.wake = one.wake
    passed = Pushed(one, other)
    task = await waiting(passed)
    for n in (2, 3):
        hear(n)(other)
    hear(2)(one)
    assert passed.numbers == []  # until all that came at once is there
    await turns()
    hear(3)(one)
    await turns()
    assert passed.numbers == [[2, 2, 3], [3]] and not task.done()
    hear(4)(one)
    one.apply_reply(Reply(one.uid, SEAL, 4, finished(4)))
    assert ([event.n for event in (await task).events], len(passed.numbers)) == ([4, 4], 2)


async def test_what_is_not_taken_wakes_the_task_that_waits() -> None:
    listener = in_state(LIVE)
    passed = Pushed(listener, takes=False)
    task = await waiting(passed)
    hear(2)(listener)
    assert ([event.n for event in (await task).events], passed.numbers) == ([2], [[2]])


@pytest.mark.parametrize("change", [Listener.check, hear(4), lambda each: each.apply_history(None)])
async def test_while_a_history_is_to_be_read_the_task_takes_what_comes(change: Callable[[Listener], None]) -> None:
    listener = in_state(LIVE, room=9)
    passed = Pushed(listener)
    task = await waiting(passed)
    hear(2)(listener)
    change(listener)
    assert ([event.n for event in (await task).events], passed.numbers) == ([2], [])


async def test_a_client_that_waits_for_long_is_told_so_by_its_task() -> None:
    listener = in_state(LIVE)
    passed = Pushed(listener)
    task = await waiting(passed)
    listener.wake_if_idle(time.monotonic() + KEEP_ALIVE_S + 1)
    assert (await task, passed.numbers) == (([], []), [])


async def test_a_bug_in_passing_on_ends_the_wait() -> None:
    class Broken(Pushed):
        def __call__(self) -> bool:
            raise ZeroDivisionError

    listener = in_state(LIVE)
    task = await waiting(Broken(listener))
    hear(2)(listener)
    with pytest.raises(ZeroDivisionError):
        await task


async def test_nothing_is_passed_on_once_nobody_waits() -> None:
    listener = in_state(LIVE)
    passed = Pushed(listener)
    task = await waiting(passed)
    hear(2)(listener)
    task.cancel()
    await turns()
    assert (task.cancelled(), passed.numbers, [event.n for event in listener.drain()]) == (True, [], [2])


def test_what_is_resumed_is_read_again_when_it_stays_silent() -> None:
    listener = in_state(LOST)
    listener.resume()
    listener.wait(True)
    assert not listener.is_due(time.monotonic()) and listener.is_due(time.monotonic() + 2)


def test_a_history_that_is_gone_after_its_time_has_expired() -> None:
    for expires_s, code in ((time.time() + 60, "log_lost"), (time.time() - 1, "request_expired")):
        listener = in_state(LOST, expires_s=expires_s)
        listener.give_up()
        (event,) = listener.drain()
        assert isinstance(event.event, Failed) and event.event.code == code


def test_a_client_that_waits_for_long_is_woken_with_nothing() -> None:
    listener = in_state(LIVE)
    listener.wake.clear()
    later_s = time.monotonic() + KEEP_ALIVE_S + 1
    listener.wake_if_idle(later_s)
    assert not listener.wake.is_set()  # its client does not wait
    listener.wait(True)
    listener.wake_if_idle(later_s)
    assert listener.wake.is_set()


def test_a_mark_hides_no_hole_before_it() -> None:
    listener = in_state(READING, room=9)
    mark = Entry("2-1", encode(Preempted(engine="generate-0", epoch=1, step=1)))
    listener.apply_history([mark, entry(3)])
    (end,) = listener.drain()
    assert isinstance(end.event, Failed) and end.event.code == "log_lost"


@pytest.mark.parametrize("missing", [2, 3, 4])
def test_no_text_goes_on_over_a_hole_in_the_history(missing: int) -> None:
    listener = in_state(READING, room=9)
    listener.apply_history(
        [*(entry(n) for n in (2, 3) if n != missing), Entry(SEAL, encode(finished(3 + missing // 4)))]
    )
    *before, end = listener.drain()
    assert [event.n for event in before] == list(range(2, missing))
    assert isinstance(end.event, Failed) and (end.event.code, end.entry_id) == ("log_lost", "")


def test_an_end_that_says_why_is_told_though_tokens_before_it_are_missing() -> None:
    listener = in_state(READING)
    listener.apply_history([Entry(SEAL, encode(Cancelled(n=5, by="operator")))])
    assert [event.event.kind for event in listener.drain()] == ["cancelled"] and listener.state is ENDED


def test_a_history_that_does_not_decode_ends_its_stream_with_an_error() -> None:
    listener = in_state(READING)
    listener.apply_history([Entry(tokens_id(2), {"kind": "of tomorrow"})])
    (end,) = listener.drain()
    assert isinstance(end.event, Failed) and end.event.code == "log_undecodable"


def test_marks_that_are_not_for_clients_move_the_cursor_and_take_no_room() -> None:
    listener = in_state(READING, room=2)
    marks = [Entry(f"1-{k}", encode(Preempted(engine="generate-0", epoch=1, step=k))) for k in range(1, 20)]
    listener.apply_history(marks)
    assert (listener.state, listener.cursor, listener.drain()) == (LIVE, "1-19", [])


# a log that comes back with older data


@dataclass(frozen=True)
class Made:
    """A token and the text that can be shown with it."""

    token: int
    text: str


ANSWERS = strategies.lists(
    strategies.builds(Made, strategies.integers(0, 3), strategies.text("ab\u00e9", max_size=3)), min_size=1, max_size=12
)
CUTS = strategies.lists(strategies.integers(1, 4), min_size=12, max_size=12)


def cut(answer: Sequence[Made], sizes: Sequence[int], *, after: int = 0) -> list[Entry]:
    """Return the events of an answer after so many tokens, cut into pieces of these sizes."""
    entries = []
    for size in sizes:
        part = answer[after : after + size]
        if part:
            after += len(part)
            scores = tuple(Logprob(token=made.token, text=made.text, logprob=-1.0) for made in part)
            produced = TokensProduced(
                count=len(part),
                tokens=tuple(made.token for made in part),
                text="".join(made.text for made in part),
                step=f"1-{after}",
                scores=scores,
            )
            entries.append(Entry(tokens_id(after), encode(produced)))
    return entries


def numbered(entries: Sequence[Entry]) -> list[tuple[int, Entry]]:
    return [(parse_id(entry.id)[0], entry) for entry in entries]


def hear_all(listener: Listener, entries: Sequence[Entry]) -> None:
    """Give events as replies, while the listener takes any."""
    for n, entry in numbered(entries):
        event = decode(entry.fields)
        assert isinstance(event, TokensProduced)
        listener.apply_reply(Reply(listener.uid, entry.id, n, event))


def read_all(listener: Listener, history: Sequence[Entry]) -> None:
    while listener.state is BEHIND:
        listener.begin_read(0.0)
        listener.apply_history([entry for entry in history if parse_id(entry.id) > parse_id(listener.cursor)])


def told(listener: Listener) -> tuple[str, list[int], list[tuple[int, str]]]:
    """Return the text, tokens and scores that the client is handed out."""
    events = [event.event for event in listener.drain()]
    assert all(isinstance(event, TokensProduced) and event.count == len(event.tokens) for event in events)
    produced = [event for event in events if isinstance(event, TokensProduced)]
    scores = [(score.token, score.text) for event in produced for score in event.scores]
    return "".join(event.text for event in produced), [token for event in produced for token in event.tokens], scores


@given(ANSWERS, CUTS, CUTS, strategies.integers(0, 12), strategies.integers(0, 12), strategies.booleans())
def test_however_an_answer_is_cut_the_second_time_its_client_gets_all_of_it_once(
    answer: list[Made], before: list[int], after: list[int], num_heard: int, num_kept: int, heard: bool
) -> None:
    first = cut(answer, before)
    listener = Listener(new_uid(), Feed(), room=99)
    listener.submitted()
    hear_all(listener, first[:num_heard])
    kept = first[: min(num_kept, num_heard, len(first))]
    history = [*kept, *cut(answer, [*after, 99], after=parse_id(kept[-1].id)[0] if kept else 0)]
    if not kept:
        listener.check()
        listener.begin_read(0.0)
        listener.apply_history(None)
        listener.begin_again()
        listener.resume()
    if heard:
        hear_all(listener, history[len(kept) :])
    listener.check()
    read_all(listener, history)
    tokens = [made.token for made in answer]
    text = "".join(made.text for made in answer)
    assert told(listener) == (text, tokens, [(made.token, made.text) for made in answer])
    assert (listener.n, listener.has_begun) == (len(answer), True)


@pytest.mark.parametrize("other", ["a token", "a text", "an end"])
@pytest.mark.parametrize("size", [1, 2])
def test_nothing_new_is_handed_out_where_other_tokens_come_the_second_time(other: str, size: int) -> None:
    answer = [Made(number, "x") for number in range(5)]
    listener = Listener(new_uid(), Feed(), room=99)
    listener.submitted()
    hear_all(listener, cut(answer[:3], [1, 1, 1]))
    listener.drain()
    listener.begin_again()
    listener.check()
    if other == "an end":
        history = [*cut(answer[:2], [size, size]), Entry(SEAL, encode(finished(2)))]
    else:
        answer[1] = Made(9, "x") if other == "a token" else Made(1, "xyz")
        history = cut(answer, [size] * 5)
    read_all(listener, history)
    (event,) = listener.drain()
    assert isinstance(event.event, Failed) and event.event.code == "log_lost" and listener.ended


def test_an_end_after_fewer_tokens_than_the_client_has_is_not_its_end() -> None:
    answer, seal = [Made(number, "x") for number in range(3)], Entry(SEAL, encode(finished(2)))
    listener = Listener(new_uid(), Feed(), room=99)
    listener.submitted()
    hear_all(listener, cut(answer, [1, 1, 1]))
    listener.drain()
    listener.check()
    listener.begin_read(0.0)
    listener.apply_history([seal])
    assert listener.drain() == [] and not listener.ended
    read_all(listener, [*cut(answer[:2], [1, 1]), seal])
    (event,) = listener.drain()
    assert isinstance(event.event, Failed) and event.event.code == "log_lost"


def test_a_failure_is_told_though_not_all_tokens_have_come_again() -> None:
    listener = in_state(LIVE)
    listener.begin_again()
    listener.apply_reply(Reply(listener.uid, SEAL, 0, Failed(status=504, code="timeout", message="Late.")))
    (event,) = listener.drain()
    assert isinstance(event.event, Failed) and event.event.code == "timeout"


def test_a_read_that_began_before_the_request_began_again_is_not_taken_in() -> None:
    listener = in_state(READING, room=9)
    listener.begin_again()
    listener.apply_history([entry(2)])
    assert (listener.state, listener.drain()) == (BEHIND, [])
    read_all(listener, [entry(1), entry(2)])
    assert [event.n for event in listener.drain()] == [2]


def test_who_follows_a_request_waits_a_moment_for_its_sender_to_begin_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = in_state(LOST)
    assert listener.may_come_back
    monkeypatch.setattr(web.live.listener, "COMES_BACK_S", 0.0)
    assert not listener.may_come_back
    monkeypatch.undo()
    assert not in_state(LOST, expires_s=time.time() - 1).may_come_back


def test_a_client_that_reads_slowly_is_known_until_it_has_caught_up() -> None:
    listener = in_state(LIVE)
    for n in (2, 3, 4):
        listener.apply_reply(reply(listener, n))
    assert listener.is_slow
    listener.drain()
    listener.begin_read(0.0)
    listener.apply_history([entry(4)])
    assert not listener.is_slow
