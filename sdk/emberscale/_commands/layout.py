"""The options that describe data files: their format, and the roles of their columns."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from emberscale_api.errors import InvalidError
from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat, ListColumn, load_manifest
from emberscale_api.job.resolved import CRITEO_COLUMNS, columns_of

if TYPE_CHECKING:
    from emberscale_trainer.data.records import RecordFormat


class FileFormat(StrEnum):
    """A format, as commands name it."""

    CRITEO = "criteo"
    PARQUET = "parquet"
    CSV = "csv"

    @property
    def data_format(self) -> DataFormat:
        """The same, as manifests name it."""
        return {
            FileFormat.CRITEO: DataFormat.CRITEO_TSV,
            FileFormat.PARQUET: DataFormat.PARQUET,
            FileFormat.CSV: DataFormat.CSV,
        }[self]


_ENDINGS = {
    ".parquet": DataFormat.PARQUET,
    ".pq": DataFormat.PARQUET,
    ".csv": DataFormat.CSV,
    ".tsv": DataFormat.CRITEO_TSV,
}
_PANEL = "Format and columns of the files"


@dataclass(frozen=True)
class LayoutOptions:
    """The options that say what files are; a command takes them by `with_layout_options`."""

    manifest: Annotated[
        Path | None,
        typer.Option(
            "--manifest",
            metavar="FILE",
            help="A TrainingJob whose spec.data describes the files, in place of the options below.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    from_format: Annotated[
        FileFormat | None,
        typer.Option(
            "--from",
            help="Format of the files. By default from their names: .parquet, .pq or .csv (.gz, .zst); else criteo.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the labels, 0 or 1.", rich_help_panel=_PANEL)
    ] = None
    dense: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN,...", help="Columns of numbers. Repeatable.", rich_help_panel=_PANEL),
    ] = None
    categorical: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN,...", help="Columns of one id per record. Repeatable.", rich_help_panel=_PANEL),
    ] = None
    lists: Annotated[
        list[str] | None,
        typer.Option(
            "--list",
            metavar="COLUMN[:MAX],...",
            help="Columns of any number of ids per record; the first MAX are kept, 100 by default. Repeatable.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    delimiter: Annotated[
        str, typer.Option(metavar="CHARACTER", help="Separator of the fields of CSV.", rich_help_panel=_PANEL)
    ] = ","
    list_separator: Annotated[
        str, typer.Option(metavar="CHARACTER", help="Separator of the ids of a list in CSV.", rich_help_panel=_PANEL)
    ] = "|"
    no_header: Annotated[
        bool,
        typer.Option(
            "--no-header",
            help="The first line of a CSV file is a record; the columns are column_1, column_2, ...",
            rich_help_panel=_PANEL,
        ),
    ] = False

    @property
    def names_columns(self) -> bool:
        """Whether a column is named."""
        return any((self.label, self.dense, self.categorical, self.lists))

    @property
    def says_columns_or_format(self) -> bool:
        """Whether anything is given that a manifest says as well."""
        return self.names_columns or self.from_format is not None


def with_layout_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's parameter `described` of type LayoutOptions by an option for each field."""
    own = inspect.signature(command)
    options = inspect.signature(LayoutOptions).parameters

    @wraps(command)
    def run(**values: Any) -> None:
        command(described=LayoutOptions(**{name: values.pop(name) for name in options}), **values)

    parameters = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        for option in (options.values() if name == "described" else [parameter])
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # which typer reads
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    return run


@dataclass(frozen=True)
class Layout:
    """The format and the columns of files."""

    format: DataFormat
    columns: ColumnMapping
    csv: CSVSpec

    def raw_reader(self) -> "RecordFormat":
        """Reads the files, numbers as they are written."""
        from emberscale_trainer.data.formats import format_reader

        return format_reader(self.format, self.columns, self.csv, raw=True)


