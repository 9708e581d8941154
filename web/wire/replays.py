"""The body of POST /v1/requests/<uid>/replay."""

from __future__ import annotations

from web.wire import fields
from web.wire.openai.strict import Strict, parsed


class ReplayRequest(Strict):
    """The body of POST /v1/requests/{name}/replay; it may be empty."""

    cached: bool = False
    """It may read pages of the prefix cache. Without, all of its prompt is computed."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """The first unknown fields, sorted."""
        return fields.first_of(self.extra)


def parse_replay(body: bytes) -> ReplayRequest:
    """Return what *body* asks for. Raises RequestError: the first thing that is wrong."""
    return parsed(ReplayRequest, body) if body else ReplayRequest()
