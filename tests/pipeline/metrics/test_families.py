"""The families that are measured: their names, their buckets, and that vLLM's are among them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.metrics import families
from pipeline.metrics.families import FAMILIES, Family, layout
from pipeline.names import ARCHIVE, STAGES

VLLM_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
VLLM_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FAST_STEP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075)


def test_every_family_that_is_declared_is_shown_and_names_are_given_once() -> None:
    declared = [value for value in vars(families).values() if isinstance(value, Family)]
    assert list(FAMILIES) == declared
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) > 40


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_declared_as_prometheus_wants_it(family: Family) -> None:
    assert family.help.endswith(".")
    assert set(family.stages) <= {*STAGES, ARCHIVE}
    if family.kind == "counter":
        assert family.name.endswith("_total")
    if family.kind == "histogram":
        assert len(family.buckets) > 5 and all(isinstance(bound, float) for bound in family.buckets)
        assert list(family.buckets) == sorted(set(family.buckets))
    else:
        assert family.buckets == ()
    assert not family.known or len(family.labels) == 1


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        (families.FIRST_TOKEN_SECONDS, VLLM_FIRST_TOKEN_S),
        (families.BETWEEN_TOKENS_SECONDS, (*FAST_STEP_S, *VLLM_TOKEN_S)),
        (families.PER_TOKEN_SECONDS, (*FAST_STEP_S, *VLLM_TOKEN_S)),
        (families.STEP_SECONDS, FAST_STEP_S),
        (families.REQUEST_SECONDS, VLLM_REQUEST_S),
        (families.QUEUE_SECONDS, VLLM_REQUEST_S),
        (families.PREFILL_SECONDS, VLLM_REQUEST_S),
        (families.DECODE_SECONDS, VLLM_REQUEST_S),
        (families.INFERENCE_SECONDS, VLLM_REQUEST_S),
        (families.STEP_TOKENS, VLLM_STEP_TOKENS),
        (families.PARAMS_N, (1, 2, 5, 10, 20)),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else "",
)
def test_a_histogram_has_all_bounds_of_vllm_and_those_of_fast_steps(family: Family, bounds: Sequence[float]) -> None:
    assert set(bounds) <= set(family.buckets)


def test_the_layout_changes_with_the_buckets_alone() -> None:
    def layout_of(help_text: str, *buckets: float) -> int:
        return layout((Family("a_total", "counter", help_text), Family("b", "histogram", help_text, buckets=buckets)))

    assert layout_of("Steps.", 1.0, 2.0) == layout_of("Passes.", 1.0, 2.0) != layout_of("Steps.", 1.0, 3.0)
