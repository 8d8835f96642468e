"""The memory in which the rows of one table live, and the description of a table for kernels.

A slab is made of segments that never move; all segments of a table have the same size. A descriptor is one fixed-size
entry per table, written by TableStore and by the kernels.
"""

import contextlib
import ctypes
import mmap
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Reader(IntEnum):
    """A reader of changes and snapshots of rows; each reads at its own pace."""

    CHECKPOINT = 0
    FLASH = 1
    MOVE = 2
    PRIORITY = 3


PARAMETERS = 8
"""Hyperparameters of a table; see `optimizers.parameters_of`."""

READER = np.dtype(
    [
        ("changed", "<i8"),  # address of the bitmap of rows that changed, one bit a slot; 0: nobody tracks changes
        ("passed", "<i8"),  # address of the bitmap of rows that the open snapshot has already; 0: none is open
        ("scope", "<i8"),  # address of the bitmap of rows that the open snapshot is of; 0: it is of all
        ("end", "<i8"),  # the first slot that had never been given out when the snapshot began
        ("saved", "<i8"),  # address of old records, those of the rows that changed before the snapshot came to them
        ("saved_count", "<i8"),
        ("saved_room", "<i8"),  # records for which there is memory at `saved`
    ]
)
"""A reader of one table."""

TABLE = np.dtype(
    [
        ("directory", "<i8"),  # address of int64[BUCKETS]: the sub-index of each bucket, see `index`
        ("bucket_rows", "<i8"),  # address of uint32[BUCKETS]
        ("segments", "<i8"),  # address of int64[]: where each segment begins
        ("segment_count", "<i8"),
        ("segment_rows", "<i8"),  # rows of one segment
        ("slot_bits", "<i8"),  # a slot is `segment << slot_bits | row`
        ("next_slot", "<i8"),  # the first slot that was never given out; its segment may not be there yet
        ("free", "<i8"),  # address of uint32[]: slots that were given back
        ("free_count", "<i8"),
        ("dimension", "<i8"),
        ("stride", "<i8"),
        ("pushes", "<i8"),  # offset of the counter in a row
        ("touched", "<i8"),  # offset of the batch that last pushed a row; 0: the rows do not say
        ("clock", "<i8"),  # address of int64: the number of the batch that is being pushed
        ("sketch", "<i8"),  # address of the descriptor of the table's sketches; 0: every key is admitted
        ("min_count", "<i8"),  # the push that gives a key a row
        ("admitted", "<i8"),  # keys that got a row so far, where there are sketches
        ("refused", "<i8"),  # pushes so far that only counted
        ("optimizer", "<i8"),
        ("initializer", "<i8"),
        ("seed", "<i8"),
        ("scale", "<f8"),
        ("parameters", "<f8", (PARAMETERS,)),
        ("readers", READER, (len(Reader),)),
        ("number", "<i8"),  # of the table in its store
        ("logged", "<i8"),  # rows in slots below this log their deltas; 0: none do
        ("logs", "<i8"),  # address of int64[]: for each segment, the address of what says where its next delta goes
        ("opened", "<i8"),  # address of the bitmap of rows with an open delta, one bit a slot; 0: none stays open
    ]
)


def _offset(field: str, entry: np.dtype[np.void] = TABLE) -> int:
    fields = entry.fields
    if fields is None:
        raise TypeError(f"{entry} has no fields")
    return int(fields[field][1])


TABLE_BYTES = TABLE.itemsize
DIRECTORY = _offset("directory")
BUCKET_ROWS = _offset("bucket_rows")
SEGMENTS = _offset("segments")
SEGMENT_COUNT = _offset("segment_count")
SEGMENT_ROWS = _offset("segment_rows")
SLOT_BITS = _offset("slot_bits")
NEXT_SLOT = _offset("next_slot")
FREE = _offset("free")
FREE_COUNT = _offset("free_count")
DIMENSION = _offset("dimension")
STRIDE = _offset("stride")
PUSHES = _offset("pushes")
TOUCHED = _offset("touched")
CLOCK = _offset("clock")
SKETCH = _offset("sketch")
MIN_COUNT = _offset("min_count")
ADMITTED = _offset("admitted")
REFUSED = _offset("refused")
OPTIMIZER = _offset("optimizer")
INITIALIZER = _offset("initializer")
SEED = _offset("seed")
SCALE = _offset("scale")
PARAMETERS_AT = _offset("parameters")
READERS_AT = _offset("readers")
NUMBER = _offset("number")
LOGGED = _offset("logged")
LOGS = _offset("logs")
OPENED = _offset("opened")

READER_BYTES = READER.itemsize
CHANGED = _offset("changed", READER)
PASSED = _offset("passed", READER)
SCOPE = _offset("scope", READER)
END = _offset("end", READER)
SAVED = _offset("saved", READER)
SAVED_COUNT = _offset("saved_count", READER)
SAVED_ROOM = _offset("saved_room", READER)


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
        self._bytes = max(SEGMENT_BYTES, segment_rows * stride)
        whole = zeroed(self._bytes, huge=huge)
        self._page_bytes = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
        self.address: int = whole.ctypes.data
        self.rows = whole[: segment_rows * stride].reshape(segment_rows, stride)

    def release(self) -> int:
        """Gives the memory back to the system until it is written again. The memory must be all zero, and stays so.

        Returns its size in bytes.
        """
        whole_pages = self._bytes // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(whole_pages), mmap.MADV_DONTNEED)
        return whole_pages

    def touched_bytes(self, rows: int) -> int:
        """Bytes of the pages with the first `rows` rows."""
        return -(-rows * self.rows.shape[1] // self._page_bytes) * self._page_bytes


def rows_per_segment(stride: int) -> int:
    """Rows of `stride` bytes in a segment: a positive multiple of 8, so that segments begin at whole bitmap bytes."""
    return max(1, SEGMENT_BYTES // (8 * stride)) * 8


_SPARE_SHARE = 16
"""All spare memory together is at most this part of the rows' memory."""


class SpareMemory:
    """Memory for the old rows that snapshots save, kept from one snapshot to the next, in pieces of SEGMENT_BYTES.

    A push that saves rows in memory that nobody has touched before waits for the system to provide every page of it.
    That takes longer than the copying, and much longer on a virtual machine that returns free memory to its host.
    Callers hold the lock of the table store.
    """

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.uint8]] = []
        self._most = 0

    def bound(self, rows_bytes: int) -> None:
        """Frees what is too much beside rows that take `rows_bytes` of memory, and keeps no more from now on."""
        self._most = rows_bytes // _SPARE_SHARE // SEGMENT_BYTES
        del self._pieces[self._most :]

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns memory of at least `size` bytes, with anything in it. Raises MemoryError."""
        if size <= SEGMENT_BYTES and self._pieces:
            return self._pieces.pop()
        return zeroed(max(size, SEGMENT_BYTES))

    def give_back(self, piece: NDArray[np.uint8]) -> None:
        """Keeps a piece for later. Nobody uses it any more."""
        if len(piece) == SEGMENT_BYTES and len(self._pieces) < self._most:
            self._pieces.append(piece)
