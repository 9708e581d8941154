"""The tokenizer between two commits of the log: a batch in, each request by itself out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.log_contract import put
from support.measured import count_of

import pipeline.scored
import stages.tokenize.worker
from pipeline.errors import RequestError
from pipeline.events import (
    Answered,
    Cancelled,
    Failed,
    Presentation,
    SamplingParams,
    Submitted,
    Task,
    Tokenized,
    decode,
    new_uid,
)
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.markup import Markup
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    BATCH_SECONDS,
    BURIED,
    COMMIT_SECONDS,
    PROMPTS,
    PROMPTS_TOKENS,
    REFUSALS,
    UNREADABLE_ENTRIES,
)
from pipeline.names import SEAL, TOKENIZED_ID, sibling_uids
from pipeline.process.parent import EXIT_REPLACE
from pipeline.sampling import Constraint
from pipeline.stage.slots import WATCHDOG_S, GiveUp, SlotLease, Status, acquire_slot
from stages.tokenize.constraints.asked import Asked, asked_of
from stages.tokenize.prompts import LONG_TEXT, Rendered
from stages.tokenize.worker import BRIEF_TOKENS, CHECK_LOOK_S, LONGEST_BATCH_S, TokenizeWorker

CONTEXT = 16
LIMIT_S = 2.5


class Panic(BaseException):
    """As what the Rust of a tokenizer panics with (pyo3_runtime.PanicException): no Exception."""


class LetterEncoder:
    """One token per letter; some texts are trouble."""

    fingerprint = "letters"

    def __init__(self) -> None:
        self.rendered: list[str] = []
        self.encoded: list[list[str]] = []
        """The batches."""
        self.too_slow: Callable[[], None] = lambda: None
        """Called where the work on a request never ends."""

    def render(self, event: Submitted) -> Rendered:
        self.rendered.append(event.prompt)
        if event.prompt == "refused":
            raise RequestError("roles must alternate", code="template_error", param="messages")
        if event.prompt == "explodes":
            raise ZeroDivisionError("in the template")
        if event.prompt == "slow template":
            self.too_slow()
        if event.prompt == "interrupted":
            raise KeyboardInterrupt
        if event.prompt == "panics at once":
            raise Panic("index out of bounds")
        bad_words = tuple(tuple(map(ord, word)) for word in event.sampling.bad_words)
        return Rendered(event.prompt, True, "prompt", bad_words=bad_words, asked=asked_of(event, Markup()))

    def encode(self, prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        self.encoded.append([prompt.text for prompt in prompts])
        if any(prompt.text.startswith("slow text") for prompt in prompts):
            self.too_slow()
        if any(prompt.text == "poison" for prompt in prompts):
            raise RuntimeError("cannot be encoded")
        if any(prompt.text == "panics" for prompt in prompts):
            raise Panic("not a char boundary")
        if any(prompt.text == "exits" for prompt in prompts):
            raise SystemExit(1)
        return [tuple(map(ord, prompt.text.strip())) for prompt in prompts]

    def refuse_too_long(self, prompt: Rendered, context: int) -> None:
        assert context == CONTEXT
        if prompt.text == "cannot fit":
            raise RequestError("It cannot fit.", code="context_length_exceeded", param="prompt")

    def refuse_too_large(self, prompt: Rendered, context: int) -> None:
        assert context == CONTEXT
        if prompt.text == "a book":
            raise RequestError("It is a book.", code="request_too_large", param="prompt", status=413)

    def keep(
        self, num_tokens: int, prompt: Rendered, token_ids: tuple[int, ...], *, first: bool = False
    ) -> tuple[int, ...]:
        return token_ids[:num_tokens] if first else token_ids[-num_tokens:]

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        if ord("~") in token_ids:
            self.too_slow()
        if ord("?") in token_ids:
            raise Panic("no piece")
        return tuple(map(chr, token_ids))

    def decode(self, event: Submitted) -> str:
        if 2 in event.prompt_ids:
            self.too_slow()
        if 0 in event.prompt_ids:
            raise RequestError("token 0 is none", param="tokens")
        if 1 in event.prompt_ids:
            raise Panic("not a char boundary")
        return "".join(map(chr, event.prompt_ids))

    def describe(self) -> str:
        return '{"letters":true}'


class SlowChecker:
    """A check is done when `finish` is called."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.waits: list[float] = []
        self._known: dict[str, str | RequestError] = {}

    def finish(self, error: RequestError | None = None) -> None:
        self._known[self.begun[-1]] = error or f"grammar of {self.begun[-1]}"

    def known(self, asked: Asked) -> str | RequestError | None:
        assert asked.constraint is not None
        return self._known.get(asked.constraint.text)

    def begin(self, asked: Asked) -> None:
        assert asked.constraint is not None
        self.begun.append(asked.constraint.text)

    def result(self, timeout_s: float) -> str | RequestError | None:
        self.waits.append(timeout_s)
        return self._known.get(self.begun[-1])


