"""`make attack`, `recovery` and `soak`: what cannot work is refused in one line, before a server starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chaos import recovery, soak
from chaos.attack import __main__ as attack
from chaos.measure import exit_code


@pytest.mark.parametrize(
    ("main", "flags", "says"),
    [
        (recovery.main, "--requests 0", "'0': must be a whole number of at least 1"),
        (recovery.main, "--peers 3", "'3': must be one of 1, 2"),
        (recovery.main, "--lease 0", "'0': must be a number of seconds above 0"),
        (recovery.main, "--model absent", "--model absent: no checkpoint"),
        (recovery.main, "--output absent/x.json", "--output absent/x.json: not a file in a folder that exists"),
        (soak.main, "--requests 1000", "--requests 1000 and --warmup 1000: no request is left after the warm-up"),
        (soak.main, "--output absent/x.json", "--output absent/x.json: not a file in a folder that exists"),
        (attack.main, "--seconds 0", "must be a number of seconds above 0"),
        (attack.main, "--health-ms no", "'no': must be a number above 0"),
        (attack.main, "--checkout /nowhere", "--checkout /nowhere: no minisgl.py there"),
        (attack.main, "--output absent/x.json", "--output absent/x.json: not a file in a folder that exists"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    main: Callable[..., int], flags: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, flags.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("minisgl: ") and printed.err.count("\n") == 1
    assert says in printed.err
