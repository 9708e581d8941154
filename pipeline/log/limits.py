"""What holds for every request of a process, and how much the log keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What holds for every request of a process. A log gets it when it is made."""

    timeout_s: float = 600.0
    """Time from submit to deadline."""
    retention_s: float = 900.0
    """Time for which an ended history is kept; `entries.kept_ms` has the exceptions."""
    max_queued: int = 1024
    """Most requests that wait, which no engine has taken; a submit beyond that is BUSY."""
    drops_ended: bool = True
    """Whether commits drop entries of `ended` that are older than the retention, because their histories are gone.
    Tools do not: they do not know the server's retention."""
    journal_bytes: int = 0
    """Most bytes of the journal of one engine; 0: none is written."""

    @property
    def timeout_ms(self) -> int:
        return int(self.timeout_s * 1000)

    @property
    def retention_ms(self) -> int:
        return int(self.retention_s * 1000)

    @property
    def ended_ms(self) -> int:
        """The age at which commits drop entries of `ended`; 0: at none."""
        return self.retention_ms if self.drops_ended else 0


DEFAULT_LIMITS: Final = RequestLimits()
