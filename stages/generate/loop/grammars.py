"""Grammars of requests: one thread compiles them beside the engine's loop, another follows the tokens.

Knows llguidance and the model's tokenizer. Only the grammar and the output decide what is allowed. So a request gets
the same tokens in any batch, after a takeover and in a replay. Limits count work (`pipeline.grammars`). The clock ends
only a compilation that is stuck before the first token.
"""

from __future__ import annotations

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
NewMatcher = Callable[[bool], "LLMatcher"]
"""Returns a matcher at the beginning of its grammar. If the argument is true it is a new one, else a copy that shares
what others computed."""


class GrammarMatcher:
    """Follows one output; a `Matcher` of the schedule. The thread that reads *followers* computes the masks."""

    def __init__(
        self, new: NewMatcher, vocab_size: int, output_ids: Sequence[int], followers: queue.SimpleQueue[_Follow | None]
    ) -> None:
        """Take in *output_ids* and compute the first mask, in the calling thread."""
        self._new, self._vocab_size, self._followers = new, vocab_size, followers
        self._tokens: list[int] = []
        self._allowed: Words | None = None
        self._last = threading.Lock()
        """A lock that is held until the last token is taken in."""
        self._error = ""
        self._matcher, self._is_fresh = new(False), False
        self.take_in(output_ids)

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self._error

    def advance(self, token: int) -> None:
        """See `Matcher`."""
        self._last = threading.Lock()
        self._last.acquire()
        self._followers.put((self, token, self._last))

    def allowed(self) -> Words | None:
        """See `Matcher`."""
        with self._last:
            return self._allowed

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
            if not self._is_fresh:
                self._matcher, self._is_fresh = self._new(True), True
                if self._is_computed(self._tokens):
                    return
            self._error = brief(reason) or "it is in no state to go on from"
        except BaseException as error:  # a panic in Rust is not an Exception, and this thread must go on
            self._error = brief(repr(error))
        self._allowed = None

    def _is_computed(self, token_ids: Sequence[int]) -> bool:
        matcher = self._matcher
        if matcher.is_error() or (token_ids and not matcher.consume_tokens(list(token_ids))):
            return False
        self._allowed = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        assert 32 * len(self._allowed) >= self._vocab_size, "fewer bits than tokens"
        return not matcher.is_error()


_Follow = tuple[GrammarMatcher, int, threading.Lock]
"""A matcher, the token that it takes in, and the lock that is released then."""


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
            matcher, token, taken_in = follow
            matcher.take_in([token])
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

            matcher = GrammarMatcher(new, self._vocab_size, request.output_ids, self._followers)
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
