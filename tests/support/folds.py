"""What the tests of detokenizers have in common: a token is a character, and tokens above 200 are special."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.events import Admitted, EventRow, FinishReason, SamplingParams, Submitted, Tokenized, TokenRow
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from stages.detokenize.text import Decoder


def plain(token_ids: Sequence[int]) -> str:
    return special([token for token in token_ids if token < 200])


def special(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


DECODER = Decoder(plain, special, chr, frozenset(range(200, 256)))


def token_row(uid: str, n: int, letter: str = "x", end: FinishReason | None = None, chunks: int = 0) -> TokenRow:
    return TokenRow(uid=uid, n=n, token=ord(letter), end=end, chunks=chunks)


def drafted_rows(
    uid: str, n: int, letters: str, drafted: int, *, predicted: bool = False, end: FinishReason | None = None
) -> list[TokenRow]:
    """Return the rows of a step with so many drafts, of which all *letters* but the last were right."""
    rows = [token_row(uid, n + at, letter) for at, letter in enumerate(letters)]
    told = {"drafted": drafted, "accepted": len(letters) - 1, "predicted": predicted}
    rows[0] = rows[0].model_copy(update=told)
    rows[-1] = rows[-1].model_copy(update={"end": end})
    return rows


def admitted(uid: str, n: int = 0, cached: int = 0) -> EventRow:
    event = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f", cached_tokens=cached)
    return EventRow(uid=uid, n=n, event=event)


def prepared(log: RedisLog, engine: str = "generate-0") -> Inbox:
    """Make the groups of a log with one engine, and the replies of web-0; return the inbox of its steps."""
    steps = Inbox.steps(log.names, engine)
    for inbox in (Inbox.submitted(log.names), Inbox.tokenized(log.names), steps):
        log.prepare(inbox)
    log.open_replies("web-0")
    return steps


def bring(log: RedisLog, uid: str, prompt_ids: Sequence[int] = (1,), **sampling: object) -> None:
    """Bring a request of web-0 as far as the engines."""
    params = SamplingParams.model_validate(sampling)
    log.submit(uid, [Submitted(endpoint="chat", frontend="web-0", prompt="x", sampling=params)])
    (entry,) = log.read(Inbox.submitted(log.names), "tokenize-0", max_entries=1, block_ms=100)
    log.tokenized(entry, Tokenized(token_ids=tuple(prompt_ids), fingerprint="f", by="tokenize-0"))
