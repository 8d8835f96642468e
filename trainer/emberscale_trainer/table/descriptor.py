"""What a kernel knows of a table: one fixed-size entry each, written by TableStore and by the kernels."""

import numpy as np

PARAMETERS = 8
"""Hyperparameters a table; see `optimizers.parameters_of`."""

TABLE = np.dtype(
    [
        ("directory", "<i8"),  # address of int64[BUCKETS]: the sub-index of each bucket, see `index`
        ("bucket_rows", "<i8"),  # address of uint32[BUCKETS]
        ("segments", "<i8"),  # address of int64[]: where each segment begins
        ("segment_count", "<i8"),
        ("segment_rows", "<i8"),  # rows of one segment
        ("slot_bits", "<i8"),  # a slot is `segment << slot_bits | row`
        ("bitmaps", "<i8"),  # offset in a segment of its bitmaps, see `rows`
        ("next_slot", "<i8"),  # the first slot that was never given out; its segment may not be there yet
        ("free", "<i8"),  # address of uint32[]: slots that were given back
        ("free_count", "<i8"),
        ("dimension", "<i8"),
        ("stride", "<i8"),
        ("pushes", "<i8"),  # offset of the counter in a row
        ("optimizer", "<i8"),
        ("initializer", "<i8"),
        ("seed", "<i8"),
        ("scale", "<f8"),
        ("parameters", "<f8", (PARAMETERS,)),
    ]
)


def _offset(field: str) -> int:
    fields = TABLE.fields
    if fields is None:
        raise TypeError("TABLE has no fields")
    return int(fields[field][1])


TABLE_BYTES = TABLE.itemsize
DIRECTORY = _offset("directory")
BUCKET_ROWS = _offset("bucket_rows")
SEGMENTS = _offset("segments")
SEGMENT_COUNT = _offset("segment_count")
SEGMENT_ROWS = _offset("segment_rows")
SLOT_BITS = _offset("slot_bits")
BITMAPS = _offset("bitmaps")
NEXT_SLOT = _offset("next_slot")
FREE = _offset("free")
FREE_COUNT = _offset("free_count")
DIMENSION = _offset("dimension")
STRIDE = _offset("stride")
PUSHES = _offset("pushes")
OPTIMIZER = _offset("optimizer")
INITIALIZER = _offset("initializer")
SEED = _offset("seed")
SCALE = _offset("scale")
PARAMETERS_AT = _offset("parameters")
