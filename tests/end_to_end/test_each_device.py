"""A server on each device, with random weights: every one of many clients at once gets its whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.servers import serve

from ops.bench.models import SHAPES, Shape, write_all_but_weights

pytestmark = [pytest.mark.slow]

SMALL = Shape(64, 2, 4, 2, 64, 192, 2000, 10_000.0, 1024)


@pytest.mark.parametrize(
    ("flags", "shape", "num_clients"),
    [
        pytest.param(("--device", "cpu"), SMALL, 8, marks=pytest.mark.night, id="cpu"),
        pytest.param(("--device", "cuda"), SHAPES["0.6b"], 128, marks=pytest.mark.gpu, id="cuda"),
        pytest.param(
            ("--device", "cuda", "--gpu-new", "yes"), SHAPES["0.6b"], 128, marks=pytest.mark.gpu, id="cuda-new"
        ),
    ],
)
def test_each_of_many_clients_gets_its_whole_answer(
    flags: Sequence[str], shape: Shape, num_clients: int, tmp_path: Path
) -> None:
    (model := tmp_path / "model").mkdir()
    write_all_but_weights(shape, model)
    with serve(tmp_path, "--model", str(model), "--dummy-weight", *flags) as server:

        def num_answered(number: int) -> int:
            asked = {
                "prompt": [(7 * number + 3 * place) % shape.vocab_size for place in range(5 + number)],
                "max_tokens": 20 + number,
                "ignore_eos": True,
                "temperature": number % 2,
            }
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120).raise_for_status()
            return int(answer.json()["usage"]["completion_tokens"])

        with ThreadPoolExecutor(num_clients) as clients:
            answered = list(clients.map(num_answered, range(num_clients)))
    assert answered == [20 + number for number in range(num_clients)]
