"""Forecasts of rows from measurements so far."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_brain.memory import fit_growth

END = 1e6

TRUTHS: dict[str, Callable[[float], float]] = {
    "linear": lambda s: 5 * s,
    "linear with a base": lambda s: 1e6 + 2 * s,
    "Heaps": lambda s: 100 * s**0.6,
    "Heaps with a base": lambda s: 3e4 + 30 * s**0.7,
    "exponential": lambda s: -1e6 * np.expm1(-s / 4e5),
    "stretched exponential": lambda s: -1e6 * np.expm1(-((s / 4e5) ** 0.6)),
}


def measured(
    truth: Callable[[float], float], until: float, points: int = 40, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    samples = np.linspace(until / points, until, points)
    noise = 1 + 0.001 * np.random.default_rng(seed).standard_normal(points)
    return samples, np.array([truth(s) for s in samples]) * noise


@pytest.mark.parametrize("name", TRUTHS)
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.6])
def test_the_band_holds_the_truth_for_tables_of_every_kind(name: str, share: float) -> None:
    truth = TRUTHS[name]
    band = fit_growth(*measured(truth, share * END)).at(END)
    assert band.lower <= truth(END) <= band.upper
    assert band.expected == pytest.approx(truth(END), rel=0.12)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_band_narrows_as_the_job_goes_on(name: str) -> None:
    bands = [fit_growth(*measured(TRUTHS[name], share * END)).at(END) for share in (0.02, 0.2, 0.8)]
    widths = [band.upper - band.lower for band in bands]
    assert widths[2] < widths[0]
    assert widths[2] < 0.05 * TRUTHS[name](END)


@pytest.mark.parametrize(
    ("name", "law"), [("linear", "linear"), ("Heaps", "power law"), ("exponential", "exponential saturation")]
)
def test_the_law_is_recognized(name: str, law: str) -> None:
    assert fit_growth(*measured(TRUTHS[name], 0.5 * END)).law == law


@pytest.mark.parametrize("name", TRUTHS)
def test_the_time_at_which_a_limit_is_reached_is_within_its_band(name: str) -> None:
    truth = TRUTHS[name]
    band = fit_growth(*measured(truth, 0.2 * END)).reaches(truth(0.7 * END))
    assert band.lower <= 0.7 * END <= band.upper


@pytest.mark.parametrize("points", [1, 2, 5, 12])
def test_what_is_never_reached_by_the_end_is_not_reached_now(points: int) -> None:
    """Regression: growth laws that reach a value only in a billion years once brought its forecast near."""
    samples = np.linspace(1e5, 1e6, points) if points > 1 else np.array([1e6])
    growth = fit_growth(samples, 1e4 * (samples / 1e6) ** 0.4)
    most = growth.at(1e7).upper
    assert growth.reaches(1.5 * most).lower > 1e7
    assert growth.reaches(growth.last_value * 1.01).lower < 1e7


def test_a_table_that_saturates_is_not_forecast_along_its_first_slope() -> None:
    truth = TRUTHS["exponential"]
    growth = fit_growth(*measured(truth, 0.3 * END))
    linear = truth(0.3 * END) / 0.3
    assert growth.at(END).upper < 0.8 * linear
    assert growth.reaches(1.5e6).expected == np.inf


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 1e12)), min_size=1, max_size=60),
    st.floats(1, 1e13),
    st.floats(1, 1e13),
)
def test_forecasts_never_shrink_and_never_come_too_late(
    points: list[tuple[float, float]], samples: float, value: float
) -> None:
    growth = fit_growth(np.array([s for s, _ in points]), np.array([v for _, v in points]))
    now, then = growth.at(samples), growth.at(2 * samples)
    assert growth.last_value <= now.lower <= now.expected <= now.upper
    assert now.expected <= then.expected * (1 + 1e-9)
    reached = growth.reaches(value)
    assert growth.last_samples <= reached.lower <= reached.expected <= reached.upper


def test_the_unit_of_samples_and_rows_does_not_matter() -> None:
    samples, values = measured(TRUTHS["Heaps"], 0.2 * END)
    one, other = fit_growth(samples, values).at(END), fit_growth(samples * 1e3, values * 1e-2).at(END * 1e3)
    assert (other.expected, other.lower, other.upper) == pytest.approx(
        (one.expected * 1e-2, one.lower * 1e-2, one.upper * 1e-2)
    )


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        fit_growth(np.array([]), np.array([]))
