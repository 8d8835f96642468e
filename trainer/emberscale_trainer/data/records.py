"""The interface of a format of records, and the errors of data."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile
from emberscale_api.errors import UnavailableError
from emberscale_api.job import ColumnMapping
from emberscale_api.job.data import BadRecord


class DataUnavailableError(UnavailableError):
    """The data cannot be read at all; `reason` is the job master's name for the problem.

    A malformed record is a `BadRecord` instead, and reading continues.
    """

    reason = "DataUnavailable"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


_SHOWN_COLUMNS = 12


def wrong_column(
    uri: str, role: str, name: str, times: int, columns: Sequence[str], advice: str = ""
) -> DataUnavailableError:
    """Returns the error for a column that the manifest names and a file has `times` times; `columns` are the file's."""
    has = f"{times} columns" if times else "no column"
    more = f" and {len(columns) - _SHOWN_COLUMNS} more" if len(columns) > _SHOWN_COLUMNS else ""
    shown = ", ".join(columns[:_SHOWN_COLUMNS]) + more
    return DataUnavailableError(
        uri, f"has {has} {name!r}, which spec.data.columns.{role} names; it has {shown}{advice}"
    )


MISSING_ID = -1
"""The id of a category that is missing."""


@dataclass(frozen=True, slots=True)
class IdLists:
    """One list of ids per record, laid end to end: the list of record i is values[offsets[i] : offsets[i + 1]].

    values int64[n]; offsets int64[records + 1], ascending from 0 to n; both C-contiguous.
    """

    values: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def join(cls, parts: "Sequence[IdLists]") -> "IdLists":
        """Joins the lists of all parts, at least one, in their order."""
        starts = accumulate((len(part.values) for part in parts), initial=0)
        edges = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        values = np.concatenate([part.values for part in parts])
        return cls(values, np.concatenate([np.zeros(1, np.int64), *edges]))


class ListRoom:
    """Room for one list of ids per record, which grows at its end."""

    def __init__(self) -> None:
        self._values: list[npt.NDArray[np.int64]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._cut: list[npt.NDArray[np.bool_]] = []

    def append(self, values: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], cut: npt.NDArray[np.bool_]) -> None:
        """Adds the lists of the next records: values int64[sum of lengths], lengths int64[records], cut bool[records].

        `cut` marks the lists that were longer.
        """
        self._values.append(values)
        self._lengths.append(lengths)
        self._cut.append(cut)

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """bool[records]: whether the list of a record was longer."""
        return np.concatenate([np.zeros(0, dtype=np.bool_), *self._cut])

    def lists(self) -> IdLists:
        """Returns all lists that were added."""
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        return IdLists(np.concatenate([np.empty(0, dtype=np.int64), *self._values]), np.cumsum(lengths))


@dataclass(frozen=True, slots=True)
class Columns:
    """Room for n records: labels float32[n] (0 or 1), dense float32[n, d], ids int64[n, c], all C-contiguous.

    Writers of rows append the lists of the same records, in the same order, to each of `lists`. For raw records (see
    RecordFormat), `dense` is float64[n, d].
    """

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.floating]
    ids: npt.NDArray[np.int64]
    lists: tuple[ListRoom, ...] = ()

    def __len__(self) -> int:
        return self.labels.size

    @property
    def truncated_records(self) -> int:
        """The number of records with at least one list that was cut."""
        if not self.lists:
            return 0
        return int(np.count_nonzero(np.logical_or.reduce([room.cut for room in self.lists])))

    def rows(self, start: int, stop: int) -> "Columns":
        """Returns a view of the rows [start, stop), with the same room for lists."""
        return Columns(self.labels[start:stop], self.dense[start:stop], self.ids[start:stop], self.lists)


class RecordBlock(Protocol):
    """One block of records in memory."""

    def read(self, records: npt.NDArray[np.int64], into: Columns) -> tuple[int, list[BadRecord]]:
        """Writes the given records of the block, numbered from 0, to the first rows of `into`, in their order.

        Their lists are appended; malformed records have none. Returns the number of rows written, and the malformed
        records that were skipped.
        """
        ...


class RecordFormat(Protocol):
    """A file format. Several threads may use one."""

    @property
    def columns(self) -> ColumnMapping:
        """The features of a record."""
        ...

    @property
    def raw(self) -> bool:
        """Whether dense features keep their written values, NaN if missing, instead of those that training takes."""
        ...

    def check_file(self, file: DataFile) -> None:
        """Raises DataUnavailableError for a file that lacks a column, or has one of the wrong type.

        Text has no types, so a text file is refused if its first records are all malformed.
        """
        ...

    def index_file(self, file: DataFile, file_number: int, block_records: int) -> list[Block]:
        """Cuts a file into blocks of at most `block_records` records, in order. Raises DataUnavailableError."""
        ...

    def entry_point(self, file: DataFile, block: Block) -> int:
        """Returns the byte of the file at which reading must begin to reach a block.

        Blocks of a file with the same entry point can be reached only through those before them, so they are read in
        order.
        """
        ...

    def read_block(self, file: DataFile, block: Block) -> RecordBlock:
        """Reads one block. Raises DataUnavailableError."""
        ...

    def texts(self, file: DataFile, block: Block, columns: Collection[str]) -> Mapping[str, Set[bytes]]:
        """Returns the distinct texts of columns of ids in a block, by column, to show to people instead of hashes.

        Texts of malformed records, and numbers, may be among them. Raises DataUnavailableError.
        """
        ...


def empty_columns(records: int, columns: ColumnMapping, raw: bool = False) -> Columns:
    """Allocates uninitialised room for `records` records."""
    return Columns(
        np.empty(records, dtype=np.float32),
        np.empty((records, len(columns.dense)), dtype=np.float64 if raw else np.float32),
        np.empty((records, len(columns.categorical)), dtype=np.int64),
        tuple(ListRoom() for _ in columns.lists),
    )
