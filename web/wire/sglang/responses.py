"""The answers of /generate. SGLang's form: a body, or frames that each have all text so far. Mini-SGLang's form: frames
of plain new text. The frames are a fold of events: the same events always give the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, Submitted, TokensProduced
from pipeline.names import sibling_uids
from pipeline.scores import Pair, Row
from web.wire import sse
from web.wire.frames import ClientEvent, Frames
from web.wire.known import Known
from web.wire.openai.answers import Choice, InOrder, choices_for
from web.wire.openai.errors import error_body, error_of
from web.wire.openai.logprobs import prompt_rows, prompt_tokens, utf8
from web.wire.pieces import Slices, encoded, sliced
from web.wire.uids import index_of


class TextFrames(Frames):
    """Mini-SGLang's frames: their data is plain text. An error is an event named `error`, which no text can be."""

    def __init__(self, *, ids: bool, known: Known | None) -> None:
        super().__init__(ids=ids)
        self._known = known
        self._ended_in_return = False  # then a newline that begins the next text belongs to the same line break

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        match event.event:
            case TokensProduced(text=text) if text:
                rest = text.removeprefix("\n") if self._ended_in_return else text
                self._ended_in_return = text.endswith("\r")
                if self._known is not None:
                    rest = self._known.rest(sse.with_newlines(rest))
                return sse.text_frames(rest, self.id_of(event)) if rest else b""
            case Failed() | Cancelled() | Finished() as ended:
                if self._known is not None and event.entry_id:
                    self._known.end()
                return b"" if isinstance(ended, Finished) else self.error(error_of(ended), self.id_of(event))
            case _:
                return b""

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """As Frames.error."""
        return sse.frame(error_body(error), entry_id, kind="error")


class WholeTextFrames(Frames):
    """SGLang's frames: each has the whole answer so far.

    A frame with `completion_tokens` n follows from the event `n-0`.
    """

    def __init__(self, uid: str, events: Sequence[Submitted], *, ids: bool, known: Known | None) -> None:
        """*uid* is that of the history; with several *events*, the one that siblings share. Then there are no ids. The
        client of one history has the frames whose text is *known*.
        """
        super().__init__(ids=ids and len(events) == 1)
        choices = choices_for(uid, events)
        if len(events) == 1:
            choices[0].index = index_of(uid)
        self._answers = _answers(uid, events, choices)
        self._in_order = InOrder(choices)
        self._known = known
        self._has_scores = events[0].sampling.logprobs is not None

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        return b"".join(self.pieces(event))

    @property
    def are_long(self) -> bool:
        """As Frames.are_long: each has the scores of the prompt, and those of all tokens so far."""
        return self._has_scores

    def pieces(self, event: ClientEvent) -> Iterator[bytes]:
        """As Frames.pieces."""
        for each in self._in_order.ready(event):
            answer = self._answers[each.index]
            match each.event:
                case TokensProduced() as tokens:
                    text = answer.choice.apply(tokens).text
                    if not answer.choice.shown.prompt_only and self._is_news(text):
                        yield from self._frame(answer, self.id_of(each))
                case Finished() as finished:
                    answer.choice.finish(finished)
                    self._end()
                    yield from self._frame(answer, self.id_of(each))
                case Failed() | Cancelled() as ended:
                    if each.entry_id:
                        self._end()
                    yield self.error(error_of(ended), self.id_of(each))

    def _is_news(self, text: str) -> bool:
        """Return whether the client lacks the frame in which *text* is new."""
        if self._known is not None:
            self._known.rest(text)
        return self._known is None or self._known.are_over

    def _end(self) -> None:
        if self._known is not None:
            self._known.end()

    @staticmethod
    def _frame(answer: _Answer, entry_id: str) -> Iterator[bytes]:
        place = {"index": answer.choice.index} if answer.choice.shown.in_list else {}
        return sse.frame_pieces(encoded(answer.told(again=True) | place), entry_id)


