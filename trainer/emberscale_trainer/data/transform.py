"""From the values of columns to features: what dense ones go through, and what stands for missing ones."""

from typing import Any

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.compiled import kernel

LOG1P_TABLE = np.log1p(np.arange(1024, dtype=np.float64)).astype(np.float32)
"""log1p of the small integers, as all readers round them."""


@kernel
def _is_null(validity: npt.NDArray[np.uint8], place: int) -> bool:
    return not (validity[place >> 3] >> (place & 7)) & 1


@kernel
def fill_dense(
    values: npt.NDArray[Any],
    validity: npt.NDArray[np.uint8],
    first_bit: int,
    missing: float,
    log1p: bool,
    into: npt.NDArray[np.floating],
) -> None:
    """Numbers with an Arrow validity bitmap (empty: none is null) as dense features.

    `log1p` makes log1p(max(x, 0)) of x: to the bit what the CriteoTSV reader makes of the same integer.
    """
    for place in range(values.size):
        if validity.size and _is_null(validity, first_bit + place):
            into[place] = missing
            continue
        value = np.float64(values[place])
        if not log1p:
            into[place] = value
        elif value <= 0:
            into[place] = 0.0
        elif value < LOG1P_TABLE.size and value == np.floor(value):
            into[place] = LOG1P_TABLE[int(value)]
        else:
            into[place] = np.log1p(value)


@kernel
def fill_log1p_of_integers(
    values: npt.NDArray[np.integer], validity: npt.NDArray[np.uint8], first_bit: int, into: npt.NDArray[np.float32]
) -> None:
    """The same of integers, 0 where null; nearly all of them are small."""
    for place in range(values.size):
        value = np.int64(values[place])
        if value < 0 or (validity.size and _is_null(validity, first_bit + place)):
            value = np.int64(0)
        into[place] = LOG1P_TABLE[value] if value < LOG1P_TABLE.size else np.log1p(np.float64(value))


@kernel
def fill_ids(
    values: npt.NDArray[np.integer],
    validity: npt.NDArray[np.uint8],
    first_bit: int,
    missing: int,
    into: npt.NDArray[np.int64],
) -> None:
    """Integers with an Arrow validity bitmap (empty: none is null) as ids."""
    if not validity.size:
        for place in range(values.size):
            into[place] = values[place]
        return
    for place in range(values.size):
        into[place] = missing if _is_null(validity, first_bit + place) else values[place]
