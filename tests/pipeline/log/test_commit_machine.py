"""The commits of the log through random stories of many workers, beside a log in memory that says what each must do.

Workers read, commit, crash, lose their slots and go on as if they had not; answers are lost and commits said again.
After every commit all that Redis holds is compared with the log in memory, and each history must be a true one by
itself. In the end healthy workers finish what was accepted. Hypothesis makes up the stories and shortens those that
fail.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.commit_grounds import (
    LIMITS,
    NAMES,
    NUM_SLOTS,
    CommitOracle,
    DurableGround,
    RedisGround,
    State,
    who_lives,
    without_clock,
)
from support.histories import entries_of
from support.redis_servers import PLACES, Servers
from support.selection import by_night, rest_at_night

from pipeline.errors import Fenced, LogError
from pipeline.events import (
    AnyEvent,
    Cancelled,
    End,
    EventRow,
    Failed,
    Finished,
    SamplingParams,
    StepCompleted,
    StepRow,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokenRow,
    TokensProduced,
    Usage,
    decode,
)
from pipeline.log.entries import replies_of
from pipeline.log.protocol import (
    GUEST,
    DeadLetter,
    Entry,
    Inbox,
    Once,
    Owner,
    Produced,
    Quota,
    StepCommitted,
    Submission,
    Taken,
)
from pipeline.log.redis import RedisLog
from pipeline.names import (
    DETOKENIZE,
    GENERATE,
    LASTING,
    SEAL,
    SUBMITTED_ID,
    TOKENIZE,
    TOKENIZED_ID,
    base_uid,
    parse_id,
    sibling_uids,
    slot_index,
    slot_name,
    tokens_id,
)
from pipeline.views.history import copied_history


def certified_token(nonce: int, prompt: Sequence[int], before: Sequence[int]) -> int:
    """Return a token that no other call returns and that says which tokens it was computed from."""
    computed_from = repr((nonce, tuple(prompt), tuple(before))).encode()
    return nonce << 32 | int.from_bytes(blake2b(computed_from, digest_size=4).digest(), "big")


def is_computed_from(token: int, prompt: Sequence[int], before: Sequence[int]) -> bool:
    return token == certified_token(token >> 32, prompt, before)


def history_problems(history: Sequence[Entry]) -> list[str]:
    """Return what a history breaks of the promises: one end at most and nothing after it, tokens 1 to n without a hole,
    each computed from exactly those before it.
    """
    problems: list[str] = []
    prompt: tuple[int, ...] = ()
    tokens: list[int] = []
    for place, entry in enumerate(history):
        event = decode(entry.fields)
        n = parse_id(entry.id)[0]
        match event:
            case Submitted():
                expected = SUBMITTED_ID if place == 0 else "one at the start"
            case Tokenized():
                expected = TOKENIZED_ID if place == 1 else "one after the start"
                prompt = event.token_ids
            case TokensProduced():
                expected = tokens_id(len(tokens) + event.count)
                for token in event.tokens:
                    if not is_computed_from(token, prompt, tokens):
                        problems.append(f"token {len(tokens) + 1} was computed from others than those before it")
                    tokens.append(token)
            case Finished() | Failed() | Cancelled():
                expected = SEAL
                if event.n != len(tokens):
                    problems.append(f"the end says {event.n} tokens after {len(tokens)}")
                if place != len(history) - 1:
                    problems.append(f"there is {history[place + 1].id} after the end")
            case _:
                expected = f"{len(tokens)}-{parse_id(entry.id)[1]}"
        if entry.id != expected:
            problems.append(f"a {event.kind} has the id {entry.id}, expected {expected}, with {len(tokens)} tokens")
            del tokens[n:]
    return problems


T = TypeVar("T")

SUBMITTED: Final = Inbox.submitted(NAMES)
TOKENIZED: Final = Inbox.tokenized(NAMES)
STAGES: Final = (TOKENIZE, GENERATE, DETOKENIZE)
EVERYWHERE: Final = frozenset(itertools.product(STAGES, range(NUM_SLOTS)))
FRONTENDS: Final = ("web-0", "web-1")
MOST_WORKERS: Final = 3
"""Of one stage, the living and those that do not know yet that they lost their slots."""
MOST_TAKEN: Final = 8
LONG_MS: Final = 600_000
"""Nothing runs out by itself while a story lasts; what runs out is made to."""
SHORT_LIVED: Final = (
    "operations.slots.STATUS_TTL_MS",
    "operations.frontends.REPLIES_TTL_MS",
    "operations.requests.READER_TTL_MS",
    "entries.BRIEF_MS",
)
"""Times to live that nobody sets; on a busy machine a story may outlast them."""
NUM_STORIES: Final = int(os.environ.get("STORIES", by_night("10", "200")))
"""How many are told."""
STORIES: Final = settings(
    max_examples=NUM_STORIES, stateful_step_count=40, deadline=None, derandomize=False, print_blob=True
)
STORIES_WITH_RESTARTS: Final = settings(STORIES, max_examples=max(by_night(4, 8), NUM_STORIES // 10))


@dataclass(frozen=True)
class Loss:
    """Of a slot, by whoever holds it, to a guest, to another worker, to one after the other, or to nobody."""

    stage: str
    index: int
    to_guest: bool
    to_worker: bool


WHICH = st.integers(0, 99)
SOME = st.integers(0, 255)
"""A subset, by its bits."""
SELDOM = st.sampled_from([False] * 5 + [True])


LOSSES = st.one_of(
    st.none(),
    st.builds(
        Loss,
        st.sampled_from([TOKENIZE, GENERATE, GENERATE, DETOKENIZE]),
        st.integers(0, NUM_SLOTS - 1),
        st.booleans(),
        st.booleans(),
    ),
)
"""None: nobody loses anything."""


# Who takes part


@dataclass(eq=False)
class Tokenizer:
    owner: Owner
    in_hand: list[Entry] = field(default_factory=list)
    is_sure: bool = False
    """It knows what its slot has read and not consumed."""


@dataclass(frozen=True)
class Running:
    """What an engine knows of a request."""

    entry: Entry
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    number: int
    event: StepCompleted
    ended: tuple[str, ...]


@dataclass(eq=False)
class Engine:
    owner: Owner
    number: int = 0
    cursor: str = "0-0"
    running: dict[str, Running] = field(default_factory=dict)
    gone: dict[str, Entry] = field(default_factory=dict)
    """What ended elsewhere: the next step lets it go."""
    marks: list[StepRow] = field(default_factory=list)
    owed: tuple[Step, ...] = ()
    """Steps whose answer was lost: they are committed again before anything else."""
    has_adopted: bool = False
    is_sure: bool = True
    """No answer of `take` was lost."""
    guest: Owner | None = None
    """It looks after the slot of another engine, to take over what that one had taken."""


@dataclass(eq=False)
class Detokenizer:
    owner: Owner
    in_hand: list[Entry] = field(default_factory=list)
    is_sure: bool = False

    @property
    def inbox(self) -> Inbox:
        return Inbox.steps(NAMES, self.engine)

    @property
    def engine(self) -> str:
        return slot_name(GENERATE, slot_index(self.owner.slot))


Worker: TypeAlias = Tokenizer | Engine | Detokenizer
W = TypeVar("W", Tokenizer, Engine, Detokenizer)


@dataclass
class Client:
    """What a frontend has told the client of one request."""

    once: Once | None
    """Under which idempotency key it came."""
    n: int = 0
    has_ended: bool = False
    is_deaf: bool = False
    """Its replies were lost at some time; it reads the history."""


class Story(RuleBasedStateMachine):
    """What happens to requests between the workers of three stages, each with two slots."""

    waits_for_steps = True
    """An engine that takes over waits until no step of the former owner is left to be detokenized."""

    def __init__(self, ground: RedisGround) -> None:
        super().__init__()
        ground.begin()
        self.ground = ground
        self.oracle = CommitOracle(NAMES, LIMITS)
        self.tokenizers: list[Tokenizer] = []
        self.engines: list[Engine] = []
        self.detokenizers: list[Detokenizer] = []
        self.clients: dict[str, Client] = {}
        """Of every request that was accepted."""
        self.frontends: dict[str, str] = {}
        self.expired: set[str] = set()
        """Requests whose histories are gone."""
        self.numbers = itertools.count(1)
        self.twice = False
        """Each commit is said again at once, as by a caller who did not hear the answer."""
        self.failed = False
        self.checked: dict[str, int] = {}
        self.known: dict[str, tuple[Sequence[Entry], Sequence[Entry]]] = {}
        """Of each stream, as it was seen last: its entries, and these without what a clock makes."""
        self.num_letters = 0
        self.heard: dict[str, str] = dict.fromkeys(FRONTENDS, "0-0")
        self.only_slot_0 = False
        """In the end the first slot of each stage is held by a worker that looks after the second, too."""
        self.seen = ground.observe()
        """What the log held after the last commit."""

    # the rules: who does what next

    @initialize(
        present=st.one_of(st.just(EVERYWHERE), st.sets(st.sampled_from(sorted(EVERYWHERE)))),
        listening=st.sets(st.sampled_from(FRONTENDS)),
        requests=st.integers(0, 3),
        only_slot_0=st.booleans(),
    )
    def begin(self, present: Set[tuple[str, int]], listening: Set[str], requests: int, only_slot_0: bool) -> None:
        """Some requests are there before the first worker, and some workers come only in the end."""
        self.only_slot_0 = only_slot_0
        for number in range(requests):
            self.submit(f"r{number}", FRONTENDS[0])
        for stage, index in sorted(present):
            self.start(stage, index)
        for frontend in sorted(listening):
            self.open_replies(frontend)

    @rule(
        frontend=st.sampled_from(FRONTENDS),
        copies=st.integers(1, 3),
        siblings=st.sampled_from([1, 1, 2, 3]),
        key=st.sampled_from(["", "", "", "k1", "k2"]),
        insists=st.booleans(),
        limited=SELDOM,
        which=WHICH,
        twice=st.booleans(),
    )
    def requests_come(
        self, frontend: str, copies: int, siblings: int, key: str, insists: bool, limited: bool, which: int, twice: bool
    ) -> None:
        """New ones, alone or with siblings; one is sent again; some are under an idempotency key, whose holder one may
        not want any more."""
        self.twice = twice
        holder = self.oracle.holder_of(key)
        instead_of = holder if insists and holder not in map(base_uid, set(self.oracle.log.living())) else ""
        once = Once(key, f"body {which % 5 == 0}", instead_of) if key else None
        quota = Quota("q", concurrent_requests=3) if limited else None
        for _ in range(copies):
            self.submit(f"r{len(self.clients)}", frontend, once, quota, siblings)
        known = self.siblings_of(pick(list(self.clients), which)) if self.clients else []
        if any(self.oracle.has_history(uid) for uid in known):
            self.submit(base_uid(known[0]), self.frontends[known[0]], siblings=len(known))

    @precondition(lambda self: self.tokenizers)
    @rule(
        which=WHICH,
        action=st.sampled_from(["read", "commit", "commit", "refuse", "look", "claim"]),
        count=st.integers(1, 4),
        twice=st.booleans(),
        lost=SELDOM,
    )
    def tokenizer(self, which: int, action: str, count: int, twice: bool, lost: bool) -> None:
        self.twice = twice
        with contextlib.suppress(Fenced):
            self.tokenizer_acts(pick(self.tokenizers, which), action, count, lost)

    @precondition(lambda self: self.engines)
    @rule(
        which=WHICH,
        action=st.sampled_from(["adopt", "take", "take", "step", "step", "step", "look", "guest"]),
        some=SOME,
        ends=SOME,
        again=SELDOM,
        twice=st.booleans(),
        lost=SELDOM,
        count=st.sampled_from([1, 1, 2, 3]),
    )
    def engine(
        self, which: int, action: str, some: int, ends: int, again: bool, twice: bool, lost: bool, count: int
    ) -> None:
        """It commits *count* steps together."""
        self.twice = twice
        with contextlib.suppress(Fenced):
            self.engine_acts(pick(self.engines, which), action, some, ends & ends >> 1, again, lost, count)

    @precondition(lambda self: self.detokenizers)
    @rule(
        which=WHICH,
        action=st.sampled_from(["read", "commit", "commit", "commit", "look"]),
        stops=SOME,
        twice=st.booleans(),
        lost=SELDOM,
        count=st.sampled_from([1, 1, 2, 3]),
    )
    def detokenizer(self, which: int, action: str, stops: int, twice: bool, lost: bool, count: int) -> None:
        """It consumes up to *count* steps together."""
        self.twice = twice
        with contextlib.suppress(Fenced):
            self.detokenizer_acts(pick(self.detokenizers, which), action, stops & stops >> 1 & stops >> 2, lost, count)

    @rule(losses=st.lists(LOSSES, max_size=3), twice=st.booleans())
    def all_work_for_a_while(self, losses: list[Loss | None], twice: bool) -> None:
        """Each worker does what is next for it, and so do those that lost their slots and do not know it."""
        self.twice = twice
        for number, loss in enumerate([*losses, None]):
            self.haunt()
            self.work(ends=number, leave=number % 2)
            if loss is not None:
                self.lose_slot(loss)

    @rule(loss=LOSSES, twice=st.booleans())
    def a_slot_is_lost(self, loss: Loss | None, twice: bool) -> None:
        self.twice = twice
        if loss is not None:
            self.lose_slot(loss)

    @rule(
        stage=st.sampled_from(STAGES),
        index=st.integers(0, 1),
        twice=st.booleans(),
        fate=st.sampled_from(["start", "guest", "crash", "renew", "release"]),
    )
    def a_worker(self, stage: str, index: int, twice: bool, fate: str) -> None:
        self.twice = twice
        slot = slot_name(stage, index)
        match fate:
            case "start" | "guest":
                self.start(stage, index, guest=fate == "guest" and stage == DETOKENIZE)
            case _:
                for worker in [worker for worker in self.workers(stage) if worker.owner.slot == slot][-2:]:
                    self.fate_of(worker, fate)

    @precondition(lambda self: self.clients)
    @rule(
        which=WHICH,
        who=st.sampled_from(FRONTENDS),
        what=st.sampled_from(
            ["cancelled", "failed", "dead", "expires", "reads", "stops", "leaves", "comes and leaves", "is passed on"]
        ),
        alone=st.booleans(),
        twice=st.booleans(),
    )
    def a_request(self, which: int, who: str, what: str, alone: bool, twice: bool) -> None:
        """It is ended, forgotten, read, or left by the client that sent it or by one that came to it, or by one after
        the other: *alone*, or with its siblings."""
        self.twice = twice
        known = pick(list(self.clients), which)
        uids = [known] if alone else self.siblings_of(known)
        for each in ["reads", "leaves", "stops", "comes and leaves"] if what == "is passed on" else [what]:
            if each == "reads":
                self.say(lambda log: log.reading([*uids, "nobody"], who))
            else:
                for uid in uids:
                    self.happens_to(uid, each, who)

    def happens_to(self, uid: str, what: str, who: str) -> None:
        match what:
            case "expires":
                self.expire_history(uid)
            case "stops":
                self.say(lambda log: log.stop_reading(uid, who))
            case "leaves" | "comes and leaves":
                self.abandon(uid, attached=what != "leaves")
            case _:
                self.end(uid, what)

    @rule(
        what=st.sampled_from(["replies", "listen", "trim control", "trim replies", "scripts", "flush", "look"]),
        which=WHICH,
        keep=st.integers(0, 2),
    )
    def something_else(self, what: str, which: int, keep: int) -> None:
        self.twice = bool(which % 2)
        frontend = pick(FRONTENDS, which)
        match what:
            case "replies":
                self.expire_replies(frontend)
            case "listen":
                self.open_replies(frontend)
            case "trim control":
                self.trim(NAMES.control, keep)
            case "trim replies":
                self.trim(NAMES.replies(frontend), keep + 1)
            case "scripts":
                self.ground.forget_scripts()
            case "flush":
                self.flush()
            case "look":
                self.look_around()

    def teardown(self) -> None:
        """Healthy workers finish everything, unless the story has failed."""
        if not self.failed:
            self.finish()

    # requests

    def submit(
        self, uid: str, frontend: str, once: Once | None = None, quota: Quota | None = None, siblings: int = 1
    ) -> None:
        uids = sibling_uids(uid, siblings)
        events = [
            Submitted(endpoint="/v1/completions", frontend=frontend, prompt=each, sampling=SamplingParams(seed=1))
            for each in uids
        ]
        became = self.say(lambda log: log.submit(uid, events, once, quota=quota)).submission
        if became is Submission.ACCEPTED:
            for each in uids:
                self.clients[each] = Client(once, is_deaf=NAMES.replies(frontend) not in self.seen.streams)
                self.frontends[each] = frontend

    def end(self, uid: str, how: str) -> bool:
        event: End = Failed(status=504, code="deadline", message="Too late.")
        if how == "cancelled":
            event = Cancelled(by="client")
        dead = DeadLetter(GENERATE, {"uid": uid}, 3, "It was killed.") if how == "dead" else None
        frontend = self.frontends[uid]
        return self.say(lambda log: log.end(uid, event, frontend=frontend, dead=dead))

    def abandon(self, uid: str, *, attached: bool) -> bool:
        once, frontend, event = self.clients[uid].once, self.frontends[uid], Cancelled(by="client")
        return self.say(lambda log: log.abandon(uid, event, frontend=frontend, once=once, attached=attached))

    def siblings_of(self, uid: str) -> list[str]:
        """Return whatever was submitted together with *uid*, which is one of them, in order."""
        return [other for other in self.clients if base_uid(other) == base_uid(uid)]

    def expire_history(self, uid: str) -> None:
        self.expired.add(uid)
        self.lose(NAMES.request(uid))

    # tokenizers

    def tokenizer_acts(self, worker: Tokenizer, action: str, count: int = 4, lost: bool = False) -> None:
        """Do *action*, or what must be done before it; *lost*: the answer does not arrive."""
        if not worker.is_sure or action == "look":
            worker.in_hand = self.ask(lambda log: log.pending(SUBMITTED, worker.owner.slot))
            worker.is_sure = True
        elif action == "read" or (action in ("commit", "refuse") and not worker.in_hand):
            entries = self.say_once(lambda log: log.read(SUBMITTED, worker.owner.slot, max_entries=count, block_ms=0))
            self.give(worker, entries, lost)
        elif action == "claim":
            entries = self.claim(worker, count)
            if entries:  # the first may have killed who read it
                self.say_once(lambda log: log.retry(SUBMITTED, worker.owner, entries[0]))
            self.give(worker, entries, lost)
        elif worker.in_hand:
            entry = worker.in_hand[-1]
            if action == "refuse":
                refusal = Failed(status=400, code="no", message="No.")
                uid, frontend = entry.fields["uid"], entry.fields["frontend"]
                self.say(lambda log: log.end(uid, refusal, frontend=frontend, consume=entry))
            else:
                prompt = (next(self.numbers), 7)
                event = Tokenized(token_ids=prompt, fingerprint="f", by=worker.owner.slot)
                self.say(lambda log: log.tokenized(entry, event))
            if not lost:
                worker.in_hand.pop()

    def claim(self, worker: Tokenizer, count: int) -> list[Entry]:
        """Claim what the dead had read. Who is fenced gets nothing, and may hear why only if there is something."""

        def claimed(log: RedisLog) -> list[Entry]:
            entries = log.claim(SUBMITTED, worker.owner, count)
            if not entries and not self.oracle.owns(worker.owner):
                raise Fenced
            return entries

        return self.say_once(claimed)

    def give(self, worker: Tokenizer | Detokenizer, entries: Sequence[Entry], lost: bool) -> None:
        if lost:
            worker.is_sure = False
        else:
            known = {entry.id for entry in worker.in_hand}
            worker.in_hand += [entry for entry in entries if entry.id not in known]

    # engines

    def engine_acts(
        self,
        engine: Engine,
        action: str,
        some: int = 255,
        ends: int = 0,
        again: bool = False,
        lost: bool = False,
        count: int = 1,
    ) -> None:
        if engine.owed:
            self.commit_steps(engine, engine.owed, lost)
        elif not engine.has_adopted:
            self.adopt(engine)
        elif action == "take":
            self.take(engine, lost)
        elif action == "step":
            self.commit_steps(engine, self.next_steps(engine, some, ends, again, count), lost)
        elif action == "look":
            self.look_who_lives(engine)
        elif action == "guest":
            self.be_guest(engine)

    def adopt(self, engine: Engine) -> None:
        """Go on with what a former owner of the slot had taken, once none of its steps waits."""
        entries = self.ask(lambda log: log.pending(TOKENIZED, engine.owner.slot))
        if not self.waits_for_steps or not self.waiting_steps(engine.owner.slot):
            self.bring(engine, entries, resumed=True)
            engine.has_adopted = True

    def be_guest(self, engine: Engine) -> None:
        """Take over what the other engine had taken, when that one is away; one commit for each call.

        First nobody else may write for its slot, then its steps must be folded, then its entries become this one's:
        should this engine die, who takes its slot over knows nothing of the other slot's steps.
        """
        slot = slot_name(GENERATE, 1 - slot_index(engine.owner.slot))
        guest = engine.guest
        if guest is None:
            nonce = f"{GUEST}{next(self.numbers)}"
            engine.guest = self.say(lambda log: log.acquire(slot, nonce, LONG_MS))
        elif not self.waits_for_steps or not self.waiting_steps(slot):
            entries = self.say_once(lambda log: log.claim_from(TOKENIZED, engine.owner, guest, MOST_TAKEN))
            if entries:
                self.bring(engine, entries, resumed=True)
            else:
                self.say(lambda log: log.release(guest))
                engine.guest = None

    def waiting_steps(self, slot: str) -> int:
        return self.ask(lambda log: log.backlog(Inbox.steps(NAMES, slot)))

    def take(self, engine: Engine, lost: bool = False) -> None:
        if not engine.is_sure:
            pending = self.ask(lambda log: log.pending(TOKENIZED, engine.owner.slot))
            known = {request.entry.id for request in engine.running.values()} | {e.id for e in engine.gone.values()}
            self.bring(engine, [entry for entry in pending if entry.id not in known], resumed=False)
        taken: Taken = self.say_once(lambda log: log.take(engine.owner, MOST_TAKEN, control_cursor=engine.cursor))
        engine.is_sure = not lost
        if not lost:
            self.bring(engine, taken.entries, resumed=False)
            self.hear(engine, taken)

    def bring(self, engine: Engine, entries: Sequence[Entry], *, resumed: bool) -> None:
        """Fold the histories of requests, and go on from there."""
        uids = [entry.fields["uid"] for entry in entries]
        for entry, history in zip(entries, self.ground.log.histories(uids), strict=True):
            uid = entry.fields["uid"]
            events = [decode(fields.fields) for fields in history]
            if not history or history[-1].id == SEAL:
                engine.gone[uid] = entry
                continue
            tokens = [token for event in events if isinstance(event, TokensProduced) for token in event.tokens]
            tokenized = events[1]
            assert isinstance(tokenized, Tokenized)
            engine.running[uid] = Running(entry, tokenized.token_ids, tuple(tokens))
            if resumed:
                mark = TakenOver(engine=engine.owner.slot, epoch=engine.owner.epoch)
                engine.marks.append(EventRow(uid=uid, n=len(tokens), event=mark))

    def next_steps(self, engine: Engine, some: int, ends: int, again: bool, count: int) -> tuple[Step, ...]:
        """Let *some* of the running requests have a token in each of *count* steps, and *ends* of them end in the last;
        *again*: rows are repeated too."""
        running, steps = dict(engine.running), list[Step]()
        for number in range(1, count + 1):
            rows: list[StepRow] = list(engine.marks) if number == 1 else []
            released = dict(engine.gone) if number == 1 else {}
            ended = [entry.id for entry in released.values()]
            for place, (uid, request) in enumerate(running.items()):
                bit = 1 << place % 8
                n = len(request.tokens)
                if again and n:
                    rows.append(TokenRow(uid=uid, n=n, token=request.tokens[-1]))
                if some & bit:
                    token = certified_token(next(self.numbers), request.prompt, request.tokens)
                    ends_now = ends & bit and number == count
                    row = TokenRow(uid=uid, n=n + 1, token=token, end="length" if ends_now else None)
                    rows += [row, row] if again and row.end is None else [row]
                    ended += [request.entry.id] if row.end else []
                    running[uid] = Running(request.entry, request.prompt, (*request.tokens, token))
            event = StepCompleted(rows=tuple(rows), released=tuple(released))
            steps.append(Step(engine.number + number, event, tuple(ended)))
        return tuple(steps)

    def commit_steps(self, engine: Engine, steps: tuple[Step, ...], lost: bool = False) -> None:
        engine.owed = ()
        events = {step.number: step.event for step in steps}
        ended = [entry_id for step in steps for entry_id in step.ended]
        done: StepCommitted = self.say(
            lambda log: replace(
                log.step(engine.owner, events, ended=ended, control_cursor=engine.cursor, lease_ms=LONG_MS), ms=0
            )
        )
        if lost:
            engine.owed = steps
            return
        for step in steps:
            self.go_on(engine, step)
        self.hear(engine, done)

    def go_on(self, engine: Engine, step: Step) -> None:
        engine.number = step.number
        engine.marks = engine.marks[sum(isinstance(row, EventRow) for row in step.event.rows) :]
        for uid in step.event.released:
            engine.gone.pop(uid, None)
        for row in step.event.rows:
            request = engine.running.get(row.uid)
            if isinstance(row, TokenRow) and request is not None and row.n == len(request.tokens) + 1:
                engine.running[row.uid] = Running(request.entry, request.prompt, (*request.tokens, row.token))
                if row.end is not None:
                    del engine.running[row.uid]

    def hear(self, engine: Engine, said: Taken | StepCommitted) -> None:
        engine.cursor = said.control_cursor
        for uid in said.ended:
            self.released(engine, uid)

    def look_who_lives(self, engine: Engine) -> None:
        """Let go of what has ended, as when `control` lost its entry."""
        uids = list(engine.running)
        alive = self.ask(lambda log: log.alive(uids))
        for uid in uids:
            if uid not in alive:
                self.released(engine, uid)

    def released(self, engine: Engine, uid: str) -> None:
        if uid in engine.running:
            engine.gone[uid] = engine.running.pop(uid).entry
            engine.marks = [row for row in engine.marks if row.uid != uid]

    # detokenizers

    def detokenizer_acts(
        self, worker: Detokenizer, action: str, stops: int = 0, lost: bool = False, count: int = 1
    ) -> None:
        if not worker.is_sure or action == "look":
            worker.in_hand = self.ask(lambda log: log.pending(worker.inbox, worker.owner.slot))
            worker.is_sure = True
        elif action == "read" or not worker.in_hand:
            entries = self.say_once(lambda log: log.read(worker.inbox, worker.owner.slot, max_entries=3, block_ms=0))
            self.give(worker, entries, lost)
        else:
            self.take_stranded(worker)
            entries = worker.in_hand[:count]
            said = self.said_in(entries, stops)
            done = self.say(lambda log: log.produced(worker.owner, entries, worker.engine, said))
            if not done and len(entries) > 1:  # one of them was consumed before; the others were not
                worker.is_sure = False
            elif not lost:
                del worker.in_hand[: len(entries)]

    def take_stranded(self, worker: Detokenizer) -> None:
        """Take what this slot has read before and not consumed: who had the slot before may read once more, late."""
        first = parse_id(worker.in_hand[0].id)
        mine = self.ask(lambda log: log.pending(worker.inbox, worker.owner.slot))
        worker.in_hand = [entry for entry in mine if parse_id(entry.id) < first] + worker.in_hand

    def said_in(self, entries: Sequence[Entry], stops: int) -> list[Produced]:
        """Return what follows from steps; where a bit of *stops* is set, the text of a token meets a stop string."""
        marks: dict[tuple[str, int], int] = {}
        return [item for entry in entries for item in self.said_in_step(entry, stops, marks)]

    def said_in_step(self, entry: Entry, stops: int, marks: dict[tuple[str, int], int]) -> list[Produced]:
        step = decode(entry.fields)
        assert isinstance(step, StepCompleted)
        said: list[Produced] = []
        for place, row in enumerate(step.rows):
            frontend = self.frontends[row.uid]
            if isinstance(row, EventRow):
                mark = (row.uid, row.n)
                if mark not in marks:
                    (history,) = self.ground.log.histories([row.uid])
                    n, k = parse_id(history[-1].id) if history else (0, 0)
                    marks[mark] = k if n == row.n else 0
                marks[mark] += 1
                assert isinstance(row.event, TakenOver)
                said.append(Produced(row.uid, f"{row.n}-{marks[mark]}", row.n, row.event, frontend))
                continue
            tokens = TokensProduced(count=1, tokens=(row.token,), text="x", step=entry.id)
            said.append(Produced(row.uid, tokens_id(row.n), row.n, tokens, frontend))
            stopped = row.end is None and bool(stops >> place % 8 & 1)
            if row.end is not None or stopped:
                usage = Usage(prompt_tokens=2, completion_tokens=row.n)
                times = Timings(admitted_ms=1, first_token_ms=2, total_ms=3)
                end = Finished(n=row.n, reason=row.end or "stop", usage=usage, timings=times)
                said.append(Produced(row.uid, SEAL, row.n, end, frontend, tell_engine=stopped))
        return said

    # workers

    def workers(self, stage: str) -> list[Worker]:
        return [worker for worker in self.everybody() if worker.owner.slot.startswith(stage)]

    def everybody(self) -> list[Worker]:
        return [*self.tokenizers, *self.engines, *self.detokenizers]

    def start(self, stage: str, index: int, *, guest: bool = False) -> Owner | None:
        """Start a worker; None when somebody holds the slot. Who held it before may still be there and not know."""
        slot = slot_name(stage, index)
        nonce = f"{GUEST if guest else 'n'}{next(self.numbers)}"
        self.say(lambda log: log.announce(slot, f"{nonce} comes"))
        owner = self.say(lambda log: log.acquire(slot, nonce, LONG_MS))
        if owner is None:
            return None
        self.say(lambda log: log.renew(owner, LONG_MS, nonce))
        match stage:
            case "tokenize":
                self.say(lambda log: log.prepare(SUBMITTED))
                self.tokenizers = [*self.tokenizers, Tokenizer(owner)][-MOST_WORKERS:]
            case "generate":
                self.say(lambda log: log.prepare(TOKENIZED))
                self.engines = [*self.engines, Engine(owner)][-MOST_WORKERS:]
            case _:
                detokenizer = Detokenizer(owner)
                self.say(lambda log: log.prepare(detokenizer.inbox))
                self.detokenizers = [*self.detokenizers, detokenizer][-MOST_WORKERS:]
        return owner

    def fate_of(self, worker: Worker, fate: str) -> None:
        match fate:
            case "crash":
                self.tokenizers = [other for other in self.tokenizers if other is not worker]
                self.engines = [other for other in self.engines if other is not worker]
                self.detokenizers = [other for other in self.detokenizers if other is not worker]
            case "renew":
                self.say(lambda log: log.renew(worker.owner, LONG_MS, "I am well"))
            case "release":
                self.say(lambda log: log.release(worker.owner))

    def lose_slot(self, loss: Loss) -> None:
        """Let a lease run out, and those come who inherit the slot."""
        self.expire_lease(slot_name(loss.stage, loss.index))
        if loss.to_guest and loss.stage == DETOKENIZE:
            self.start(loss.stage, loss.index, guest=True)
        if loss.to_guest and loss.stage == GENERATE:
            for engine in self.healthy(self.engines):
                if slot_index(engine.owner.slot) != loss.index and engine.guest is None:
                    self.be_guest(engine)
        if loss.to_worker:
            self.start(loss.stage, loss.index)

    def expire_lease(self, slot: str) -> None:
        self.lose(NAMES.lease(slot))

    # frontends

    def open_replies(self, frontend: str) -> None:
        if NAMES.replies(frontend) not in self.seen.streams:
            self.make_deaf(frontend)

        def opened(log: RedisLog) -> None:
            log.open_replies(frontend)

        self.say(opened)
        self.say_once(lambda log: log.open_replies(frontend))  # now the oracle knows the id, too

    def expire_replies(self, frontend: str) -> None:
        self.make_deaf(frontend)
        self.heard[frontend] = "0-0"
        self.lose(NAMES.replies(frontend))

    def make_deaf(self, frontend: str) -> None:
        for uid, client in self.clients.items():
            client.is_deaf |= self.frontends[uid] == frontend

    def listen(self) -> list[str]:
        """Let every client hear its frontend; return where what it hears first is not what its history says."""
        problems = []
        for frontend in FRONTENDS:
            replies = self.seen.streams.get(NAMES.replies(frontend), ())
            if replies and replies[-1].id != self.heard[frontend]:
                new = [entry for entry in replies if parse_id(entry.id) > parse_id(self.heard[frontend])]
                self.heard[frontend] = replies[-1].id
                problems += [self.hears(reply.uid, reply.entry_id, reply.n, reply.event) for reply in replies_of(new)]
        return [problem for problem in problems if problem]

    def hears(self, uid: str, entry_id: str, n: int, event: TokensProduced | End) -> str:
        client = self.clients[uid]
        history = {entry.id: entry for entry in self.seen.streams.get(NAMES.request(uid), ())}
        if client.is_deaf or client.has_ended or not history or (n <= client.n and entry_id != SEAL):
            return ""
        client.n, client.has_ended = n, entry_id == SEAL
        written = decode(history[entry_id].fields) if entry_id in history else None
        if isinstance(event, TokensProduced) and isinstance(written, TokensProduced):
            return "" if written.tokens == event.tokens else f"{uid} hears other tokens at {entry_id}: {event}"
        return "" if written is not None and written.kind == event.kind else f"{uid} hears {event}, not {written}"

    # the log, the oracle, and what must be true

    def say(self, call: Callable[[RedisLog], T]) -> T:
        """Let the log do a commit that is safe to do twice, and the oracle; return what both say."""
        said = self.say_once(call)
        if self.twice:
            before = self.seen
            with contextlib.suppress(Fenced):
                self.say_once(call)
            if self.seen != before:
                self.fail(f"the second time changed {differences(self.seen, before)}")
        return said

    def say_once(self, call: Callable[[RedisLog], T]) -> T:
        """As say, for what gives entries away or is meant to be different each time; a client does not repeat it."""
        try:
            return self.ask(call)
        finally:
            if not self.failed:
                self.compare()

    def ask(self, call: Callable[[RedisLog], T]) -> T:
        """As say, for what changes nothing."""
        said, expected = _outcome(call, self.ground.log), _outcome(call, self.oracle.log)
        if said != expected:
            self.fail(f"the log says {said}, expected {expected}")
        answer, error = said
        if error is not None:
            raise error("as expected")
        return answer  # type: ignore[no-any-return]

    def lose(self, key: str) -> None:
        self.ground.expire(key)
        self.oracle.expire(key)
        self.compare()

    def trim(self, key: str, keep: int) -> None:
        self.ground.trim(key, keep)
        self.oracle.trim(key, keep)
        self.compare()

    def flush(self) -> None:
        def ask(log: RedisLog) -> None:
            log.flush("web-0")

        self.say_once(ask)

    def look_around(self) -> None:
        self.ask(lambda log: log.unattended())
        if TOKENIZED.stream in self.seen.pending:
            self.ask(lambda log: log.forsaken(TOKENIZED))
            self.ask(lambda log: [log.num_pending(TOKENIZED, slot_name(GENERATE, index)) for index in range(NUM_SLOTS)])

    def without_clock(self, state: State) -> State:
        """Return what the oracle can know of a state, too."""
        for key, entries in state.streams.items():
            if key not in self.known or self.known[key][0] is not entries:
                self.known[key] = (entries, [without_clock(entry) for entry in entries])
        streams = {key: self.known[key][1] for key in state.streams}
        return State(streams, state.pending, who_lives(state.sets, NAMES), state.strings)

    def compare(self) -> None:
        """See that the log holds what the oracle does, and that every history and every client's story is true."""
        self.seen = self.ground.observe()
        self.oracle.learn_ids(self.seen.streams)
        seen, expected = self.without_clock(self.seen), self.oracle.state()
        if seen != expected:
            self.fail(f"the log holds {differences(seen, expected)}")
        if self.ground.num_used != self.oracle.log.num_sealed:
            self.fail(f"{self.ground.num_used} ends are in the usage, of {self.oracle.log.num_sealed}")
        for uid in self.clients:
            history = self.seen.streams.get(NAMES.request(uid), ())
            if len(history) != self.checked.get(uid):
                self.checked[uid] = len(history)
                for problem in history_problems(history):
                    self.fail(f"history of {uid}: {problem}")
        for problem in self.listen():
            self.fail(problem)
        for letter in self.seen.streams.get(NAMES.dead, ())[self.num_letters :]:
            self.num_letters += 1
            if copied_history(letter) != self.seen.streams[NAMES.request(letter.fields["uid"])]:
                self.fail(f"{letter} holds another history")
        for key in self.ground.lasting:
            if not may_last(key):
                self.fail(f"{key} has no time to live")

    def fail(self, problem: str) -> NoReturn:
        self.failed = True
        raise AssertionError(problem)

    # how it goes when all is well

    def work(self, *, ends: int = 0, leave: int = 0) -> None:
        """Let every worker that holds its slot do what is next for it; *leave* so many entries in its hands."""
        for action in ("look", "read", "claim"):
            for tokenizer in self.healthy(self.tokenizers):
                self.tokenizer_acts(tokenizer, action)
        for tokenizer in self.healthy(self.tokenizers):
            while len(tokenizer.in_hand) > leave:
                self.tokenizer_acts(tokenizer, "commit")
        for engine in self.healthy(self.engines):
            away = self.ask(lambda log: log.forsaken(TOKENIZED))
            other = slot_name(GENERATE, 1 - slot_index(engine.owner.slot))
            if engine.has_adopted and (engine.guest is not None or other in away):
                self.engine_acts(engine, "guest")
            for action in ("take", "look"):
                self.engine_acts(engine, action)
            if engine.running or engine.gone or engine.owed:
                self.engine_acts(engine, "step", ends=ends)
        for detokenizer in self.healthy(self.detokenizers):
            for action in ("look", "read"):
                self.detokenizer_acts(detokenizer, action)
            while len(detokenizer.in_hand) > leave:
                self.detokenizer_acts(detokenizer, "commit")

    def haunt(self) -> None:
        """Let every worker that has lost its slot do what would be next for it, too."""
        for zombie in [worker for worker in self.everybody() if not self.oracle.owns(worker.owner)]:
            self.fate_of(zombie, "renew")
            for number in range(3):
                with contextlib.suppress(Fenced):
                    match zombie:
                        case Tokenizer():
                            self.tokenizer_acts(zombie, ("claim", "commit", "commit")[number])
                        case Engine():
                            self.engine_acts(zombie, ("step", "take", "guest")[number])
                        case Detokenizer():  # it looks, reads, commits
                            self.detokenizer_acts(zombie, "commit")

    def healthy(self, workers: Sequence[W]) -> Iterator[W]:
        for worker in workers:
            if self.oracle.owns(worker.owner):  # still, when it is its turn
                yield worker

    def finish(self) -> None:
        """Let everybody die and others come; then everything that was accepted must end, and nothing be left."""
        self.twice = False
        self.tokenizers, self.engines, self.detokenizers = [], [], []
        for stage, index in itertools.product(STAGES, range(NUM_SLOTS)):
            self.expire_lease(slot_name(stage, index))
        for index in range(NUM_SLOTS):
            if index == 0 or not self.only_slot_0:
                self.start(TOKENIZE, index)
                self.start(GENERATE, index)
            self.start(DETOKENIZE, index, guest=self.only_slot_0)
        streams = [NAMES.submitted, NAMES.tokenized, *(NAMES.steps(slot_name(GENERATE, i)) for i in range(NUM_SLOTS))]
        for _ in range(20 + len(self.clients) + sum(len(self.seen.streams.get(stream, ())) for stream in streams)):
            if not any(self.seen.streams.get(stream) for stream in streams):
                break
            self.work(ends=255)
        for uid in self.expired & set(self.oracle.log.living()):  # as the janitor does
            self.end(uid, "failed")
        left = {stream: entries for stream in streams if (entries := self.seen.streams.get(stream))}
        if left or any(self.seen.pending.values()) or NAMES.live in self.seen.sets:
            self.fail(f"never finished: {left}, pending {self.seen.pending}, {self.seen.sets}")
        for uid in self.clients:
            history = self.seen.streams.get(NAMES.request(uid), ())
            if (history[-1].id if history else "") != ("" if uid in self.expired else SEAL):
                self.fail(f"{uid} has no end: {history}")
        self.nobody_ends_again()

    def nobody_ends_again(self) -> None:
        def end_all(log: RedisLog) -> list[bool]:
            event = Cancelled(by="client")
            return [log.end(uid, event, frontend="web-0") for uid in self.clients]

        assert not any(self.say_once(end_all))


