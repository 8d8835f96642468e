"""What a format of records must do for the rest of the data side."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberscale_api.rpc.master_pb2 import Block, DataFile
from emberscale_trainer.data.errors import BadRecord


@dataclass(frozen=True, slots=True)
class Columns:
    """Room for n records: labels float32[n] (0 or 1), dense float32[n, d], ids int64[n, c], all C-contiguous."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return self.labels.size

    def rows(self, start: int, stop: int) -> "Columns":
        """A view of the rows [start, stop)."""
        return Columns(self.labels[start:stop], self.dense[start:stop], self.ids[start:stop])


class RecordBlock(Protocol):
    """One block of records in memory."""

    def read(self, records: npt.NDArray[np.int64], into: Columns) -> tuple[int, list[BadRecord]]:
        """Writes the given records of the block, numbered from 0, to the first rows of `into`, in their order.

        Returns how many rows were written, and those records that were malformed and skipped.
        """
        ...


class RecordFormat(Protocol):
    """A file format. What it makes is immutable, so several threads may use one."""

    @property
    def dense_columns(self) -> int:
        """Dense features of a record."""
        ...

    @property
    def categorical_columns(self) -> int:
        """Categorical features of a record."""
        ...

    def index_file(self, file: DataFile, file_number: int, block_records: int) -> list[Block]:
        """Cuts a file into blocks of at most `block_records` records. Raises DataUnavailableError."""
        ...

    def read_block(self, file: DataFile, block: Block) -> RecordBlock:
        """Reads the bytes of one block. Raises DataUnavailableError."""
        ...


def empty_columns(records: int, dense: int, categorical: int) -> Columns:
    """Uninitialised room for `records` records."""
    return Columns(
        np.empty(records, dtype=np.float32),
        np.empty((records, dense), dtype=np.float32),
        np.empty((records, categorical), dtype=np.int64),
    )