class Rig:
    def __init__(self, open_log: Callable[[], RedisLog]) -> None:
        self.log = open_log()
        self.inbox = Inbox.submitted(self.log.names)
        self.log.prepare(self.inbox)
        self.log.prepare(Inbox.tokenized(self.log.names))
        engine, owner = acquire_slot(self.log, "generate", 60_000), acquire_slot(self.log, "tokenize", 60_000)
        status = Status(slot="generate-0", owner=str(engine), pid=1, host="here", phase="ready", context=CONTEXT)
        self.log.renew(engine, 60_000, status.model_dump_json())
        self.slot_lease = SlotLease(open_log(), owner, 60_000)
        self.encoder = LetterEncoder()
        encoder: Any = self.encoder
        self.measures = Measures()
        self.checker = SlowChecker()
        checker: Any = self.checker
        self.worker = TokenizeWorker(
            self.log, self.slot_lease, encoder, self.measures, limit_cpu_s=LIMIT_S, checker=checker
        )

    def submit(self, *prompts: str) -> list[str]:
        return [self.ask(prompt=prompt) for prompt in prompts]

    def ask(self, task: Task = "generate", **fields: Any) -> str:
        uid = new_uid()
        event = Submitted(endpoint="chat", frontend="web-0", task=task, **{"sampling": SamplingParams(), **fields})
        self.log.submit(uid, [event])
        return uid

    def handle(self, entries: Sequence[Entry] = ()) -> None:
        """Handle *entries*, or what is new, and then what is put off, as `follow` does."""
        put_off = list(entries or self.log.read(self.inbox, "tokenize-0", max_entries=100, block_ms=10))
        put_off = self.worker.handle(put_off)
        while put_off:
            put_off = [*put_off[1:], *self.worker.handle(put_off[:1])]

    def handle_with_one_tokenizer_after_the_other(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Handle all that waits; a worker whose work never ends is given up. Return how many there were."""
        limits: list[tuple[float, GiveUp | None]] = []

        def report_progress(
            *, patience_s: float = WATCHDOG_S, cpu_s: float = math.inf, give_up: GiveUp | None = None
        ) -> None:
            assert patience_s == LONGEST_BATCH_S
            limits.append((cpu_s, give_up))

        def too_slow() -> None:
            cpu_s, give_up = limits[-1]
            assert cpu_s == LIMIT_S and give_up is not None
            give_up(self.log)
            raise SystemExit(EXIT_REPLACE)

        monkeypatch.setattr(self.slot_lease, "report_progress", report_progress)
        self.encoder.too_slow = too_slow
        batches = [self.log.read(self.inbox, "tokenize-0", max_entries=100, block_ms=10)]
        for num_given_up in itertools.count():
            try:
                while batches:
                    self.handle(batches.pop(0))
                assert limits[-1] == (math.inf, None)
                return num_given_up
            except SystemExit:
                batches = [[entry] for entry in self.log.pending(self.inbox, "tokenize-0")]  # as `follow` does
        raise AssertionError

    def counted(self) -> tuple[float, ...]:
        """Return how many prompts there were, their tokens, commits and batches."""
        prompts, tokens, batches = (count_of(self.measures, each) for each in (PROMPTS, PROMPTS_TOKENS, BATCH_SECONDS))
        return prompts, tokens, count_of(self.measures, COMMIT_SECONDS, "tokenized"), batches

    def last(self, uid: str) -> tuple[Entry, Any]:
        entry = self.log.histories([uid])[0][-1]
        return entry, decode(entry.fields)


@pytest.fixture
def rig(another_log: Callable[[], RedisLog]) -> Iterator[Rig]:
    rig = Rig(another_log)
    yield rig
    rig.slot_lease.leave()


def choices(count: int, prompt: str, **fields: Any) -> list[Submitted]:
    """Return choices of one prompt, which differ in their seeds alone."""
    sampling = [SamplingParams(seed=i, **fields) for i in range(count)]
    return [Submitted(endpoint="chat", frontend="web-0", prompt=prompt, sampling=each) for each in sampling]


def test_a_prompt_of_several_choices_is_rendered_and_encoded_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.tokenize.prompts, "LONG_TEXT", 8)
    book, uid = "c" * 9, new_uid()
    rig.log.submit(uid, [*choices(6, "ab"), *choices(3, book), *choices(2, "ab", bad_words=("x",))])
    single = rig.submit("ab", "ab")
    for _ in range(7):
        rig.worker.handle(rig.log.read(rig.inbox, "tokenize-0", max_entries=2, block_ms=10))
    assert rig.encoder.rendered == ["ab", book, "ab", "ab", "ab"]
    assert rig.encoder.encoded == [["ab"], [book], ["ab"], ["ab"], ["ab"]]
    texts = ["ab"] * 6 + [book] * 3 + ["ab"] * 4
    for each, text in zip([*sibling_uids(uid, 11), *single], texts, strict=True):
        entry, event = rig.last(each)
        assert entry.id == TOKENIZED_ID and event.token_ids == tuple(map(ord, text))


def scored(prompt: str, num_choices: int = 1, num_top: int = 20) -> list[Submitted]:
    """Return the choices of one prompt. The first one has its scores."""
    first, *others = choices(num_choices, prompt)
    sampling = first.sampling.model_copy(update={"prompt_logprobs": num_top})
    shown = Presentation(choices=num_choices, prompt_scores=True)
    return [
        each.model_copy(update={"presentation": shown})
        for each in (first.model_copy(update={"sampling": sampling}), *others)
    ]


def test_the_scores_of_the_prompts_of_a_body_are_counted_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.scored, "MOST_SCORES", 21 * 3 * 2 + 21 * 4)
    fits, too_many, alone = new_uid(), new_uid(), new_uid()
    rig.log.submit(fits, [*scored("abc", 2), *scored("abcd")])
    rig.log.submit(too_many, [*scored("abc", 2), *scored("abcde"), *scored("a")])
    rig.log.submit(alone, scored("abcde", 3))
    for _ in range(8):
        entries = rig.log.read(rig.inbox, "tokenize-0", max_entries=2, block_ms=0)
        rig.worker.handle(entries)
        rig.worker.handle(entries)  # as after a read that broke: what is counted is counted once
    told = [rig.last(uid)[1] for uid in sibling_uids(fits, 3) + sibling_uids(too_many, 4)]
    assert [event.kind for event in told] == ["tokenized"] * 5 + ["failed"] * 2
    assert {(event.status, event.code, event.param) for event in told[5:]} == {
        (400, "too_many_scores", "prompt_logprobs")
    }
    assert [rig.last(uid)[1].kind for uid in sibling_uids(alone, 3)] == ["failed", "tokenized", "tokenized"]
    assert "315" in rig.last(f"{alone}.0")[1].message, "5 tokens with 20 others each, in 3 answers"
    assert rig.encoder.rendered.count("abc") == 4, "in both reads of both bodies, once for two choices"
    assert len(rig.worker._told) <= stages.tokenize.worker.BODIES_COUNTED


def test_each_choice_of_a_prompt_that_cannot_be_encoded_fails(rig: Rig) -> None:
    uid = new_uid()
    rig.log.submit(uid, [*choices(3, "poison"), *choices(2, "fine")])
    rig.handle()
    kinds = [rig.last(each)[1].kind for each in sibling_uids(uid, 5)]
    assert kinds == ["failed"] * 3 + ["tokenized"] * 2


def test_each_request_of_a_batch_goes_on_with_its_tokens(rig: Rig) -> None:
    uids = rig.submit("ab", "c")
    rig.handle()
    for uid, letters in zip(uids, ("ab", "c"), strict=True):
        entry, event = rig.last(uid)
        assert entry.id == TOKENIZED_ID
        assert event == Tokenized(
            ms=event.ms, token_ids=tuple(map(ord, letters)), fingerprint="letters", by="tokenize-0"
        )
    assert rig.log.backlog(rig.inbox) == 0 and rig.log.backlog(Inbox.tokenized(rig.log.names)) == 2
    rig.submit("def")
    rig.handle()
    assert rig.counted() == (3, 2 + 1 + 3, 3, 2)


@pytest.mark.parametrize(
    ("task", "fields", "code", "words"),
    [
        ("generate", {"prompt": "refused"}, "template_error", "roles must alternate"),
        ("generate", {"prompt": "explodes"}, "tokenizer_error", "in the template"),
        ("generate", {"prompt": "poison"}, "tokenizer_error", "cannot be encoded"),
        ("generate", {"prompt": "panics at once"}, "tokenizer_error", "out of bounds"),
        ("generate", {"prompt": "panics"}, "tokenizer_error", "char boundary"),
        ("generate", {"prompt": "x" * CONTEXT}, "context_length_exceeded", "16 tokens"),
        ("generate", {"prompt": "   "}, "invalid_value", "no tokens"),
        ("tokenize", {"prompt": "refused"}, "template_error", "roles must alternate"),
        ("tokenize", {"prompt": "explodes"}, "tokenizer_error", "in the template"),
        ("tokenize", {"prompt": "poison"}, "tokenizer_error", "cannot be encoded"),
        ("tokenize", {"prompt": "a book"}, "request_too_large", "a book"),
        ("tokenize", {"prompt": "?", "return_pieces": True}, "tokenizer_error", "no piece"),
        ("detokenize", {"prompt_ids": (0,)}, "invalid_value", "token 0 is none"),
        ("detokenize", {"prompt_ids": (1,)}, "tokenizer_error", "char boundary"),
    ],
    ids=str,
)
def test_a_bad_request_fails_alone(rig: Rig, task: Task, fields: dict[str, Any], code: str, words: str) -> None:
    before, bad, task_after, after = (
        rig.ask(prompt="ab"),
        rig.ask(task, **fields),
        rig.ask("tokenize", prompt="cd"),
        rig.ask(prompt="x" * (CONTEXT - 1)),  # leaves room for one token
    )
    rig.handle()
    entry, event = rig.last(bad)
    assert entry.id == SEAL and isinstance(event, Failed) and words in event.message
    assert (event.status, event.code) == (413 if code == "request_too_large" else 400, code)
    assert [rig.last(uid)[0].id for uid in (before, after)] == [TOKENIZED_ID, TOKENIZED_ID]
    assert isinstance(rig.last(task_after)[1], Answered) and rig.log.backlog(rig.inbox) == 0
    assert rig.counted() == (2, 2 + CONTEXT - 1, 2, 1) and count_of(rig.measures, REFUSALS, code) == 1


@pytest.mark.parametrize(("prompt", "error"), [("interrupted", KeyboardInterrupt), ("exits", SystemExit)])
def test_what_ends_the_process_ends_no_request(rig: Rig, prompt: str, error: type[BaseException]) -> None:
    rig.submit(prompt)
    with pytest.raises(error):
        rig.handle()
    assert rig.log.backlog(rig.inbox) == 1


def test_what_was_cancelled_meanwhile_goes_nowhere_and_is_not_even_rendered(rig: Rig) -> None:
    uids = [rig.ask(prompt="ab"), rig.ask("tokenize", prompt="ef")]
    rig.submit("cd")
    for uid in uids:
        rig.log.end(uid, Cancelled(by="client"), frontend="web-0")
    rig.handle()
    for uid in uids:
        entry, event = rig.last(uid)
        assert entry.id == SEAL and event == Cancelled(by="client", ms=event.ms)
    assert rig.encoder.rendered == ["cd"]
    assert rig.log.backlog(rig.inbox) == 0 and rig.log.backlog(Inbox.tokenized(rig.log.names)) == 1
    assert rig.counted() == (1, 2, 1, 1) and count_of(rig.measures, REFUSALS, "ended") == 0


def test_an_entry_without_a_history_is_consumed(rig: Rig) -> None:
    rig.worker.handle([Entry("1-1", {"uid": new_uid(), "frontend": "web-0"})])
    assert rig.log.backlog(rig.inbox) == 0


# what the client asked for its prompt


@pytest.mark.parametrize(
    ("truncate", "side", "max_tokens", "kept"),
    [
        (None, "left", None, "abcdef"),
        (3, "left", None, "def"),
        (-1, "left", 12, "cdef"),
        (-1, "left", None, "abcdef"),
        (-1, "left", 1000, "abcdef"),
        (9, "left", None, "abcdef"),
        (2, "right", None, "ab"),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept_or_the_first_where_the_end_is_to_go(
    rig: Rig, truncate: int | None, side: str, max_tokens: int | None, kept: str
) -> None:
    uid = rig.ask(
        prompt="abcdef",
        truncate_prompt_tokens=truncate,
        truncation_side=side,
        limit="max_tokens" if max_tokens == 12 else "",
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    rig.handle()
    assert rig.last(uid)[1].token_ids == tuple(map(ord, kept))


def test_a_limit_that_does_not_fit_beside_the_prompt_is_refused_by_the_clients_name_of_it(rig: Rig) -> None:
    most = SamplingParams(max_tokens=CONTEXT - 3)
    uids = [
        rig.ask(prompt="abc", limit="n_predict", sampling=most),
        rig.ask(prompt="abcd", limit="n_predict", sampling=most),
        rig.ask(prompt="abcd", sampling=most),
        rig.ask(prompt="abcd", limit="n_predict", sampling=most, truncate_prompt_tokens=3),
    ]
    rig.handle()
    fits, refused, unlimited, cut = (rig.last(uid)[1] for uid in uids)
    assert all(isinstance(event, Tokenized) for event in (fits, unlimited, cut))
    assert isinstance(refused, Failed) and (refused.code, refused.param) == ("context_length_exceeded", "n_predict")


def test_a_prompt_that_is_too_long_goes_through_where_it_is_cut(rig: Rig) -> None:
    long, cut, too_little = "x" * 99, "cannot fit", "x" * 50
    uids = [
        rig.ask(prompt=long, truncate_prompt_tokens=CONTEXT - 1),
        rig.ask(prompt=cut, truncate_prompt_tokens=3),
        rig.ask(prompt=too_little, truncate_prompt_tokens=CONTEXT),
        rig.ask(prompt=cut),
        rig.ask(prompt="a book", truncate_prompt_tokens=3),
        rig.ask(
            prompt="ab", limit="max_tokens", truncate_prompt_tokens=-1, sampling=SamplingParams(max_tokens=CONTEXT)
        ),
    ]
    rig.handle()
    ends = [rig.last(uid)[1] for uid in uids]
    assert [len(end.token_ids) for end in ends[:2]] == [CONTEXT - 1, 3]
    assert [(end.status, end.code, end.param) for end in ends[2:]] == [
        (400, "context_length_exceeded", "prompt"),
        (400, "context_length_exceeded", "prompt"),
        (413, "request_too_large", "prompt"),
        (400, "context_length_exceeded", "max_tokens"),
    ]


def test_bad_words_go_on_as_tokens(rig: Rig) -> None:
    uid = rig.ask(prompt="ab", sampling=SamplingParams(bad_words=("cd", "e")))
    rig.handle()
    assert rig.last(uid)[1].bad_words == (tuple(map(ord, "cd")), (ord("e"),))


# what is for the tokenizer alone


def test_tasks_of_the_tokenizer_are_answered_and_reach_no_engine(rig: Rig) -> None:
    start = rig.log.open_replies("web-0")
    long = "x" * (CONTEXT + 5)  # no context is a bound here
    expected: dict[str, dict[str, Any]] = {
        rig.ask("tokenize", prompt=long): {"token_ids": (ord("x"),) * len(long)},
        rig.ask("tokenize", prompt="ab", return_pieces=True): {"token_ids": (97, 98), "pieces": ("a", "b")},
        rig.ask("tokenize", prompt=""): {},
        rig.ask("tokenize", prompt="abc", truncate_prompt_tokens=2): {"token_ids": (98, 99)},
        rig.ask("detokenize", prompt_ids=(104, 105)): {"text": "hi"},
        rig.ask("detokenize"): {"text": ""},
        rig.ask("describe"): {"text": '{"letters":true}'},
    }
    rig.handle()
    for uid, fields in expected.items():
        entry, event = rig.last(uid)
        assert entry.id == SEAL and event == Answered(by="tokenize-0", ms=event.ms, **fields)
    assert rig.log.backlog(rig.inbox) == rig.log.backlog(Inbox.tokenized(rig.log.names)) == 0
    assert rig.log.alive(list(expected)) == set()
    _, replies = rig.log.read_replies("web-0", start, block_ms=0)
    assert sorted(reply.uid for reply in replies) == sorted(expected)


def test_an_answer_of_very_many_tokens_is_refused_with_their_number(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.tokenize.worker, "MOST_ANSWERED", 3)
    three, four = rig.ask("tokenize", prompt="abc"), rig.ask("tokenize", prompt="abcd")
    rig.handle()
    assert len(event.token_ids if isinstance(event := rig.last(three)[1], Answered) else ()) == 3
    _, failed = rig.last(four)
    assert isinstance(failed, Failed) and (failed.status, failed.code, failed.param) == (
        413,
        "request_too_large",
        "prompt",
    )
    assert "4 tokens" in failed.message and "at most 3" in failed.message


def test_what_is_long_waits_for_what_is_brief_and_a_client_that_left_meanwhile_costs_nothing(rig: Rig) -> None:
    longs = [str(number) + "x" * LONG_TEXT for number in range(3)]
    uids = [rig.ask("tokenize", prompt=long) for long in longs]
    put_off = rig.worker.handle(rig.log.read(rig.inbox, "tokenize-0", max_entries=100, block_ms=10))
    assert [entry.fields["uid"] for entry in put_off] == uids[1:]
    rig.log.end(uids[1], Cancelled(by="client"), frontend="web-0")
    (brief,) = rig.submit("ab")
    new = rig.log.read(rig.inbox, "tokenize-0", max_entries=100, block_ms=10)
    assert rig.worker.handle([put_off[1], *new]) == []
    rig.handle(put_off[:1])
    assert rig.encoder.encoded == [[longs[0]], ["ab"], [longs[2]]]
    assert rig.last(brief)[0].id == TOKENIZED_ID and rig.log.backlog(rig.inbox) == 0


def test_what_is_long_comes_after_what_is_brief_in_one_read(rig: Rig) -> None:
    long, book = "x" * (LONG_TEXT + 1), "y" * (LONG_TEXT + 2)
    rig.ask("tokenize", prompt=long)
    rig.submit("ab")
    rig.ask(prompt=book, truncate_prompt_tokens=2)
    rig.ask("tokenize", prompt="cd")
    rig.handle()
    assert rig.encoder.encoded == [["ab", "cd"], [long], [book]]


def test_short_lists_of_token_ids_are_decoded_in_one_turn_and_long_ones_each_in_one(rig: Rig) -> None:
    short = [rig.ask("detokenize", prompt_ids=(104, 105)) for _ in range(3)]
    long = [rig.ask("detokenize", prompt_ids=(104,) * (BRIEF_TOKENS + 1)) for _ in range(2)]
    put_off = rig.worker.handle(rig.log.read(rig.inbox, "tokenize-0", max_entries=100, block_ms=10))
    assert [entry.fields["uid"] for entry in put_off] == long[1:]
    assert all(isinstance(rig.last(uid)[1], Answered) for uid in (*short, long[0]))


# what takes too long


@pytest.mark.parametrize(
    ("task", "fields", "deaths"),
    [
        ("generate", {"prompt": "slow template"}, 1),
        ("generate", {"prompt": "slow text"}, 2),  # first in a batch, whose other texts may be as slow
        ("generate", {"prompt": "slow text" + "x" * LONG_TEXT, "truncate_prompt_tokens": 2}, 1),
        ("tokenize", {"prompt": "slow text" + "x" * LONG_TEXT}, 1),
        ("tokenize", {"prompt": "~", "return_pieces": True}, 1),
        ("detokenize", {"prompt_ids": (2,)}, 1),
    ],
    ids=["template", "brief", "long", "to be counted", "pieces", "tokens"],
)
def test_a_request_that_takes_too_long_fails_alone_and_its_tokenizer_is_replaced(
    rig: Rig, task: Task, fields: dict[str, Any], deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,), slow, told, (after,) = (
        rig.submit("ab"),
        rig.ask(task, **fields),
        rig.ask("tokenize", prompt="cd"),
        rig.submit("ef"),
    )
    start = rig.log.open_replies("web-0")
    assert rig.handle_with_one_tokenizer_after_the_other(monkeypatch) == deaths
    entry, event = rig.last(slow)
    assert entry.id == SEAL and isinstance(event, Failed)
    assert (event.status, event.code) == (400, "tokenizer_timeout") and "2.5 s" in event.message
    assert [rig.last(uid)[0].id for uid in (before, after)] == [TOKENIZED_ID, TOKENIZED_ID]
    assert isinstance(rig.last(told)[1], Answered)
    assert slow in [reply.uid for reply in rig.log.read_replies("web-0", start, block_ms=0)[1]]
    assert rig.log.backlog(rig.inbox) == 0 and rig.log.dead_letters(9) == []


def test_a_batch_that_is_slow_only_together_fails_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    uids = rig.submit("ab", "cd")
    encode = rig.encoder.encode

    def slow_together(prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        if len(prompts) > 1:
            rig.encoder.too_slow()
        return encode(prompts)

    monkeypatch.setattr(rig.encoder, "encode", slow_together)
    assert rig.handle_with_one_tokenizer_after_the_other(monkeypatch) == 1
    assert [rig.last(uid)[0].id for uid in uids] == [TOKENIZED_ID, TOKENIZED_ID]


def test_a_request_that_killed_its_tokenizers_fails_and_is_kept_among_the_dead(rig: Rig) -> None:
    poison, other = rig.submit("ab", "cd")
    first, _ = entries = rig.log.read(rig.inbox, "tokenize-0", max_entries=2, block_ms=10)
    rig.worker.bury(first, 4)
    entry, event = rig.last(poison)
    assert entry.id == SEAL and isinstance(event, Failed) and (event.status, event.code) == (500, "poisonous")
    assert "4 times" in event.message
    (letter,) = rig.log.dead_letters(9)
    assert [letter.fields[name] for name in ("uid", "stage", "deaths")] == [poison, "tokenize", "4"]
    assert rig.log.pending(rig.inbox, "tokenize-0") == [entries[1]] and rig.log.alive([poison, other]) == {other}
    assert rig.encoder.rendered == []
    assert count_of(rig.measures, BURIED) == count_of(rig.measures, REFUSALS, "poisonous") == 1


def test_an_entry_that_killed_its_tokenizers_and_names_no_request_is_buried(rig: Rig) -> None:
    put(rig.log, rig.inbox.stream, {"uid": "a"})
    (entry,) = rig.log.read(rig.inbox, "tokenize-0", max_entries=9, block_ms=10)
    rig.worker.bury(entry, 4)
    assert rig.log.backlog(rig.inbox) == 0 and [letter.fields["deaths"] for letter in rig.log.dead_letters(9)] == ["0"]
    assert (count_of(rig.measures, BURIED), count_of(rig.measures, UNREADABLE_ENTRIES, "submitted")) == (0, 1)


# Grammars


def bound(text: str) -> Constraint:
    return Constraint(kind="regex", text=text, param="regex")


def test_requests_without_a_grammar_do_not_wait_for_a_check(rig: Rig) -> None:
    first, second = rig.ask(prompt="a", constraint=bound("1")), rig.ask(prompt="b", constraint=bound("2"))
    plain = rig.submit("c", "d")
    rig.handle()
    plain += rig.submit("e")
    rig.handle()
    assert [type(rig.last(uid)[1]) for uid in (first, second, *plain)] == [Submitted] * 2 + [Tokenized] * 3
    assert rig.checker.begun == ["1"] and len(rig.worker.held()) == 2 and set(rig.checker.waits) == {0}
    rig.worker.handle([])
    assert rig.checker.waits[-1] == CHECK_LOOK_S, "a turn without entries waits a moment"
    rig.checker.finish()
    rig.worker.handle([])
    assert rig.last(first)[1].grammar == "grammar of 1" and rig.last(first)[1].grammar_param == "regex"
    assert rig.checker.begun == ["1", "2"]
    rig.checker.finish(RequestError("It is a bomb.", code="grammar_too_complex", param="regex"))
    rig.worker.handle([])
    end = rig.last(second)[1]
    assert isinstance(end, Failed) and (end.status, end.code, end.param) == (400, "grammar_too_complex", "regex")
    assert not rig.worker.held() and rig.log.pending(rig.inbox, "tokenize-0") == []
    known = rig.ask(prompt="f", constraint=bound("1"))
    rig.handle()
    assert rig.last(known)[1].grammar == "grammar of 1", "it was checked before"


def test_of_the_choices_of_a_prompt_the_grammar_is_checked_once(rig: Rig) -> None:
    events = [one.model_copy(update={"constraint": bound("1")}) for one in choices(6, "a")]
    uids = sibling_uids(new_uid(), 6)
    rig.log.submit(uids[0].partition(".")[0], events)
    rig.handle()
    rig.checker.finish()
    for _ in range(3):
        rig.worker.handle([])
    assert [rig.last(uid)[1].grammar for uid in uids] == ["grammar of 1"] * 6
    assert rig.checker.begun == ["1"] and rig.encoder.encoded == [["a"]]


def test_as_many_requests_wait_for_checks_as_may(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.tokenize.worker, "MOST_HELD", 2)
    uids = [rig.ask(prompt="a", constraint=bound(f"{number}")) for number in range(3)]
    rig.handle()
    assert len(rig.worker.held()) == 2 and [type(rig.last(uid)[1]) for uid in uids[:2]] == [Submitted, Submitted]
    end = rig.last(uids[2])[1]
    assert isinstance(end, Failed) and (end.status, end.code) == (503, "queue_full")
    assert "2 requests" in end.message


def test_what_waits_for_a_check_is_done_again_by_the_next_tokenizer(rig: Rig) -> None:
    uids = [rig.ask(prompt="a", constraint=bound(text)) for text in "12"]
    rig.handle()
    rig.worker.forget()
    assert not rig.worker.held()
    rig.handle(rig.log.pending(rig.inbox, "tokenize-0"))
    for _ in uids:
        rig.checker.finish()
        rig.worker.handle([])
    assert [rig.last(uid)[1].grammar for uid in uids] == ["grammar of 1", "grammar of 2"]


def test_a_request_that_was_cancelled_while_it_waited_is_not_checked(rig: Rig) -> None:
    uids = [rig.ask(prompt="a", constraint=bound(text)) for text in "12"]
    rig.handle()
    rig.log.end(uids[1], Cancelled(by="client"), frontend="web-0")
    rig.checker.finish()
    rig.worker.handle([])
    assert rig.checker.begun == ["1"] and rig.log.pending(rig.inbox, "tokenize-0") == [] and not rig.worker.held()