def whole_body(uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> Iterator[bytes]:
    """Yield the whole answer in SGLang's form in pieces, once all *choices* have ended."""
    answers = (answer.told(again=False) for answer in _answers(uid, events, choices))
    yield from encoded(Slices([told] for told in answers) if events[0].presentation.in_list else next(answers))


class _Answer:
    """One choice, in SGLang's form."""

    def __init__(self, uid: str, event: Submitted, choice: Choice) -> None:
        self.choice = choice
        self._uid = uid
        self._sampling = event.sampling
        self._of_output: dict[str, list[bytes]] = {}
        """Name of a list -> its items as JSON."""
        self._num_scores = 0
        """Number of scores of the output that `_of_output` has."""

    def told(self, *, again: bool) -> dict[str, Any]:
        """Return the whole answer so far. *again*: it will be asked for again, so encoded items are kept."""
        meta = self._meta_info() | (self._logprobs(again=again) if self._sampling.logprobs is not None else {})
        return {"text": self.choice.text, "output_ids": sliced(self.choice.token_ids), "meta_info": meta}

    def _meta_info(self) -> dict[str, Any]:
        usage, finished = self.choice.usage(), self.choice.finished
        meta = {
            "id": self._uid,
            "finish_reason": self._finish_reason(usage["completion_tokens"]),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        if finished is not None:
            meta["e2e_latency"] = finished.timings.total_ms / 1000
        return meta

    def _finish_reason(self, num_tokens: int) -> dict[str, Any] | None:
        """Return why the answer ended, and at which length, stop string or token; None while it runs."""
        if self.choice.finished is None:
            return None
        if self.choice.reason == "length":
            return {"type": "length", "length": num_tokens}
        return {"type": "stop", "matched": self.choice.matched}

    def _logprobs(self, *, again: bool) -> dict[str, Any]:
        """Return the fields with log-probabilities. If told *again* and again, the output's are encoded once."""
        prompt, scores, start = self.choice.told_prompt, self.choice.scores, self._num_scores
        self._num_scores = len(scores)
        since = self.choice.shown.scores_from
        tokens: Iterator[Pair] = iter(()) if prompt is None else prompt_tokens(prompt, since)
        rows: Iterator[Row] = iter(()) if prompt is None else prompt_rows(prompt, since)
        # SGLang's first one has no score, wherever it is: that would come from the token before.
        first = [Pair(token.token, token.text, None) for token in itertools.islice(tokens, 1)]
        no_top: list[Row] = [(token, []) for token, _ in zip(first, rows, strict=False)]
        told: dict[str, Any] = self._lists("input", itertools.chain(first, tokens), itertools.chain(no_top, rows))
        of_output = self._lists("output", scores.tokens(start), scores.rows(start))
        told |= of_output
        for name, new in of_output.items() if again else ():
            made = self._of_output.setdefault(name, [])
            made += (orjson.dumps(items)[1:-1] for items in new.slices)
            told[name] = orjson.Fragment(b"[" + b",".join(made) + b"]")
        return told

    def _lists(self, side: str, tokens: Iterator[Pair], rows: Iterator[Row]) -> dict[str, Slices]:
        """Return the lists of one *side*; those of the most probable tokens only if the client asked for them."""
        lists = {f"{side}_token_logprobs": sliced(map(self._one, tokens))}
        if tops := self._sampling.logprobs:
            others = ([self._one(one) for one in top] if token.logprob is not None else None for token, top in rows)
            lists[f"{side}_top_logprobs"] = sliced(others, tops)
        return lists

    def _one(self, token: Pair) -> list[Any]:
        """Return log-probability, token id, and the text if the client asked for it."""
        text = bytes(utf8(token.text)).decode(errors="replace") if self.choice.shown.score_texts else None
        return [token.logprob, token.token, text]


def _answers(uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> list[_Answer]:
    uids = sibling_uids(uid, len(events))
    return [_Answer(*each) for each in zip(uids, events, choices, strict=True)]
