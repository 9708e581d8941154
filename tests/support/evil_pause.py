"""As a script, it measures how long streams pause while evil grammars are compiled beside them.

    PYTHONPATH=tests:. .venv/bin/python tests/support/evil_pause.py [--rounds 3]

lets the demo model answer 8 streams, alone and beside the 20 grammars of `evil_grammars`, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import httpx
from support.evil_grammars import EVILS
from support.servers import Server, serve
from support.streams import Stream, begun, events_of

from pipeline.events import TokensProduced

NUM_TOKENS: Final = 3000
"""Of a stream: it must go on longer than all grammars take."""


def longest_pause_ms(server: Server, *, evil: bool) -> int:
    """Return the longest time between two tokens of a stream."""
    streams: list[Stream] = [each for _ in range(2) for each in begun(server, max_tokens=NUM_TOKENS)][:8]
    if evil:
        for kind, what in EVILS:
            body = {"prompt": "Do harm", "structured_outputs": {kind: what}, "max_tokens": 20}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    pauses = []
    with server.log() as log:
        for stream in streams:
            stream.join()
            moments = [event.ms for event in events_of(log, stream.uid) if isinstance(event, TokensProduced)]
            pauses.append(max(after - before for before, after in pairwise(moments)))
    return max(pauses)


def main() -> int:
    """Measure, and write a line for each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[bool, list[int]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="minisgl-evil-") as folder, serve(Path(folder)) as server:
        for _ in range(options.rounds):
            for evil, pauses in found.items():
                pauses.append(longest_pause_ms(server, evil=evil))
            sys.stdout.write(f"alone {found[False][-1]} ms  beside evil grammars {found[True][-1]} ms\n")
            sys.stdout.flush()
    sys.stdout.write(f"medians: {median(found[False])} and {median(found[True])} ms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
