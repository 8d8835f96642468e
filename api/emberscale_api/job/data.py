"""The location of the records, and how they are read."""

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from emberscale_api.job.schema import ManifestPart

_ASCII = r"^[\t !#-~]$"


def _one_character(text: str) -> str:
    if not re.fullmatch(_ASCII, text):
        hint = r""": YAML reads "\t" in double quotes as a tab""" if text == r"\t" else ""
        raise ValueError(f"must be one ASCII character other than a quote, such as a comma or a tab{hint}")
    return text


Separator = Annotated[
    str, AfterValidator(_one_character), Field(json_schema_extra={"pattern": _ASCII, "minLength": 1, "maxLength": 1})
]


class DataFormat(StrEnum):
    """`CriteoTSV`: label, 13 integers, 26 categories as 32-bit hexadecimal numbers, separated by tabs.

    Every field but the label may be empty. `Parquet` and `CSV` have the columns that `columns` names.
    """

    CRITEO_TSV = "CriteoTSV"
    PARQUET = "Parquet"
    CSV = "CSV"

    @property
    def ending(self) -> str:
        """The usual ending of the names of uncompressed files."""
        return {DataFormat.CRITEO_TSV: ".tsv", DataFormat.PARQUET: ".parquet", DataFormat.CSV: ".csv"}[self]


DataPath = Annotated[str, Field(min_length=1)]
ColumnName = Annotated[str, Field(min_length=1, max_length=128)]


class ListOverflow(StrEnum):
    """How to read a list that is longer than `maxLength`."""

    TRUNCATE = "Truncate"
    REFUSE = "Refuse"


class DenseTransform(StrEnum):
    """The transform of dense features: `Log1p` replaces x by log(1 + max(x, 0)), as the format CriteoTSV does."""

    NONE = "None"
    LOG1P = "Log1p"


class DataContinuation(StrEnum):
    """The data that a job trains when it starts from a checkpoint of another job (`checkpoint.initialFrom`).

    `Fresh`: all of its data, with the model of the checkpoint. `Append`: the files that the checkpoint has not trained;
    the job does not read the others. `Resume`: the same data, from the position of the checkpoint.
    """

    FRESH = "Fresh"
    APPEND = "Append"
    RESUME = "Resume"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A malformed record, which training skips. `line` counts from 1 within the file."""

    file: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.problem}"


class ListColumn(ManifestPart):
    """A column with any number of ids per record."""

    name: ColumnName
    max_length: int = Field(default=100, ge=1, le=65536, description="Maximum number of ids per record")
    overflow: ListOverflow = Field(
        default=ListOverflow.TRUNCATE,
        description="Truncate keeps the first maxLength ids of a longer list, Refuse makes its record malformed",
    )


class ColumnMapping(ManifestPart):
    """The meaning of a file's columns. `categorical` columns hold one id per record, `lists` any number of ids."""

    label: ColumnName = Field(description="Column of the labels, 0 or 1")
    dense: tuple[ColumnName, ...] = Field(default=(), max_length=256, description="Columns of numbers")
    categorical: tuple[ColumnName, ...] = Field(
        default=(), max_length=256, description="Columns of one id per record, each with an embedding table"
    )
    lists: tuple[ListColumn, ...] = Field(
        default=(), max_length=64, description="Columns of any number of ids per record, whose embeddings are pooled"
    )
    dense_transform: DenseTransform = Field(
        default=DenseTransform.NONE, description="Log1p replaces each dense feature x with log(1 + max(x, 0))"
    )
    dense_transforms: dict[ColumnName, DenseTransform] = Field(
        default_factory=dict, max_length=256, description="Overrides of denseTransform, by dense column"
    )

    @property
    def transforms(self) -> tuple[DenseTransform, ...]:
        """The transform of each dense column."""
        return tuple(self.dense_transforms.get(name, self.dense_transform) for name in self.dense)

    @property
    def id_columns(self) -> tuple[str, ...]:
        """The columns that have embeddings, in the order of their tables."""
        return (*self.categorical, *(column.name for column in self.lists))

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = Counter((self.label, *self.dense, *self.id_columns))
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            raise ValueError(f"each column can be used once, but {', '.join(twice)} is repeated")
        strange = [name for name in self.dense_transforms if name not in self.dense]
        if strange:
            raise ValueError(f"denseTransforms names {', '.join(strange)}: add it to dense, or remove it here")
        if not self.id_columns:
            raise ValueError("name at least one column in categorical or lists: without ids there is nothing to embed")
        return self


class CSVSpec(ManifestPart):
    """How fields are separated; used only for the format `CSV`."""

    delimiter: Separator = Field(default=",", description="Field separator: one character, such as a comma or a tab")
    header: bool = Field(
        default=True,
        description="Whether the first line of each file names its columns; if not, they are column_1, column_2, ...",
    )
    list_separator: Separator = Field(default="|", description="Separator of the ids in a list: one character")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if self.delimiter == self.list_separator:
            raise ValueError(f"delimiter and listSeparator must differ (both are {self.delimiter!r})")
        return self


class ShufflingSpec(ManifestPart):
    """Records are shuffled in blocks of `block_records`: the order of blocks, and the records within each."""

    enabled: bool = Field(default=True, description="Whether to shuffle; if not, records keep the order of the files")
    block_records: int = Field(default=32768, ge=1, le=1 << 24, description="Records per block")


class DataSpec(ManifestPart):
    """Paths are local files, globs, or fsspec URIs; relative paths start at the working directory."""

    format: DataFormat = DataFormat.CRITEO_TSV
    train: tuple[DataPath, ...] = Field(min_length=1, description="Files to train on")
    evaluation: tuple[DataPath, ...] = Field(
        default=(), description="Held-out files; the job evaluates on them after each epoch"
    )
    columns: ColumnMapping | None = Field(
        default=None, description="Roles of the columns; required for Parquet and CSV, fixed for CriteoTSV"
    )
    csv: CSVSpec = CSVSpec()
    shuffling: ShufflingSpec = ShufflingSpec()
    max_bad_records: int = Field(default=0, ge=0, description="Malformed records that the job skips; one more fails it")
    continuation: DataContinuation = Field(
        default=DataContinuation.FRESH,
        description="With checkpoint.initialFrom: Fresh trains all data, Append the files that the checkpoint has not "
        "trained, Resume the rest of the same data",
    )

    @model_validator(mode="after")
    def _mapped(self) -> Self:
        fixed = self.format is DataFormat.CRITEO_TSV
        if fixed and self.columns is not None:
            raise ValueError("columns must not be given for format CriteoTSV, whose columns are fixed")
        if not fixed and self.columns is None:
            raise ValueError(
                f"columns is required for format {self.format}: label, and any of dense, categorical and lists"
            )
        return self
