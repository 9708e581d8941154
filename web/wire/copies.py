"""The header `x-minisgl-copy-of`: a tool that sends a recorded request again names that request with it.

It becomes a label of the copy, which `minisgl replay forget` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pipeline.errors import RequestError
from web.wire.uids import uid_of

HEADER: Final = "x-minisgl-copy-of"
COPY_OF: Final = "copy_of"
"""The label: the uid of the request that was sent again; that of the body, if siblings were."""
SCHEMA: Final = {"description": "The uid of the request of which this one is a copy; minisgl replay forget follows it."}


def labels_of(copied: str | None) -> Mapping[str, Any]:
    """Return the label that the header *copied* makes; none without it.

    Raises:
        RequestError: The header is no uid.
    """
    if copied is None:
        return {}
    if uid_of(copied) != copied or not copied:
        raise RequestError(f"{HEADER}: should be the uid of a request", param=HEADER, code="invalid_value")
    return {COPY_OF: copied}
