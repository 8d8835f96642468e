"""The memory in which the rows of one table live: segments of a fixed size that never move."""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

SEGMENT_BYTES = 4 << 20
MAX_SLOTS = (1 << 32) - 1


class Segment:
    """Zeroed memory of one segment: `rows: u8[segment_rows, stride]`, then `flags: u8[segment_rows]`.

    Pages are committed when they are first touched; with `huge`, 2 MB at a time, which spares the processor most of its
    address translation where rows are spread over gigabytes.
    """

    def __init__(self, segment_rows: int, stride: int, *, huge: bool) -> None:
        try:
            memory = mmap.mmap(-1, SEGMENT_BYTES)
        except OSError as error:
            raise MemoryError(f"no memory for {SEGMENT_BYTES} bytes of embedding rows: {error}") from error
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = whole.ctypes.data
        self.rows = whole[: segment_rows * stride].reshape(segment_rows, stride)
        self.flags = whole[segment_rows * stride : segment_rows * (stride + 1)]


def rows_per_segment(stride: int) -> int:
    """Rows of `stride` bytes, with their flags, that fit into a segment."""
    return SEGMENT_BYTES // (stride + 1)
