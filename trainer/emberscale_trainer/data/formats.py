"""The formats that a manifest can name: their readers, names of files, compressions, and what they can hold."""

from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat, DataSpec
from emberscale_api.job.resolved import CRITEO_COLUMNS, columns_of
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.records import RecordFormat

COMPRESSIONS = {
    DataFormat.PARQUET: ("none", "snappy", "gzip", "zstd"),
    DataFormat.CSV: ("none", "gzip", "zstd"),
    DataFormat.CRITEO_TSV: ("none", "gzip", "zstd"),
}
ENDINGS = {DataFormat.PARQUET: ".parquet", DataFormat.CSV: ".csv", DataFormat.CRITEO_TSV: ".tsv"}
SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
"""The endings of the names of compressed text."""


def record_format(data: DataSpec) -> RecordFormat:
    """The reader of the data's format and columns."""
    return format_reader(data.format, columns_of(data), data.csv)


def format_reader(name: DataFormat, columns: ColumnMapping, csv: CSVSpec, raw: bool = False) -> RecordFormat:
    """The reader of a format; `raw` is that of RecordFormat."""
    if name is DataFormat.CRITEO_TSV:
        return CriteoTSV(raw)
    if name is DataFormat.CSV:
        from emberscale_trainer.data.csv_text import CSV

        return CSV(columns, csv, raw)
    # takes a moment to import, which other formats should not cost
    from emberscale_trainer.data.parquet import Parquet

    return Parquet(columns, raw)


def columns_in(uri: str, name: DataFormat, csv: CSVSpec) -> dict[str, str]:
    """The columns of a Parquet or CSV file and their types, which CSV does not tell. Raises DataUnavailableError."""
    if name is DataFormat.CSV:
        from emberscale_trainer.data.csv_text import column_names

        return dict.fromkeys(column_names(uri, csv), "")
    from emberscale_trainer.data.parquet import file_schema

    return {field.name: str(field.type) for field in file_schema(uri)}


def problem_with_columns(target: DataFormat, columns: ColumnMapping) -> str | None:
    """Returns why a format cannot hold records of these columns; None if it can."""
    if target is not DataFormat.CRITEO_TSV:
        return None
    dense, categorical = len(CRITEO_COLUMNS.dense), len(CRITEO_COLUMNS.categorical)
    if (len(columns.dense), len(columns.categorical), len(columns.lists)) == (dense, categorical, 0):
        return None
    return (
        f"CriteoTSV has {dense} dense columns, {categorical} categorical ones and no lists; these files have "
        f"{len(columns.dense)}, {len(columns.categorical)} and {len(columns.lists)}"
    )
