"""One call of `LLM.generate`: submits requests, waits for their ends, and turns histories into completions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ops.offline.progress import Report
from ops.offline.prompts import OfflineRequest
from ops.offline.stages import Stages
from pipeline.errors import MiniSGLError
from pipeline.events import Cancelled, Failed, Finished, FinishReason, Submitted, Tokenized, TokensProduced, new_uid
from pipeline.log.protocol import Entry, Submission
from pipeline.walk import walk

ENDPOINT: Final = "offline"
REPORT_EVERY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Completion:
    """The output for one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """With the end-of-sequence token, which has no text."""
    text: str
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens from the prefix cache."""


class GenerationFailed(MiniSGLError):
    """Some prompts failed; the others are complete."""

    def __init__(self, failures: Mapping[int, str], completions: Sequence[Completion | None]) -> None:
        self.failures = dict(failures)
        """Index of the prompt -> the error."""
        self.completions = list(completions)
        """In the order of the prompts; None for failed ones."""
        first = min(failures)
        others = f" ({len(failures)} of {len(completions)} prompts failed)" if len(failures) > 1 else ""
        super().__init__(f"prompts[{first}]: {failures[first]}{others}")


class Call:
    """The requests of one call: some wait here, some are in the log, some have ended.

    Only so many are in the log as keep the engine busy, so that what waits costs nothing there.
    """

    def __init__(self, stages: Stages, requests: Sequence[OfflineRequest]) -> None:
        self._stages = stages
        self._log = stages.log
        self._most_in_flight = 2 * stages.loaded.settings.limits.max_running_requests
        self._waiting = deque(enumerate(requests))
        self._running: dict[str, int] = {}
        """uid -> index of its prompt."""
        self._completions: list[Completion | None] = [None] * len(requests)
        self._failures: dict[int, str] = {}
        self._num_tokens = 0
        """How many tokens those have that have ended."""

    def run(self, report: Report) -> list[Completion]:
        """Return the completions in the order of the requests.

        Raises:
            GenerationFailed: Some failed; the others ran to their ends, unless it was the engine that ended.
        """
        try:
            while self._waiting or self._running:
                if self._stages.error is not None:
                    self._give_up(self._stages.error)
                self._submit()
                self._take(self._log.wait(self._running, REPORT_EVERY_S))
                num_tokens = self._num_tokens + self._log.num_tokens(self._running)
                report(len(self._completions) - len(self._running) - len(self._waiting), num_tokens)
        except BaseException:  # Ctrl-C too: what runs is let go, and the engine is free for the next call
            self._cancel()
            raise
        if self._failures:
            raise GenerationFailed(self._failures, self._completions)
        return [completion for completion in self._completions if completion is not None]

    def _submit(self) -> None:
        while self._waiting and len(self._running) < self._most_in_flight:
            index, request = self._waiting.popleft()
            uid = new_uid()
            self._running[uid] = index
            event = Submitted(
                endpoint=ENDPOINT,
                frontend="",
                prompt_ids=request.token_ids,
                sampling=request.sampling,
                constraint=request.constraint,
            )
            outcome = self._log.submit(uid, [event]).submission
            assert outcome is Submission.ACCEPTED, outcome

    def _take(self, ended: Sequence[str]) -> None:
        self._num_tokens += self._log.num_tokens(ended)
        for uid, history in zip(ended, self._log.histories(ended), strict=True):
            index = self._running.pop(uid)
            outcome = completion_of(history)
            if isinstance(outcome, Completion):
                self._completions[index] = outcome
            else:
                self._failures[index] = outcome
        self._log.forget(ended)

    def _give_up(self, error: BaseException) -> None:
        message = f"The engine has ended ({error!r}); make a new LLM"
        unfinished = [*self._running.values(), *(index for index, _ in self._waiting)]
        raise GenerationFailed(self._failures | dict.fromkeys(unfinished, message), self._completions) from error

    def _cancel(self) -> None:
        uids = list(self._running)
        for uid in uids:
            self._log.end(uid, Cancelled(by="caller"), frontend="")
        self._log.forget(uids)
        self._running.clear()


def completion_of(history: Sequence[Entry]) -> Completion | str:
    """Fold a sealed history; return the completion, or the error.

    Raises:
        UndecodableEvent: Tokens are missing.
    """
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = []
    texts: list[str] = []
    for _, _, event, _ in walk(history):
        match event:
            case Tokenized():
                prompt_token_ids = event.token_ids
            case TokensProduced():
                token_ids += event.tokens
                texts.append(event.text)
            case Finished():
                return Completion(
                    prompt_token_ids, tuple(token_ids), "".join(texts), event.reason, event.usage.cached_tokens
                )
            case Failed():
                return event.message
            case Cancelled():
                return f"it was cancelled by {event.by}"
            case _:
                pass
    return "its history is gone"
