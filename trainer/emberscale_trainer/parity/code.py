"""The erasure code: what holders keep of the rows of a stripe, and how up to two lost rows follow from it.

The bytes of rows are numbers of GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), whose generator is 2, as
in RAID 6. The first holder of a stripe keeps P, the XOR of its rows; the second one keeps Q, the XOR of 2^i times the
row at position i. All of it is linear: a change `old ^ new` of a row changes Q by the same multiple of itself.
"""

import numpy as np
from numpy.typing import NDArray

MOST_POSITIONS = 255
"""Rows of a stripe at most: the powers of 2 are different numbers up to there."""

_POLYNOMIAL = 0x11D


def _powers() -> NDArray[np.uint8]:
    powers, value = [], 1
    for _ in range(MOST_POSITIONS):
        powers.append(value)
        value = value << 1 if value < 0x80 else value << 1 ^ _POLYNOMIAL
    return np.array(powers, np.uint8)


_POWERS = _powers()
_LOGARITHMS = np.zeros(256, np.int64)
_LOGARITHMS[_POWERS] = np.arange(MOST_POSITIONS)


def _products() -> NDArray[np.uint8]:
    products = np.zeros((256, 256), np.uint8)
    exponents = _LOGARITHMS[1:, None] + _LOGARITHMS[None, 1:]
    products[1:, 1:] = _POWERS[exponents % MOST_POSITIONS]
    return products


PRODUCTS = _products()
"""uint8[256, 256]: the product of any two numbers."""


def coefficient(role: int, position: int) -> int:
    """Returns the factor of the row at a position in the parity that a stripe's holder of this role keeps, from 0."""
    return int(_POWERS[doublings(role, position) % MOST_POSITIONS])


def doublings(role: int, position: int) -> int:
    """Returns the exponent of 2 of which `coefficient` is the power."""
    return role * position


def inverse(number: int) -> int:
    """Returns what times the number is 1. Raises ZeroDivisionError for 0."""
    if not number:
        raise ZeroDivisionError("0 has no inverse")
    return int(_POWERS[-_LOGARITHMS[number] % MOST_POSITIONS])


def decode_one(q: NDArray[np.uint8], position: int) -> NDArray[np.uint8]:
    """Returns the row at a position, to which no other has added anything in `q`: uint8 of its shape."""
    row: NDArray[np.uint8] = PRODUCTS[inverse(coefficient(1, position))][q]
    return row


def decode_two(
    p: NDArray[np.uint8], q: NDArray[np.uint8], first: int, second: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the rows at two positions, the only ones in `p` and `q`: uint8 of their shape each."""
    one, other = coefficient(1, first), coefficient(1, second)
    found = PRODUCTS[inverse(one ^ other)][q ^ PRODUCTS[other][p]]
    return found, found ^ p
