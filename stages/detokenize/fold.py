"""The fold of the stage: StepCompleted -> events for the histories and the clients. No clock, no Redis.

Remembers the text state of every running request. `unknown` returns the requests that the fold does not know, or that a
step does not follow; the worker reads their histories and passes them to `learn`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    EventRow,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    PromptInfo,
    Score,
    Scores,
    StepCompleted,
    Submitted,
    Timings,
    Tokenized,
    TokenRow,
    TokensProduced,
    TokenText,
    TopLogprob,
    Usage,
)
from pipeline.log.protocol import Produced
from pipeline.markup import Markup
from pipeline.names import SEAL, parse_id, tokens_id
from pipeline.walk import Moment
from stages.detokenize.text import Decoder, IncrementalText, StopAutomaton, StopStrings

AUTOMATONS_KEPT = 32
"""Number of sets of stop strings whose automatons are kept for other requests with the same set."""


@dataclass(slots=True)
class _Request:
    """State of a running request."""

    submitted: Submitted
    frontend: str
    min_tokens: int
    """This and `frontend` are in `submitted`, too, where finding them takes long for each token."""
    prompt_tokens: int
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, until the first token's event has what the client asks of its prompt; else empty."""
    markup: Markup | None
    """Markup of its text, if there is any; the first token's event has it."""
    text: IncrementalText
    stops: StopStrings
    stop_tokens: Mapping[int, str]
    """Stop strings that are special tokens, which have no text."""
    n: int
    marks: int
    """The k of the last event at n."""
    admitted_ms: int
    first_token_ms: int
    cached_tokens: int
    is_predicted: bool
    """Whether its client predicts the answer."""
    num_predicted: int = 0
    """Number of drafts from the client's prediction .."""
    num_accepted: int = 0
    """.. and of those that were right."""
    missing: list[range] = field(default_factory=list)
    """Numbers of tokens that are missing in its history."""

    def take(self, token: int, *, ends: bool = False) -> tuple[str, bool]:
        """Count *token*; return the text that can be shown, and whether a stop string was met.

        A token that *ends* the request, end-of-sequence or one of `stop_token_ids`, is counted but is no text, unless
        the client wants it: not all of these are special tokens, which have no text anyway.
        """
        self.n += 1
        self.marks = 0
        if ends and not self.submitted.sampling.include_stop_str_in_output:
            return "", False
        armed = self.n >= self.min_tokens
        if armed and token in self.stop_tokens:
            return self.stops.end(self.text.flush(), self.stop_tokens[token]), True
        return self.stops.push(self.text.push(token), armed=armed)

    def count_drafts(self, event: TokensProduced) -> None:
        """Count the drafts from the client's prediction."""
        if event.predicted:
            self.num_predicted += event.drafted
            self.num_accepted += event.accepted

    def tail(self) -> str:
        """Return the text that is held back, at the end of the request."""
        shown, met = self.stops.push(self.text.flush())
        return shown if met else shown + self.stops.flush()