class StoryWithRestarts(Story):
    """Redis, too, dies, and comes back with what it had written."""

    @rule()
    def redis_restarts(self) -> None:
        before = self.seen
        self.ground.restart()
        self.compare()
        if self.seen != before:
            self.fail(f"the restart changed {differences(self.seen, before)}")


class HastyStory(Story):
    """Its engines take over before the last steps of the former owner are in the histories."""

    waits_for_steps = False


def _outcome(call: Callable[[RedisLog], Any], log: RedisLog) -> tuple[Any, type[LogError] | None]:
    """Return what *log* answers, without what a clock makes, and the exception that it raises."""
    try:
        return _plain(call(log)), None
    except LogError as error:
        return None, type(error)


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return without_clock(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def differences(seen: State, expected: State) -> dict[str, tuple[object, object]]:
    """Return key -> what the log holds and what the oracle does, where that differs."""

    def by_key(state: State) -> dict[str, object]:
        pending = {f"pending of {key}": items for key, items in state.pending.items()}
        return {**state.streams, **state.strings, **pending, **state.sets}

    one, other = by_key(seen), by_key(expected)
    keys = sorted(one.keys() | other.keys())
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


@functools.cache
def may_last(key: str) -> bool:
    name = key.removeprefix(NAMES.live.removesuffix("live"))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LASTING)


