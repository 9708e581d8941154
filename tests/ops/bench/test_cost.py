"""`minisgl bench cost`: pairs are compared, and a real server is measured with something and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import minisgl
from ops.bench.cost import CASES, Half, table
from ops.bench.models import nonsense


def test_pairs_are_compared_and_not_the_medians_of_all() -> None:
    factors = ((100, 1.5), (200, 1.1), (400, 1.2))
    pairs = [(Half(cpu, 10.0, 100.0), Half(cpu * factor, 12.0, 50.0)) for cpu, factor in factors]
    cpu, rate, beside = (line.split() for line in table(pairs).splitlines()[1:4])
    assert cpu[-4:] == ["1.200", "1.100", "to", "1.500"] and rate[-4:] == ["0.500", "0.500", "to", "0.500"]
    assert beside[-4:] == ["+1.00%", "+1.00%", "to", "+1.00%"]


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("of", CASES)
def test_a_server_is_measured_with_it_and_without_it(of: str, tmp_path: Path) -> None:
    flags = ["--model", str(nonsense(tmp_path)), "--pairs", "1", "--requests", "2", "--tokens", "40"]
    output = str(tmp_path / "out.json")
    assert minisgl.main(["bench", "cost", "--of", of, *flags, "--output", output]) == 0
    (pair,) = json.loads(Path(output).read_text())["pairs"]
    for half in pair.values():
        assert 0 < half["beside_us"] < half["cpu_us"] and half["tokens_per_s"] > 0
