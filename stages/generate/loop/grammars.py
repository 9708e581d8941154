"""Grammars of requests: one thread compiles them beside the engine's loop, another follows the tokens.

Knows llguidance and the model's tokenizer. Only the grammar and the output decide what is allowed. So a request gets
the same tokens in any batch, after a takeover and in a replay. Limits count work (`pipeline.grammars`). The clock ends
only a compilation that is stuck before the first token.

Drafts are followed for their masks, and taken back. They change no mask and end no request: a matcher that gives up
after it has followed some begins again without.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from pipeline.events import Failed
from pipeline.grammars import brief, is_limit, parser_limits, start_with_stack
from pipeline.vocabulary import read_vocabulary
from stages.generate.loop.updates import Arrived
from stages.generate.schedule.plan import Words

if TYPE_CHECKING:  # it is imported in the thread that compiles, while the engine's loop begins
    from llguidance import LLMatcher, LLTokenizer

logger = structlog.get_logger()

MOST_KEPT: Final = 64
"""Number of compiled grammars that are kept for the next request with the same one."""
COMPILE_S: Final = 5.0
"""Time after which a compilation is stuck: the limits end others in a fraction of a second."""
SLOW_MASK_S: Final = 0.0003
"""If the last mask took longer, nothing is drafted: masks of drafts might take longer than the steps they save."""
FORCED_BYTES: Final = 256
"""Largest length of forced text that is cut into drafts."""
NewMatcher = Callable[[bool], "LLMatcher"]
"""Returns a matcher at the beginning of its grammar. If the argument is true it is a new one, else a copy that shares
what others computed."""


class GrammarMatcher:
    """Follows one output; a `Matcher` of the schedule. The thread that reads *followers* computes the masks."""

    def __init__(
        self,
        new: NewMatcher,
        vocab_size: int,
        output_ids: Sequence[int],
        followers: queue.SimpleQueue[_Follow | None],
        cut: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        """Take in *output_ids* and compute the first mask, in the calling thread. *cut*: cuts text into tokens."""
        self._new, self._vocab_size, self._followers, self._cut = new, vocab_size, followers, cut
        self._nothing = np.zeros(-(-vocab_size // 32), np.uint32)
        self._tokens: list[int] = []
        self._allowed: Words | None = None
        self._allowed_ahead: list[Words] = []
        """What may come after each of the drafts."""
        self._mask_s = 0.0
        """Time of the last mask."""
        self._last = threading.Lock()
        """A lock that is held until the last token, or the last drafts, are taken in."""
        self._error = ""
        self._matcher, self._is_fresh = new(False), False
        self._may_draft, self._has_drafted = True, False
        self.take_in(output_ids)

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self._error

    def advance(self, token: int) -> None:
        """See `Matcher`."""
        self._put((token,), are_drafts=False)

    def draft(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        """See `Matcher`."""
        with self._last:
            drafts, are_forced = self._drafts(proposed, most_forced)
        self._allowed_ahead = []
        if drafts:
            self._put(drafts, are_drafts=True)
        return drafts, are_forced

    def allowed(self, ahead: int = 0) -> Words | None:
        """See `Matcher`."""
        with self._last:
            if ahead == 0:
                return self._allowed
            return self._allowed_ahead[ahead - 1] if ahead <= len(self._allowed_ahead) else self._nothing

    def _put(self, tokens: Sequence[int], *, are_drafts: bool) -> None:
        self._last = threading.Lock()
        self._last.acquire()
        self._followers.put((self, tokens, are_drafts, self._last))

    def _drafts(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        if self._error or not self._may_draft or self._mask_s > SLOW_MASK_S or self._matcher.is_error():
            return [], False
        self._has_drafted = True  # even a look ahead takes up states
        try:
            return self._drafts_that_fit(proposed, most_forced)
        except BaseException:  # a panic in Rust is not an Exception
            self._may_draft = False
            return [], False

    def _drafts_that_fit(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        forced = self._matcher.compute_ff_bytes()[:FORCED_BYTES]
        text = forced.decode(errors="replace").partition("\ufffd")[0]  # a named token is no text
        drafts = self._cut(text)[:most_forced] if text else list(proposed)
        return drafts[: self._matcher.validate_tokens(drafts)] if drafts else [], bool(text)

    def follow_drafts(self, drafts: Sequence[int]) -> None:
        """Compute what may come after each of *drafts*. The matcher stays where it is."""
        allowed: list[Words] = []
        num_taken, matcher = 0, self._matcher
        try:
            while num_taken < len(drafts) and matcher.consume_tokens([drafts[num_taken]]):
                num_taken += 1
                allowed.append(np.frombuffer(matcher.compute_bitmask(), np.uint32))
            if matcher.is_error() or not matcher.rollback(num_taken):
                raise ValueError(matcher.get_error())
            self._allowed_ahead = allowed
        except BaseException:  # a panic in Rust is not an Exception
            with contextlib.suppress(BaseException):  # `take_in` will find that out
                self._begin_again(self._tokens)

    def _begin_again(self, tokens: Sequence[int]) -> bool:
        """Begin anew with states of its own, and without drafts from now on if they may have used up the old ones."""
        self._matcher, self._is_fresh = self._new(True), not self._has_drafted  # without drafts it would not begin now
        self._may_draft, self._has_drafted = self._may_draft and not self._has_drafted, False
        return self._is_computed(tokens)

    def take_in(self, token_ids: Sequence[int]) -> None:
        """Take in tokens and compute which may follow; set `error` if that fails.

        Copies of a matcher share the states of its lexer, and their number is limited. So before it gives up, the
        matcher begins again, once, with states of its own.
        """
        if self._error:
            return
        self._tokens += token_ids
        try:
            if self._is_computed(token_ids):
                return
            reason = self._matcher.get_error()  # the second attempt's is often that a token does not fit
            if (self._has_drafted or not self._is_fresh) and self._begin_again(self._tokens):
                return
            self._error = brief(reason) or "it is in no state to go on from"
        except BaseException as error:  # a panic in Rust is not an Exception, and this thread must go on
            self._error = brief(repr(error))
        self._allowed = None

    def _is_computed(self, token_ids: Sequence[int]) -> bool:
        matcher, began_s = self._matcher, time.perf_counter()
        if matcher.is_error() or (token_ids and not matcher.consume_tokens(list(token_ids))):
            return False
        self._allowed = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        assert 32 * len(self._allowed) >= self._vocab_size, "fewer bits than tokens"
        self._mask_s = time.perf_counter() - began_s
        return not matcher.is_error()


_Follow = tuple[GrammarMatcher, Sequence[int], bool, threading.Lock]
"""A matcher, the tokens that it takes in, whether they are drafts, and the lock that is released then."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request whose grammar is compiled."""

    arrived: Arrived
    began_s: float = 0.0