def layout_of(uris: Sequence[str], given: LayoutOptions) -> Layout:
    """Returns the layout of some files, at least one, from the options. Raises InvalidError."""
    if given.manifest is not None:
        if given.says_columns_or_format:
            raise InvalidError("--manifest describes the files: omit --from, --label and the like")
        data = load_manifest(given.manifest).spec.data
        return Layout(data.format, columns_of(data), data.csv)
    data_format = given.from_format.data_format if given.from_format else _format_of(uris)
    if data_format is DataFormat.CRITEO_TSV:
        if given.names_columns:
            raise InvalidError("--label, --dense, --categorical and --list are for Parquet and CSV (see --from)")
        return Layout(data_format, CRITEO_COLUMNS, CSVSpec())
    try:
        delimiter = given.delimiter.replace("\\t", "\t")
        csv = CSVSpec(delimiter=delimiter, list_separator=given.list_separator, header=not given.no_header)
        if not given.names_columns:
            return Layout(data_format, _criteo_columns(uris[0], data_format, csv), csv)
        if given.label is None:
            raise InvalidError("--label is required with --dense, --categorical and --list")
        columns = ColumnMapping(
            label=given.label,
            dense=tuple(_names(given.dense)),
            categorical=tuple(_names(given.categorical)),
            lists=tuple(_list_column(text) for text in _names(given.lists)),
        )
    except ValidationError as error:
        raise InvalidError("\n".join(_problem(problem["loc"], problem["msg"]) for problem in error.errors())) from error
    return Layout(data_format, columns, csv)


def _problem(location: tuple[int | str, ...], message: str) -> str:
    option = {
        "delimiter": "--delimiter",
        "list_separator": "--list-separator",
        "lists": "--list",
        "max_length": "--list",
    }
    name = str(location[0]) if location else ""
    text = message.removeprefix("Value error, ")
    return f"{option.get(name, f'--{name}')}: {text}" if name else text


def named_format(uri: str) -> DataFormat | None:
    """Returns the format that the ending of a file's name says, None if it says none."""
    from emberscale_trainer.data.streams import uncompressed_name

    return _ENDINGS.get(Path(uncompressed_name(uri)).suffix.lower())


def _format_of(uris: Sequence[str]) -> DataFormat:
    found = {named_format(uri) or DataFormat.CRITEO_TSV for uri in uris}
    if len(found) > 1:
        raise InvalidError(f"the names indicate several formats ({', '.join(sorted(found))}): choose one with --from")
    return found.pop()


def _criteo_columns(uri: str, data_format: DataFormat, csv: CSVSpec) -> ColumnMapping:
    """The columns of CriteoTSV, which other files may have too."""
    from emberscale_trainer.data.csv_text import likely_delimiter
    from emberscale_trainer.data.formats import columns_in

    found = columns_in(uri, data_format, csv)
    wanted = [CRITEO_COLUMNS.label, *CRITEO_COLUMNS.dense, *CRITEO_COLUMNS.categorical]
    if set(wanted) <= found.keys():
        return CRITEO_COLUMNS
    shown = ", ".join(f"{name} ({kind})" if kind else name for name, kind in found.items())
    mark = likely_delimiter(list(found)) if data_format is DataFormat.CSV else None
    if mark is not None:
        raise InvalidError(
            f"{uri}: seems to have another delimiter: pass --delimiter '{json.dumps(mark)[1:-1]}', and describe its "
            f"columns with --label, --dense, --categorical and --list; it has {shown}"
        )
    raise InvalidError(
        f"{uri}: describe its columns, with --label, --dense, --categorical and --list, or with --manifest; "
        f"it has {shown}"
    )


def _names(texts: Sequence[str] | None) -> list[str]:
    return [name for text in texts or () for name in text.split(",") if name]


def _list_column(text: str) -> ListColumn:
    name, separator, longest = text.rpartition(":")
    if not separator:
        return ListColumn(name=text)
    if not longest.isdecimal():
        raise InvalidError(f"--list {text}: expected COLUMN:MAX, such as history:50")
    return ListColumn(name=name, max_length=int(longest))
