"""Durations, sizes, rates, shares and counts in text for people: close to the figure, short, and in one form."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.job.units import memory_bytes, parse_duration
from emberscale_api.readable import bytes_text, count_text, duration_text, rate_text, share_text

SECONDS = st.floats(1e-3, 1e9)
SIZES = st.floats(0, 2**60)
RATES = st.floats(0, 1e12)


def bytes_of(text: str) -> float:
    number, unit = text.replace(",", "").split(" ")
    return float(number) * (1 if unit == "bytes" else memory_bytes(f"1{unit[:-1]}"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1e-9, "0s"),
        (3.6e-5, "0.036ms"),
        (0.052, "52ms"),
        (0.9996, "1s"),
        (1.75, "1.75s"),
        (15, "15s"),
        (59.96, "1m"),
        (100, "1m40s"),
        (600, "10m"),
        (3599.6, "1h"),
        (3723, "1h2m"),
        (12000, "3h20m"),
        (86_399, "1d"),
        (187_200, "2d4h"),
        (-1.5, "-1.5s"),
        (-1e-9, "0s"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_duration_has_three_digits_or_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(SECONDS)
def test_a_manifest_takes_a_duration_as_people_read_it(seconds: float) -> None:
    assert parse_duration(duration_text(seconds)) == pytest.approx(seconds, rel=0.021)


@given(SECONDS)
def test_a_duration_that_was_read_is_written_as_before(seconds: float) -> None:
    text = duration_text(seconds)
    assert duration_text(parse_duration(text)) == text


@given(st.integers(0, 3599))
def test_whole_seconds_below_an_hour_are_exact(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == seconds


@given(SECONDS, SECONDS)
def test_a_longer_duration_never_reads_as_a_shorter_one(one: float, other: float) -> None:
    shorter, longer = sorted((one, other))
    assert parse_duration(duration_text(shorter)) <= parse_duration(duration_text(longer)) + 1e-9


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (820, "820 bytes"),
        (1023.7, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1012 << 20, "1,012 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (5 << 40, "5 TiB"),
        (1 << 53, "8 PiB"),
        (float("inf"), "inf PiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_it_fills(size: float, text: str) -> None:
    assert bytes_text(size) == text


@given(SIZES)
def test_a_size_is_within_half_a_hundredth(size: float) -> None:
    assert bytes_of(bytes_text(size)) == pytest.approx(size, rel=5.01e-3, abs=0.5)


@given(SIZES, SIZES)
def test_a_larger_size_never_reads_as_a_smaller_one(one: float, other: float) -> None:
    smaller, larger = sorted((one, other))
    assert bytes_of(bytes_text(smaller)) <= bytes_of(bytes_text(larger))


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 samples/s"), (0.5128, "0.513 samples/s"), (99.96, "100 samples/s"), (10_234.4, "10,234 samples/s")],
)
def test_a_rate_has_three_digits_and_all_before_the_point(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def test_a_rate_names_what_it_counts() -> None:
    assert rate_text(1e6, "rows") == "1,000,000 rows/s"


@given(RATES)
def test_a_rate_is_within_half_a_hundredth_and_without_an_exponent(rate: float) -> None:
    number = rate_text(rate).removesuffix(" samples/s")
    assert re.fullmatch(r"[\d,]+(\.\d+)?", number)
    assert float(number.replace(",", "")) == pytest.approx(rate, rel=5.01e-3)


@pytest.mark.parametrize(("share", "text"), [(0, "0.00%"), (0.1234, "12.34%"), (1.23e-5, "0.0012%")])
def test_a_small_share_keeps_two_digits(share: float, text: str) -> None:
    assert share_text(share) == text


@pytest.mark.parametrize(
    ("number", "plural", "text"),
    [(1, "", "1 push"), (0, "pushes", "0 pushes"), (1_200, "pushes", "1,200 pushes")],
)
def test_a_count_has_its_noun_in_the_right_number(number: int, plural: str, text: str) -> None:
    assert count_text(number, "push", plural) == text
