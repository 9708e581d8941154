"""The frames of a request as its page draws it: each says what an event changes in the story. Knows nothing of HTTP."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson

from pipeline.events import Failed, StepCompleted, Submitted, as_plain
from pipeline.views.history import Story
from pipeline.walk import PROMPT
from web.wire import sse
from web.wire.endpoints import CHAT_ENDPOINT
from web.wire.frames import ClientEvent, EventFrames
from web.wire.resend import ENDPOINTS, request_body


class StoryFrames(EventFrames):
    """The changes in the story, one frame for each event. The first one also has what was `asked`."""

    def __init__(self) -> None:
        super().__init__(ids=True)
        self._story = Story()

    def of(self, event: ClientEvent) -> bytes:
        """As Frames.of."""
        if not event.entry_id and isinstance(event.event, Failed):
            return super().of(event)
        assert not isinstance(event.event, StepCompleted)
        changes = self._story.add(event.entry_id, event.n, event.event)
        lists = {"moments": [*changes.moments.items()], "bars": [*changes.bars.items()], "tokens": changes.tokens}
        frame = changes.facts | {name: values for name, values in lists.items() if values}
        if isinstance(event.event, Submitted):
            frame["asked"] = asked_of(event.event)
        return sse.frame(orjson.dumps(frame), self.id_of(event))


def asked_of(event: Submitted) -> dict[str, Any]:
    """Return what was asked as plain data. `body`, as text, makes the same request again, seed included: a number in a
    browser would not hold it. If no body can be made, it is "" and the other fields say what was asked.
    """
    body = ""
    if event.endpoint in ENDPOINTS and not (event.endpoint == CHAT_ENDPOINT and event.prompt_ids):
        with contextlib.suppress(orjson.JSONDecodeError):  # an imported constraint may be invalid
            body = orjson.dumps(request_body([event]), option=orjson.OPT_INDENT_2).decode()
    sampling = event.sampling.model_dump(mode="json")
    plain = as_plain(event, without=PROMPT if body else ())
    return {
        "body": body,
        "sampling": {name: orjson.dumps(value).decode() for name, value in sampling.items() if value not in (None, [])},
        "replay_of": event.replay.of if event.replay is not None else "",
    } | {name: plain[name] for name in ("siblings", "constraint", *PROMPT) if name in plain}
