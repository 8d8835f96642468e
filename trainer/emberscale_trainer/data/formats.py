"""The formats that a manifest can name: their readers, file names, compressions, and the columns they can hold."""

from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat, DataSpec
from emberscale_api.job.resolved import CRITEO_COLUMNS, columns_of
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.records import RecordFormat

COMPRESSIONS = {
    DataFormat.PARQUET: ("none", "snappy", "gzip", "zstd"),
    DataFormat.CSV: ("none", "gzip", "zstd"),
    DataFormat.CRITEO_TSV: ("none", "gzip", "zstd"),
}
SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
"""The suffixes of the names of compressed text."""


def record_format(data: DataSpec) -> RecordFormat:
    """Returns the reader of the data's format and columns."""
    return format_reader(data.format, columns_of(data), data.csv)


def format_reader(name: DataFormat, columns: ColumnMapping, csv: CSVSpec, raw: bool = False) -> RecordFormat:
    """Returns the reader of a format; `raw` as in RecordFormat."""
    if name is DataFormat.CRITEO_TSV:
        return CriteoTSV(raw)
    if name is DataFormat.CSV:
        from emberscale_trainer.data.csv_text import CSV

        return CSV(columns, csv, raw)
    # takes a moment to import, which other formats should not cost
    from emberscale_trainer.data.parquet import Parquet

    return Parquet(columns, raw)


def columns_in(uri: str, name: DataFormat, csv: CSVSpec) -> dict[str, str]:
    """Returns the columns of a Parquet or CSV file with their types, empty for CSV. Raises DataUnavailableError."""
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