def pick(items: Sequence[T], which: int) -> T:
    return items[which % len(items)]


# the tests


@pytest.fixture(autouse=True)
def nothing_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHORT_LIVED:
        monkeypatch.setattr(f"pipeline.log.{name}", LONG_MS)


@pytest.fixture(params=rest_at_night(PLACES))
def ground(request: pytest.FixtureRequest, redis_servers: Servers) -> Iterator[RedisGround]:
    with contextlib.closing(RedisGround(redis_servers.url(request.param))) as on_server:
        yield on_server


@pytest.fixture(params=rest_at_night(PLACES))
def durable_ground(request: pytest.FixtureRequest, redis_servers: Servers, tmp_path: Path) -> Iterator[DurableGround]:
    with contextlib.closing(DurableGround(redis_servers.binary(request.param), tmp_path)) as on_server:
        yield on_server


def tell(begin: Callable[[], Story], stories: settings) -> None:
    run_state_machine_as_test(begin, settings=stories)  # type: ignore[arg-type]  # it may be any function


@pytest.mark.timeout(900)  # a story that fails is shortened for five minutes
def test_whatever_workers_do_every_request_ends_once_and_as_the_model_says(ground: RedisGround) -> None:
    tell(lambda: Story(ground), STORIES)


@pytest.mark.timeout(900)
def test_whatever_workers_do_while_redis_dies_every_request_ends_once(durable_ground: DurableGround) -> None:
    tell(lambda: StoryWithRestarts(durable_ground), STORIES_WITH_RESTARTS)


