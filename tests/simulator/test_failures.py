import numpy as np
import pytest

from emberscale_simulator.mechanics import FailureLaw, gamma_shape
from eventually import unwrap

CPR_MEDIAN_HOURS = (8.0, 17.0)
CPR_MEAN_HOURS = (14.0, 30.0)


def cpr_shape() -> float:
    """Returns the shape of the gamma law that fits both ends of CPR's ranges."""
    quotients = [median / mean for median, mean in zip(CPR_MEDIAN_HOURS, CPR_MEAN_HOURS, strict=True)]
    return gamma_shape(sum(quotients) / len(quotients))


def test_the_fitted_law_reproduces_cprs_medians_from_its_means() -> None:
    random = np.random.default_rng(1)
    for mean, median in zip(CPR_MEAN_HOURS, CPR_MEDIAN_HOURS, strict=True):
        drawn = random.gamma(cpr_shape(), mean / cpr_shape(), 400_000)
        assert np.mean(drawn) == pytest.approx(mean, rel=0.01)
        assert np.median(drawn) == pytest.approx(median, rel=0.02)


def test_failures_crowd_at_the_beginning() -> None:
    assert cpr_shape() < 1


def test_a_law_without_solution_says_what_is_possible() -> None:
    with pytest.raises(ValueError, match=r"give 0\.05 to 0\.98"):
        gamma_shape(1.2)


def test_a_daily_rate_is_the_mean_of_the_law() -> None:
    law = unwrap(FailureLaw.of(0.015, 0.569))
    assert law.shape == pytest.approx(cpr_shape(), rel=0.01)
    random = np.random.default_rng(2)
    assert np.mean([law.draw(random) for _ in range(40_000)]) / 3600 == pytest.approx(1600, rel=0.02)
