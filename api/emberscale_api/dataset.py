"""The files of a job's data, and the index of their records."""

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """Which of the two data sets."""

    TRAINING = "Training"
    EVALUATION = "Evaluation"


@dataclass(frozen=True)
class DataFile:
    """A data file; `records` is None until it is indexed.

    A file that was `trained` before the job, by the job whose checkpoint it started from, is not read and has no
    records.
    """

    uri: str
    bytes: int
    records: int | None = None
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Records [first_record, first_record + records) of a file, in bytes [offset, offset + length).

    The bytes are those of its text if it is compressed; of Parquet, those of the row groups that the records are in.
    `file_number` counts the files of a split.
    """

    file_number: int
    offset: int
    length: int
    first_record: int
    records: int


@dataclass(frozen=True, slots=True)
class Dataset:
    """The files of both splits and their blocks, in any order; files without blocks are not read."""

    training_files: tuple[DataFile, ...]
    training_blocks: tuple[Block, ...]
    evaluation_files: tuple[DataFile, ...] = ()
    evaluation_blocks: tuple[Block, ...] = ()