class Grammars:
    """The grammars of one engine. Its methods are for the engine's loop."""

    def __init__(self, folder: Path, eos_ids: Sequence[int], vocab_size: int, *, compile_s: float = COMPILE_S) -> None:
        """*folder*: the model's; the threads read its tokenizer when they start. *eos_ids*, *vocab_size*: the model's.

        *compile_s*: see COMPILE_S.
        """
        self._folder, self._eos_ids, self._vocab_size = folder, list(eos_ids), vocab_size
        self._compile_s = compile_s
        self._in_hand: dict[str, _Job] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[_Job, GrammarMatcher | Failed]] = queue.SimpleQueue()
        self._followers: queue.SimpleQueue[_Follow | None] = queue.SimpleQueue()
        self._compiler: threading.Thread | None = None
        """The thread that takes the next job."""
        self._current: _Job | None = None
        """Job that the compiler works on."""
        self._lock = threading.Lock()  # a compiler that was stuck may go on beside its successor
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        """Return how many requests wait for their grammars."""
        return len(self._in_hand)

    def __contains__(self, uid: str) -> bool:
        """Return whether the request *uid* waits for its grammar."""
        return uid in self._in_hand

    def started(self) -> Grammars:
        """Start the threads, so that the first grammar does not wait for the tokenizer's file."""
        if self._compiler is None:
            start_with_stack(threading.Thread(target=self._follow_all, name="masks", daemon=True))
            self._start_compiler()
        return self

    def begin(self, arrived: Arrived) -> None:
        """Queue a request for the compiler, which also takes in its output."""
        job = _Job(arrived)
        self._in_hand[arrived.request.uid] = job
        self._jobs.put(job)
        self.started()

    def drop(self, uid: str) -> bool:
        """Forget a request that ended elsewhere; return whether it waited here."""
        return self._in_hand.pop(uid, None) is not None

    def ready(self) -> list[tuple[Arrived, GrammarMatcher | Failed]]:
        """Return the requests that need not wait any longer, each with its matcher or its failure."""
        found: list[tuple[Arrived, GrammarMatcher | Failed]] = []
        while True:
            try:
                job, result = self._found.get_nowait()
            except queue.Empty:
                break
            found += self._taken_out(job, result)
        stuck = self._current
        if stuck is not None and time.monotonic() - stuck.began_s > self._compile_s:
            logger.error("grammar_stuck", uid=stuck.arrived.request.uid, limit_s=self._compile_s)
            self._start_compiler()
            if not stuck.arrived.request.output_ids:
                reason = f"its compilation takes more than {self._compile_s:g} s"
                found += self._taken_out(stuck, _too_complex(reason, stuck.arrived.request.grammar_param))
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until a request is ready, at most *timeout_s*."""
        try:
            found = self._found.get(timeout=timeout_s)
        except queue.Empty:
            return
        self._found.put(found)

    def close(self) -> None:
        """End the threads. A stuck one goes on."""
        self._jobs.put(None)
        self._followers.put(None)

    def _taken_out(self, job: _Job, result: GrammarMatcher | Failed) -> list[tuple[Arrived, GrammarMatcher | Failed]]:
        uid = job.arrived.request.uid
        if self._in_hand.get(uid) is not job:
            return []
        del self._in_hand[uid]
        return [(job.arrived, result)]

    def _start_compiler(self) -> None:
        """Start a new thread that compiles. A stuck one ends after its job."""
        self._current = None
        self._compiler = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
        start_with_stack(self._compiler)

    def _compile_all(self) -> None:
        try:
            if self._eos_ids:
                self._vocabulary()
        except Exception as error:  # each request with a grammar tries again, and fails with this error
            logger.warning("tokenizer_not_read", error=repr(error))
        while threading.current_thread() is self._compiler:
            job = self._jobs.get()
            if job is None:
                return
            if self._in_hand.get(job.arrived.request.uid) is not job:
                continue
            job.began_s = time.monotonic()
            self._current = job
            result = self._compiled(job.arrived)
            if threading.current_thread() is self._compiler:
                self._current = None
            self._found.put((job, result))

    def _follow_all(self) -> None:
        while (follow := self._followers.get()) is not None:
            matcher, tokens, are_drafts, taken_in = follow
            (matcher.follow_drafts if are_drafts else matcher.take_in)(tokens)
            taken_in.release()

    def _compiled(self, arrived: Arrived) -> GrammarMatcher | Failed:
        request = arrived.request
        if not self._eos_ids:
            message = (
                "This model has no end-of-sequence token, so no grammar can end its answer; leave the grammar out."
            )
            return Failed(status=400, code="unsupported_parameter", message=message, param=request.grammar_param)
        try:
            first = self._new(request.grammar, is_fresh=False)
            if first.is_error():
                return refusal(brief(first.get_error()), request.grammar_param)

            def new(is_fresh: bool) -> LLMatcher:
                return self._new(request.grammar, is_fresh=is_fresh)

            cut = self._vocabulary().greedy_tokenize
            matcher = GrammarMatcher(new, self._vocab_size, request.output_ids, self._followers, cut)
        except BaseException as error:  # a panic in Rust is not an Exception, and this thread must go on
            logger.exception("grammar_not_compiled", uid=request.uid)
            return Failed(status=500, code="engine_error", message=f"The grammar could not be compiled: {error!r}")
        return refusal(matcher.error, request.grammar_param) if matcher.error else matcher

    def _new(self, grammar: str, *, is_fresh: bool) -> LLMatcher:
        with self._lock:
            kept = self._kept.pop(grammar, None)
        if kept is None or is_fresh:
            from llguidance import LLMatcher

            kept = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=parser_limits())
            kept.compute_bitmask()  # the first mask has a higher limit of its own
            if is_fresh:
                return kept
        with self._lock:
            self._kept[grammar] = kept
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return kept.deep_copy()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                # Reading tokenizer.json itself would take four times as long and block all other threads.
                spelled = _Spelled.of(self._folder, self._eos_ids[0], self._vocab_size)
                self._tokenizer = LLTokenizer(spelled, None, self._eos_ids)  # type: ignore[arg-type]
            return self._tokenizer


@dataclass(frozen=True, slots=True)
class _Spelled:
    """The bytes of each token as they are in answers, in llguidance's format (`TokenizerWrapper`)."""

    tokens: list[bytes]
    eos_token_id: int
    special_token_ids: list[int]
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    @classmethod
    def of(cls, folder: Path, eos_id: int, vocab_size: int) -> _Spelled:
        """Read the tokenizer of a model folder. It may have fewer tokens than the model, or more."""
        vocabulary = read_vocabulary(folder)
        pieces, added = vocabulary.pieces, vocabulary.added
        tokens = [b""] * max(vocab_size, 1 + max((*pieces.values(), *added.ids.values())))
        for piece, token in pieces.items():
            tokens[token] = vocabulary.spelling.bytes_of(piece)
        for content, token in added.ids.items():
            tokens[token] = b"\xff" + content.encode()  # not valid text: a grammar must name the token
        return cls(tokens, eos_id, sorted(added.special))

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("the model chooses all tokens (no_forcing)")


def refusal(reason: str, param: str = "") -> Failed:
    """Return the failure of a request whose grammar llguidance cannot follow; *param*: its field."""
    if is_limit(reason):
        return _too_complex(reason, param)
    told = "no token can come next" if "NoExtension" in reason else reason
    message = f"The grammar of the answer cannot be followed with this model's tokens: {told}"
    return Failed(status=400, code="invalid_grammar", message=message, param=param)


def _too_complex(reason: str, param: str) -> Failed:
    message = f"The grammar of the answer is too complex: {reason}; ask for less repetition, depth or choice."
    return Failed(status=400, code="grammar_too_complex", message=message, param=param)
