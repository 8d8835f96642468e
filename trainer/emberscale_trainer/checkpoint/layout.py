"""The files of one parameter server in a checkpoint.

<checkpoint>/manifest.json             by the master, last; lists every file with its size and checksum
<checkpoint>/ps-<i>/partition.json     what the server held
<checkpoint>/ps-<i>/table-<n>.rows     records of table n, as they lie in its slab
<checkpoint>/ps-<i>/dense-<state>.npy  the dense slice's values and optimizer state
<checkpoint>/ps-<i>/applied.json       how often each batch was applied
"""

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TablePart(_Part):
    """One table's share on one server; `stride` is the size of a record in bytes."""

    name: str
    file: str
    rows: int
    dimension: int
    optimizer: str
    stride: int


class DensePart(_Part):
    """The slice [start, stop) of the flat dense vector; `files` by the name of the state."""

    start: int
    stop: int
    parameters: int
    files: dict[str, str]


class PartitionFile(_Part):
    """partition.json. `buckets` are the [first, stop) ranges of buckets that the server owned."""

    index: int
    servers: int
    buckets: list[tuple[int, int]]
    tables: list[TablePart]
    dense: DensePart


class EpochRuns(_Part):
    """Batches of one epoch as `(first, stop, times)`; batches in no run were applied zero times."""

    epoch: int
    runs: list[tuple[int, int, int]]


class AppliedFile(_Part):
    """applied.json."""

    epochs: list[EpochRuns]


def owned_ranges(owners: tuple[int, ...], index: int) -> list[tuple[int, int]]:
    """The buckets of one server as [first, stop) ranges."""
    ranges: list[tuple[int, int]] = []
    for bucket, owner in enumerate(owners):
        if owner != index:
            continue
        if ranges and ranges[-1][1] == bucket:
            ranges[-1] = (ranges[-1][0], bucket + 1)
        else:
            ranges.append((bucket, bucket + 1))
    return ranges
