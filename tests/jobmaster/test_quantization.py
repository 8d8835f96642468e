"""The bits of a weight in the next checkpoint, from the restores that a job had and those that it expects."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from emberscale_api.job import Quantization
from emberscale_jobmaster.quantization import RESTORES, expected_restores, weight_bits

AUTO = Quantization.AUTO
DAY = 86_400.0
COUNTS = st.dictionaries(st.sampled_from([2, 3, 4, 8]), st.integers(0, 120))
EXPECTED = st.floats(0, 1000)


@pytest.mark.parametrize(
    ("expected", "bits"), [(0.0, 2), (0.3, 2), (1.0, 2), (1.1, 3), (3.0, 3), (3.1, 4), (20.0, 4), (20.5, 8), (500.0, 8)]
)
def test_a_job_without_restores_gets_the_bits_of_the_paper(expected: float, bits: int) -> None:
    assert weight_bits(AUTO, {}, expected) == bits


@pytest.mark.parametrize(
    ("restores", "expected", "bits"),
    [
        ({2: 1}, 0.1, 8),  # there were as many as expected: one more would be too many
        ({3: 1}, 2.0, 3),
        ({3: 1}, 2.5, 4),
        ({3: 3}, 0.1, 8),
        ({4: 10}, 0.5, 3),
        ({4: 10}, 10.0, 4),
        ({4: 21}, 0.5, 8),
    ],
)
def test_restores_spend_what_later_ones_could(restores: dict[int, int], expected: float, bits: int) -> None:
    assert weight_bits(AUTO, restores, expected) == bits


@given(COUNTS, EXPECTED)
def test_fewer_than_8_bits_never_overspend_the_loss_that_is_allowed(restores: dict[int, int], expected: float) -> None:
    bits = weight_bits(AUTO, restores, expected)
    spent = sum(count / RESTORES[width] for width, count in restores.items())
    assert bits == 8 or spent + max(1.0, expected) / RESTORES[bits] <= 1 + 1e-6


@given(COUNTS, EXPECTED, EXPECTED)
def test_who_expects_more_restores_gets_no_fewer_bits(restores: dict[int, int], first: float, second: float) -> None:
    fewer, more = sorted([first, second])
    assert weight_bits(AUTO, restores, fewer) <= weight_bits(AUTO, restores, more)


@given(COUNTS, EXPECTED)
def test_a_manifest_that_names_the_bits_gets_them(restores: dict[int, int], expected: float) -> None:
    assert weight_bits(Quantization.NONE, restores, expected) == 0
    assert weight_bits(Quantization.BITS_3, restores, expected) == 3


def test_restores_are_expected_by_what_the_brain_says_and_else_by_the_share_of_pods_that_fail_a_day() -> None:
    assert expected_restores(2 * DAY, 4, DAY / 2) == pytest.approx(4)
    assert expected_restores(2 * DAY, 4, None) == pytest.approx(2 * 4 * 0.015)
