"""The rows of several blocks at once."""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table import PackedRows


def unpacked(packed: PackedRows, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the records of all blocks, uint8 [n, stride]. Raises MalformedBlockError."""
    return np.concatenate([packed.layout.empty(0), *(records.copy() for records in packed.unpack(content))])
