"""P and Q: any two rows or parity blocks of a stripe can be lost."""

from itertools import combinations
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from emberscale_trainer.parity.code import (
    MOST_POSITIONS,
    PRODUCTS,
    coefficient,
    decode_one,
    decode_two,
    inverse,
)

NUMBERS = st.integers(0, 255)


def encoded(rows: NDArray[np.uint8], role: int) -> NDArray[np.uint8]:
    parity: NDArray[np.uint8] = np.zeros_like(rows[0])
    for position, row in enumerate(rows):
        parity = parity ^ PRODUCTS[coefficient(role, position)][row]
    return parity


def slow_product(one: int, other: int) -> int:
    """Multiplies by the definition: a product of polynomials, modulo 0x11d."""
    product = 0
    for bit in range(8):
        product ^= (one << bit) if other >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= (0x11D << (bit - 8)) if product >> bit & 1 else 0
    return product


def test_products_are_those_of_the_polynomial_of_raid_6() -> None:
    assert all(PRODUCTS[one, other] == slow_product(one, other) for one in range(256) for other in range(256))


@given(NUMBERS.filter(bool))
def test_a_number_times_its_inverse_is_one(number: int) -> None:
    assert PRODUCTS[number, inverse(number)] == 1


def test_zero_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_p_is_the_xor_and_q_tells_all_positions_apart() -> None:
    assert {coefficient(0, position) for position in range(MOST_POSITIONS)} == {1}
    assert len({coefficient(1, position) for position in range(MOST_POSITIONS)}) == MOST_POSITIONS
    assert [coefficient(1, position) for position in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 0x1D]


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.randoms(use_true_random=False))
def test_every_one_or_two_lost_rows_come_back(count: int, size: int, random: Random) -> None:
    rows = np.array([[random.randint(0, 255) for _ in range(size)] for _ in range(count)], np.uint8)
    p, q = encoded(rows, 0), encoded(rows, 1)
    for lost in range(count):
        rest = rows.copy()
        rest[lost] = 0
        assert np.array_equal(p ^ encoded(rest, 0), rows[lost])
        assert np.array_equal(decode_one(q ^ encoded(rest, 1), lost), rows[lost])
    for first, second in combinations(range(count), 2):
        rest = rows.copy()
        rest[[first, second]] = 0
        found = decode_two(p ^ encoded(rest, 0), q ^ encoded(rest, 1), first, second)
        assert np.array_equal(np.array(found), rows[[first, second]])


@given(NUMBERS, NUMBERS, NUMBERS)
def test_a_change_of_a_row_changes_parity_by_the_same_multiple(old: int, new: int, factor: int) -> None:
    assert PRODUCTS[factor, old] ^ PRODUCTS[factor, old ^ new] == PRODUCTS[factor, new]