class DetokenizeFold:
    """The requests of one engine."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._special = {decoder.piece(token): token for token in decoder.special_ids}
        self._automaton_of = functools.lru_cache(AUTOMATONS_KEPT)(StopAutomaton)
        # None: the request has ended, and the engine does not know yet. The engine's last row removes the entry.
        self._requests: dict[str, _Request | None] = {}

    @property
    def num_known(self) -> int:
        """Number of requests that are remembered."""
        return len(self._requests)

    def unknown(self, step: StepCompleted) -> list[str]:
        """Return the uids whose histories must be learnt before *step* can be folded."""
        found: dict[str, None] = {}
        before = ""
        for row in step.rows:
            if row.uid == before:
                continue  # with drafts a request may have several tokens
            before = row.uid if isinstance(row, TokenRow) else ""
            request = self._requests.get(row.uid)
            known = _follows(row, request) if request is not None else row.uid in self._requests
            if not known:
                found[row.uid] = None
        return list(found)

    def learn(self, uid: str, history: Iterable[Moment]) -> None:
        """Rebuild the state of a request from its history; an empty one has expired.

        Raises:
            UndecodableEvent: The history has no prompt.
        """
        request: _Request | None = None
        submitted: Submitted | None = None
        entry_id = SEAL
        for entry_id, _, event, missing in history:
            if missing and request is not None:
                request.missing.append(missing)
                request.n = missing[-1]
            match event:
                case Submitted():
                    submitted = event
                case Tokenized() if submitted is not None:
                    request = self._begin(submitted, event)
                case TokensProduced() if request is not None:
                    request.first_token_ms = request.first_token_ms or event.ms
                    for token in event.tokens:
                        request.take(token)
                    request.count_drafts(event)
                case Admitted() if request is not None and not request.admitted_ms:
                    request.admitted_ms, request.cached_tokens = event.ms, event.cached_tokens
                case _ if entry_id == SEAL:
                    request = None
            if request is not None:
                request.marks = parse_id(entry_id)[1]
        if request is None and entry_id != SEAL:
            raise UndecodableEvent(f"a history up to {entry_id} names no prompt")
        self._requests[uid] = request

    def apply(self, step: StepCompleted, step_id: str) -> list[Produced]:
        """Fold one step and return what follows from it, in the order of its rows."""
        produced: list[Produced] = []
        for at, row in enumerate(step.rows):
            request = self._requests.get(row.uid)
            if request is None:
                pass  # the request has ended
            elif request.missing or not _follows(row, request):
                produced.append(self._lost(request, row))
            elif isinstance(row, TokenRow) and row.n <= request.n:
                pass  # this row was folded before
            elif isinstance(row, TokenRow):
                rows = [row] if row.drafted is None else _tokens_of(row.uid, step.rows[at:])
                # How the tokens of a text with markup are cut into events must not change what is counted of it.
                together = rows if request.markup is None else rows[:1]
                produced += self._tokens(request, together, step, step_id)
            else:
                produced.append(self._mark(request, row, step))
            if _is_last(row):
                self._requests.pop(row.uid, None)
        for uid in step.released:
            self._requests.pop(uid, None)
        return produced

    def holds_text(self, step: StepCompleted) -> bool:
        """Return whether text of a request in *step* is held back, inside a character or a possible stop string."""
        requests = (self._requests.get(row.uid) for row in step.rows)
        return any(request is not None and (request.text.holds or request.stops.holds) for request in requests)

    def forget(self, step: StepCompleted) -> None:
        """Forget the requests of a step whose commit failed. It will be folded again, on their histories."""
        for row in step.rows:
            self._requests.pop(row.uid, None)

    def forget_all(self) -> None:
        """Forget every request: their engine is gone, and other engines may have continued them."""
        self._requests.clear()

    def _begin(self, submitted: Submitted, tokenized: Tokenized) -> _Request:
        sampling = submitted.sampling
        decode, stop_tokens = self._decoder.special, {}
        if sampling.skip_special_tokens:
            kept = tokenized.markup.tokens
            decode = self._decoder.keeping(kept) if kept else self._decoder.plain
            named = {text: self._special[text] for text in sampling.stop if text in self._special}
            stop_tokens = {token: text for text, token in named.items() if token not in kept}
        tells_prompt = submitted.presentation.tells_prompt or sampling.prompt_logprobs is not None
        return _Request(
            submitted=submitted if tells_prompt else submitted.model_copy(update={"prompt": "", "prompt_ids": ()}),
            frontend=submitted.frontend,
            min_tokens=sampling.min_tokens,
            prompt_tokens=len(tokenized.token_ids),
            prompt_ids=tokenized.token_ids if tells_prompt else (),
            markup=None if tokenized.markup == Markup() else tokenized.markup,
            text=IncrementalText(decode, tokenized.token_ids, self._decoder.fixed),
            stops=StopStrings(self._automaton_of(sampling.stop), include=sampling.include_stop_str_in_output),
            stop_tokens=stop_tokens,
            n=0,
            marks=2,
            admitted_ms=0,
            first_token_ms=0,
            cached_tokens=0,
            is_predicted=bool(submitted.prediction),
        )

    def _tokens(self, request: _Request, rows: Sequence[TokenRow], step: StepCompleted, step_id: str) -> list[Produced]:
        """Fold tokens that a request has in one step, up to a stop string, into one event."""
        request.first_token_ms = request.first_token_ms or step.ms
        first, text, made, met_stop = rows[0], "", 0, False
        reason: FinishReason | None = None
        while reason is None and made < len(rows):
            row = rows[made]
            shown, met_stop = request.take(row.token, ends=row.end == "stop")
            reason = "stop" if met_stop else row.end
            text, made = text + shown, made + 1
        if reason is not None and not met_stop:
            text += request.tail()
        more: dict[str, Any] = {}  # pydantic checks defaults as slowly as other values, and most tokens have none
        if first.chunks:
            more["chunks"] = first.chunks
        if first.score is not None:
            more["scores"] = tuple(self._told(row.token, row.score) for row in rows[:made] if row.score is not None)
        if request.prompt_ids:
            more["prompt"] = self._prompt_info(request, first.prompt_scores or Scores())
            request.prompt_ids = ()
        if first.n == 1 and request.markup is not None:
            more["markup"] = request.markup
        if first.drafted is not None:
            accepted = min(first.accepted or 0, made) if reason is not None else first.accepted or 0
            more |= {"drafted": first.drafted, "accepted": accepted, "predicted": bool(first.predicted)}
        if made > 1:
            more["count"] = made
        taken = (first.token,) if made == 1 else tuple([row.token for row in rows[:made]])
        tokens = TokensProduced(tokens=taken, text=text, step=step_id, **more)
        request.count_drafts(tokens)
        frontend = request.frontend
        produced = [Produced(row.uid, tokens_id(row.n), row.n, tokens, frontend)]
        if reason is not None:
            # Only this stage finds stop strings: the engine goes on until `control` ends the request.
            end = _finished(request, reason, step.ms, stop_string=request.stops.met if met_stop else "")
            produced.append(Produced(row.uid, SEAL, row.n, end, frontend, tell_engine=rows[-1].end is None))
            self._requests[row.uid] = None
        return produced

    def _prompt_info(self, request: _Request, scores: Scores) -> PromptInfo:
        """Return what the client asked to know about its prompt."""
        submitted, ids = request.submitted, request.prompt_ids
        shown = submitted.presentation
        unscored = submitted.sampling.prompt_logprobs is None
        text = ""
        if shown.echo:
            skips = submitted.sampling.skip_special_tokens and not submitted.prompt_ids
            decode = self._decoder.plain if skips else self._decoder.special
            is_whole = submitted.prompt and submitted.truncate_prompt_tokens is None
            text = submitted.prompt if is_whole else decode(ids)
        return PromptInfo(
            num_tokens=len(ids),
            cached_tokens=request.cached_tokens,
            token_ids=ids if shown.token_ids else (),
            text=text,
            scores=scores.with_texts(ids[1:], self._decoder.piece),
            first=None if unscored else TokenText(token=ids[0], text=self._decoder.piece(ids[0])),
        )

    def _told(self, token: int, score: Score) -> Logprob:
        piece = self._decoder.piece
        top = tuple(TopLogprob(token=other, text=piece(other), logprob=logprob) for other, logprob in score.top)
        return Logprob(token=token, text=piece(token), logprob=score.logprob, top=top)

    def _lost(self, request: _Request, row: TokenRow | EventRow) -> Produced:
        """End a request whose history lacks tokens even after it was read: text must not go on over a hole."""
        last = row.n - 1 if isinstance(row, TokenRow) else row.n
        holes = [hole for hole in (*request.missing, range(request.n + 1, last + 1)) if hole]
        counts = [hole.stop - hole.start for hole in holes]  # `len` fails if an id is very large
        pairs = zip(holes, counts, strict=True)
        numbers = ", ".join(f"{hole[0]} to {hole[-1]}" if count > 1 else f"{hole[0]}" for hole, count in pairs)
        word = "token" if sum(counts) == 1 else "tokens"
        message = f"The log lost {word} {numbers} of this request; send it again."
        event = Failed(n=request.n, status=500, code="log_lost", message=message)
        self._requests[row.uid] = None
        return Produced(row.uid, SEAL, request.n, event, request.frontend, tell_engine=True)

    def _mark(self, request: _Request, row: EventRow, step: StepCompleted) -> Produced:
        frontend = request.frontend
        if isinstance(row.event, Failed):
            self._requests[row.uid] = None
            return Produced(row.uid, SEAL, row.n, row.event.model_copy(update={"n": row.n}), frontend)
        if isinstance(row.event, Admitted) and not request.admitted_ms:
            # A step is committed, and its mark with it, once it is computed: the prompt's first chunk is no waiting.
            request.admitted_ms = min(step.made_ms or step.ms, step.ms) - int(step.figures.forward_ms)
            request.cached_tokens = row.event.cached_tokens
        request.marks += 1
        return Produced(row.uid, f"{row.n}-{request.marks}", row.n, row.event, frontend)


def _tokens_of(uid: str, rows: Sequence[TokenRow | EventRow]) -> list[TokenRow]:
    """Return the first of *rows*, as long as they are tokens of one request."""
    return [row for row in takewhile(lambda row: row.uid == uid, rows) if isinstance(row, TokenRow)]


def _follows(row: TokenRow | EventRow, request: _Request) -> bool:
    return row.n <= request.n + 1


def _is_last(row: TokenRow | EventRow) -> bool:
    return row.end is not None if isinstance(row, TokenRow) else isinstance(row.event, Failed)


def _finished(request: _Request, reason: FinishReason, now_ms: int, *, stop_string: str) -> Finished:
    began_ms = request.submitted.ms
    return Finished(
        n=request.n,
        reason=reason,
        stop_string=stop_string,
        usage=Usage(
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.n,
            cached_tokens=request.cached_tokens,
            accepted_prediction_tokens=request.num_accepted if request.is_predicted else None,
            rejected_prediction_tokens=request.num_predicted - request.num_accepted if request.is_predicted else None,
        ),
        timings=Timings(
            admitted_ms=request.admitted_ms - began_ms,
            first_token_ms=request.first_token_ms - began_ms,
            total_ms=now_ms - began_ms,
        ),
    )
