"""What an engine needs to know from the history of a request. A pure fold: no log, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.events import Admitted, Submitted, TakenOver, Tokenized, TokensProduced
from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.serving import Serving
from pipeline.walk import NOT_COMPUTED, walk
from stages.generate.loop.flights import MOST_STEPS
from stages.generate.loop.outbox import FEWEST_HANDED_OVER, MOST_HANDED_OVER
from stages.generate.schedule.request import NewRequest
from stages.generate.setup.config import MOST_DRAFTS

MOST_AT_ONCE = max(MOST_STEPS, 1 + MOST_DRAFTS)
"""Most tokens that one call of the engine makes for a request."""
TOKENS_IN_DOUBT = max(MOST_HANDED_OVER, FEWEST_HANDED_OVER * (1 + MOST_DRAFTS)) + MOST_AT_ONCE
"""Number of tokens after which a successor has certainly come further than the engine that died. That engine may have
computed steps that are not in the log: the queued ones, and those of one call before the one in which it died. With
overlap these are fewer.
"""
MOST_DEATHS_ALONE = 3
"""Number of deaths alone after which a request fails for good: the engine computed nothing else."""


@dataclass(frozen=True, slots=True)
class Past:
    """Facts in the history of a request for the engine that continues it."""

    request: NewRequest
    had_begun: bool
    """Whether an engine has computed it before."""
    num_taken_over: int
    """Number of engines that took it over and died before they had made TOKENS_IN_DOUBT tokens of it."""
    num_alone: int
    """Number of these engines that computed nothing else."""
    served_by: Serving
    """Tokenizer of its prompt, and the weights that computed it so far."""

    @property
    def is_poisonous(self) -> bool:
        """Whether the request must fail: it killed too many engines alone."""
        return self.num_alone >= MOST_DEATHS_ALONE

    @property
    def num_deaths(self) -> int:
        """Number of engines that died of it: those that took it over, and the first one."""
        return self.num_taken_over + 1


def past_of(uid: str, history: Sequence[Entry]) -> Past | None:
    """Fold a history; return None when the request has ended or its history is gone.

    Raises:
        UndecodableEvent: An event does not decode, or tokens are missing between two events.
    """
    if not history or history[-1].id == SEAL:
        return None
    submitted: Submitted | None = None
    tokenized: Tokenized | None = None
    output: list[int] = []
    had_begun = False
    weights = ""
    takeovers: list[tuple[int, bool]] = []
    for _, n, event, _ in walk(history, without=NOT_COMPUTED):
        match event:
            case Submitted():
                submitted = event
            case Tokenized():
                tokenized = event
            case TokensProduced():
                output += event.tokens
            case TakenOver():
                had_begun = True
                takeovers.append((n, event.alone))
            case Admitted():
                had_begun = True
                if event.numerics:  # else an older version wrote it, with a fingerprint of weights and dtype
                    weights = event.fingerprint
    if submitted is None or tokenized is None:
        return None
    request = _request(uid, submitted, tokenized, output)
    in_vain = [alone for n, alone in takeovers if len(output) - n < TOKENS_IN_DOUBT]
    served_by = Serving(weights=weights, tokenizer=tokenized.fingerprint)
    return Past(request, had_begun, len(in_vain), sum(in_vain), served_by)


def recorded_request(uid: str, history: Sequence[Entry]) -> NewRequest | None:
    """Return the request of a history with all its output, ended or not; None: the history has no prompt.

    Raises:
        UndecodableEvent: An event does not decode.
    """
    submitted: Submitted | None = None
    tokenized: Tokenized | None = None
    output: list[int] = []
    for _, _, event, _ in walk(history, without=NOT_COMPUTED):
        match event:
            case Submitted():
                submitted = event
            case Tokenized():
                tokenized = event
            case TokensProduced():
                output += event.tokens
    return None if submitted is None or tokenized is None else _request(uid, submitted, tokenized, output)


def _request(uid: str, submitted: Submitted, tokenized: Tokenized, output: Sequence[int]) -> NewRequest:
    return NewRequest(
        uid,
        tokenized.token_ids,
        tuple(output),
        submitted.sampling,
        priority=submitted.priority,
        bad_words=tokenized.bad_words,
        grammar=tokenized.grammar,
        grammar_param=tokenized.grammar_param,
        prediction=tokenized.prediction,
        reads_cache=submitted.replay is None or submitted.replay.cached,
        owner=submitted.turn,
        weight=submitted.weight,
        overtakes=submitted.overtakes,
    )
