"""What a history shows by itself, without a log or a model beside it: each token says what it was computed from.

So a history alone shows whether somebody wrote into it who should not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pipeline.events import Cancelled, Failed, Finished, Submitted, Tokenized, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, parse_id, tokens_id


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
