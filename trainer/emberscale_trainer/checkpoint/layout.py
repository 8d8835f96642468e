"""The files of one parameter server in a checkpoint.

<checkpoint>/manifest.json                by the master, last; lists every file with its size and checksum
<checkpoint>/ps-<i>/partition.json        what the server held
<checkpoint>/ps-<i>/table-<n>-<part>.rows records of table n, as they lie in its slab
<checkpoint>/ps-<i>/dense-<part>.rows     the same of the dense table, whose keys are the numbers of pieces
<checkpoint>/ps-<i>/applied.json          how often each batch was applied
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from emberscale_api.job import OptimizerType
from emberscale_trainer.table import RowLayout
from emberscale_trainer.table.layout import state_floats


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TablePart(_Part):
    """One table's share on one server.

    * `files`: whole records each, in any order.
    * `stride`: bytes of a record.
    """

    name: str
    files: list[str]
    rows: int
    dimension: int
    optimizer: OptimizerType
    stride: int

    @property
    def layout(self) -> RowLayout:
        """How the records are laid out."""
        return RowLayout(self.dimension, state_floats(self.optimizer, self.dimension))


class PartitionFile(_Part):
    """partition.json.

    * `buckets`, `pieces`: [first, stop) ranges of what the server owned.
    * `tables`: the embedding tables, in the order used on the wire.
    * `parameters`: floats of the dense vector, over all servers.
    """

    index: int
    buckets: list[tuple[int, int]]
    pieces: list[tuple[int, int]]
    tables: list[TablePart]
    dense: TablePart
    parameters: int


class EpochRuns(_Part):
    """Batches of one epoch as `(first, stop, times)`; batches in no run were applied zero times."""

    epoch: int
    runs: list[tuple[int, int, int]]


class AppliedFile(_Part):
    """applied.json."""

    epochs: list[EpochRuns]


def ranges_of(owned: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where bool [n] is true, as ascending [first, stop) ranges."""
    edges = np.flatnonzero(np.diff(owned, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
