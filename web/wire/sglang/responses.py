"""The answers of /generate. SGLang's form: a body, or frames that each have all text so far. Mini-SGLang's form: frames
of plain new text. The frames are a fold of events: the same events always give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, Finished, Submitted, TokensProduced, ToldCandidate, ToldScore, ToldToken
from pipeline.names import sibling_uids
from web.wire import sse
from web.wire.frames import ClientEvent, Frames
from web.wire.openai.answers import Choice, choices_for
from web.wire.openai.errors import error_body, error_of
from web.wire.openai.logprobs import utf8
from web.wire.uids import index_of


class TextFrames(Frames):
    """Mini-SGLang's frames: their data is plain text. An error is an event named `error`, which no text can be."""

    def __init__(self) -> None:
        self._ended_in_return = False  # then a newline that begins the next text belongs to the same line break

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        match event.event:
            case TokensProduced(text=text) if text:
                rest = text.removeprefix("\n") if self._ended_in_return else text
                self._ended_in_return = text.endswith("\r")
                return sse.text_frames(rest, event.entry_id) if rest else b""
            case Failed() | Cancelled() as ended:
                return self.error(error_of(ended), event.entry_id)
            case _:
                return b""

    def error(self, error: RequestError, entry_id: str = "") -> bytes:
        """As Frames.error."""
        return sse.frame(error_body(error), entry_id, kind="error")


class WholeTextFrames(Frames):
    """SGLang's frames: each has the whole answer so far. They have no event ids, since clients take every line for a
    document. A frame with `completion_tokens` n follows from the event `n-0`.
    """

    waiting = sse.BLANK

    def __init__(self, uid: str, events: Sequence[Submitted]) -> None:
        """*uid* is that of the history; with several *events*, the one that siblings share."""
        choices = choices_for(uid, events)
        if len(events) == 1:
            choices[0].index = index_of(uid)
        self._answers = _answers(uid, events, choices)

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        answer = self._answers[event.index]
        match event.event:
            case TokensProduced() as tokens:
                answer.choice.apply(tokens)
                return b"" if answer.choice.shown.prompt_only else self._frame(answer)
            case Finished() as finished:
                answer.choice.finish(finished)
                return self._frame(answer)
            case Failed() | Cancelled() as ended:
                return self.error(error_of(ended))
            case _:
                return b""

    @staticmethod
    def _frame(answer: _Answer) -> bytes:
        place = {"index": answer.choice.index} if answer.choice.shown.in_list else {}
        return sse.frame(orjson.dumps(answer.told() | place))


def whole_body(uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> bytes:
    """Return the whole answer in SGLang's form, once all *choices* have ended."""
    told = [answer.told() for answer in _answers(uid, events, choices)]
    return orjson.dumps(told if events[0].presentation.in_list else told[0])


class _Answer:
    """One choice, in SGLang's form."""

    def __init__(self, uid: str, event: Submitted, choice: Choice) -> None:
        self.choice = choice
        self._uid = uid
        self._sampling = event.sampling
        self._of_prompt: dict[str, Any] = {}
        self._of_output: dict[str, Any] = {}
        self._num_scores = 0
        """How many of the output's scores `_of_output` has."""

    def told(self) -> dict[str, Any]:
        """Return the whole answer so far."""
        return {"text": self.choice.text, "output_ids": self.choice.token_ids, "meta_info": self._meta_info()}

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
        if self._sampling.logprobs is not None:
            meta |= self._logprobs()
        return meta

    def _finish_reason(self, num_tokens: int) -> dict[str, Any] | None:
        """Return why the answer ended, and at which length, stop string or token; None while it runs."""
        if self.choice.finished is None:
            return None
        if self.choice.reason == "length":
            return {"type": "length", "length": num_tokens}
        return {"type": "stop", "matched": self.choice.matched}

    def _logprobs(self) -> dict[str, Any]:
        """Return the fields with log-probabilities; those of the prompt are made once."""
        prompt = self.choice.prompt
        if not self._of_prompt and prompt is not None:
            tokens = [*([prompt.first] if prompt.first else ()), *prompt.scores][self.choice.shown.scores_from :]
            # SGLang's first one has no score, wherever it is: that would come from the token before.
            first = [ToldToken(token=token.token, text=token.text) for token in tokens[:1]]
            told = self._lists("input", [*first, *tokens[1:]])
            self._of_prompt = {name: orjson.Fragment(orjson.dumps(value)) for name, value in told.items()}
        for name, new in self._lists("output", self.choice.scores[self._num_scores :]).items():
            self._of_output.setdefault(name, []).extend(new)
        self._num_scores = len(self.choice.scores)
        return (self._of_prompt or self._lists("input", [])) | self._of_output

    def _lists(self, side: str, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """Return the lists of one *side*; those of the most probable tokens only if the client asked for them."""
        told: dict[str, Any] = {f"{side}_token_logprobs": [self._one(token) for token in tokens]}
        if self._sampling.logprobs:
            told[f"{side}_top_logprobs"] = [
                [self._one(other) for other in token.top] if isinstance(token, ToldScore) else None for token in tokens
            ]
        return told

    def _one(self, token: ToldToken) -> list[Any]:
        """Return log-probability, token id, and the text if the client asked for it."""
        text = bytes(utf8(token.text)).decode(errors="replace") if self.choice.shown.score_texts else None
        return [token.logprob if isinstance(token, ToldCandidate) else None, token.token, text]


def _answers(uid: str, events: Sequence[Submitted], choices: Sequence[Choice]) -> list[_Answer]:
    uids = sibling_uids(uid, len(events))
    return [_Answer(*each) for each in zip(uids, events, choices, strict=True)]