def begin(story: Story) -> tuple[Engine, Detokenizer]:
    """Let one request run, with one token in its history and one in a step that is not detokenized yet."""
    story.begin({(TOKENIZE, 0), (GENERATE, 0), (DETOKENIZE, 0)}, {"web-0"}, 0, False)
    story.submit("r0", "web-0")
    story.work()
    story.work()
    (engine,), (detokenizer,) = story.engines, story.detokenizers
    story.engine_acts(engine, "step")
    return engine, detokenizer


def test_a_zombie_that_writes_between_the_fold_and_the_next_step_breaks_no_chain(ground: RedisGround) -> None:
    story = Story(ground)
    zombie, detokenizer = begin(story)
    story.expire_lease(zombie.owner.slot)
    story.start(GENERATE, 0)
    successor = story.engines[-1]
    story.engine_acts(successor, "adopt")
    assert not successor.has_adopted
    story.detokenizer_acts(detokenizer, "read")
    story.detokenizer_acts(detokenizer, "commit")
    story.engine_acts(successor, "adopt")
    assert len(successor.running["r0"].tokens) == len(zombie.running["r0"].tokens) > 0
    with pytest.raises(Fenced):
        story.engine_acts(zombie, "step")
    story.engine_acts(successor, "step")
    story.finish()


