"""The memory in which the rows of one table live: segments that never move, all of a table of one size."""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

SEGMENT_BYTES = 4 << 20
"""Bytes of a segment, unless eight rows take more."""

HUGE_PAGE_BYTES = 2 << 20
MAX_SLOTS = (1 << 32) - 1


def zeroed(size: int, *, huge: bool = False) -> NDArray[np.uint8]:
    """Zeroed memory `uint8[size]` of its own mapping, which goes back to the system when the array does.

    Pages are committed when they are first touched; with `huge`, 2 MiB at a time, which spares the processor most of
    its address translation where rows are spread over gigabytes. The kernel gives huge pages to private memory only,
    and to whole aligned pages of it. Raises MemoryError.
    """
    slack = HUGE_PAGE_BYTES if huge else 0
    try:
        memory = mmap.mmap(-1, size + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of embedding rows: {error}") from error
    mapped: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    start = -mapped.ctypes.data % HUGE_PAGE_BYTES if huge else 0
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, size)
    return mapped[start : start + size]


class Segment:
    """Zeroed memory of one segment: `rows: uint8[rows, stride]`."""

    def __init__(self, segment_rows: int, stride: int, *, huge: bool) -> None:
        """Raises MemoryError."""
        whole = zeroed(max(SEGMENT_BYTES, segment_rows * stride), huge=huge)
        self._page_bytes = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
        self.address: int = whole.ctypes.data
        self.rows = whole[: segment_rows * stride].reshape(segment_rows, stride)

    def touched_bytes(self, rows: int) -> int:
        """Bytes of the pages that the first `rows` rows lie on."""
        return -(-rows * self.rows.shape[1] // self._page_bytes) * self._page_bytes


def rows_per_segment(stride: int) -> int:
    """Rows of `stride` bytes in a segment: a positive multiple of 8, so that segments divide bitmaps at bytes."""
    return max(1, SEGMENT_BYTES // (8 * stride)) * 8
