"""The numbers that an event may hold: those that every reader can show. One beyond them does not decode."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

MOST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, in ms since 1970. A later moment has no date."""
MOST_COUNT: Final = 2**53 - 1
"""The largest number that JavaScript reads as it is."""
Moment = Annotated[int, Field(ge=0, le=MOST_MS)]
Span = Annotated[int, Field(ge=-MOST_MS, le=MOST_MS)]
"""Milliseconds between two moments. It is negative where a clock was set back."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
NumberOfId = Annotated[int, Field(ge=0, lt=2**64)]
"""Any that the id of a stream's entry can have: a commit reads it off a history, whatever somebody wrote there."""