def test_the_story_of_a_takeover_that_does_not_wait_for_the_last_steps_fails(ground: RedisGround) -> None:
    story = HastyStory(ground)
    engine, _ = begin(story)
    story.expire_lease(engine.owner.slot)
    story.start(GENERATE, 0)
    story.engine_acts(story.engines[-1], "adopt")
    with pytest.raises(AssertionError, match="was computed from others"):
        story.all_work_for_a_while([None, None], False)


PROMPT: Final = (3, 4)
BEGUN: Final = (
    ("0-1", Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams())),
    ("0-2", Tokenized(token_ids=PROMPT, fingerprint="f", by="tokenize-0")),
)
FIRST: Final = certified_token(1, PROMPT, [])
SECOND: Final = certified_token(2, PROMPT, [FIRST])


def tokens(n: int, *token_ids: int) -> tuple[str, TokensProduced]:
    return tokens_id(n), TokensProduced(count=len(token_ids), tokens=token_ids, text="x", step="1-1")


def test_a_true_history_has_no_problems() -> None:
    mark = TakenOver(engine="generate-0", epoch=2)
    end = Cancelled(n=2, by="client")
    assert history_problems([]) == []
    assert history_problems(entries_of([*BEGUN, tokens(1, FIRST), ("1-1", mark), tokens(2, SECOND), (SEAL, end)])) == []
    assert history_problems(entries_of([*BEGUN, tokens(2, FIRST, SECOND)])) == []


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ([tokens(1, SECOND)], "token 1 was computed from others"),
        ([tokens(1, FIRST), tokens(2, certified_token(2, PROMPT, [SECOND]))], "token 2 was computed from others"),
        ([tokens(1, FIRST), tokens(2, certified_token(2, (9,), [FIRST]))], "token 2 was computed from others"),
        ([tokens(2, FIRST)], "has the id 2-0, expected 1-0"),
        ([tokens(1, FIRST), tokens(1, FIRST)], "has the id 1-0, expected 2-0"),
        ([("1700000000000-0", tokens(1, FIRST)[1])], "expected 1-0"),
        ([("1-1", TakenOver(engine="generate-0", epoch=2))], "expected 0-1"),
        ([(SEAL, Cancelled(n=1, by="client"))], "the end says 1 tokens after 0"),
        ([("1-0", Cancelled(by="client"))], f"expected {SEAL}"),
        ([(SEAL, Cancelled(by="client")), (SEAL, Cancelled(by="client"))], "after the end"),
        ([BEGUN[0]], "expected one at the start"),
        ([BEGUN[1]], "expected one after the start"),
    ],
)
def test_a_history_that_breaks_a_promise_is_found_out(rest: list[tuple[str, AnyEvent]], problem: str) -> None:
    assert any(problem in found for found in history_problems(entries_of([*BEGUN, *rest])))
