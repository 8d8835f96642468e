"""`emberscale data convert`: data files in another format."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from emberscale._commands.layout import FileFormat, Layout, LayoutOptions, layout_of, named_format, with_layout_options
from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import stages_bar
from emberscale_api.dataset import DataFile
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat
from emberscale_api.job.resolved import CRITEO_COLUMNS

if TYPE_CHECKING:
    from emberscale_trainer.data.files import Target

HELP = paragraphs("""\
Writes data files in another format: each IN becomes one file, at OUT or in the folder OUT.

Training on the new files gives the same batches: ids are kept (text becomes its 64-bit hash), numbers are written as
they are, and missing fields stay missing. Parquet files get row groups of 32,768 records, which training reads
independently. At the end, the command prints the [cyan]spec.data[/] to write in the manifest.

OUT is a folder if such a folder exists, if it ends with a slash, or if there are several files. A file appears whole or
not at all; [cyan]--overwrite[/] is required to replace one. Exit code [red]2[/] for files that cannot be read, or with
more malformed records than [cyan]--max-bad-records[/].
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale data convert 'day_*.tsv.gz' criteo/ --format parquet

  emberscale data convert clicks.csv clicks.parquet --label clicked --dense price --categorical user,item

  emberscale data convert clicks.parquet clicks.csv.zst --manifest job.yaml

  emberscale data convert 'day_*.tsv.gz' s3://bucket/criteo/ --format parquet
"""


@with_layout_options
def convert(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT", help="Files, globs or fsspec URIs to read; last, the file or folder to write."
        ),
    ],
    to_format: Annotated[
        FileFormat | None, typer.Option("--format", "-f", help="Format to write; by default, from the name of OUT.")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            metavar="none|gzip|zstd|snappy",
            help="By default, zstd for Parquet; for other formats from the name of OUT (.gz, .zst), else none.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replaces existing files.")] = False,
    max_bad_records: Annotated[
        int, typer.Option(min=0, help="Malformed records to leave out before the command fails.")
    ] = 0,
    *,
    described: LayoutOptions,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Writes data files in another format."""
    # takes a moment to import, which `--help` should not cost
    from emberscale_trainer.data.convert import Conversion, convert_files
    from emberscale_trainer.data.files import expand
    from emberscale_trainer.data.formats import COMPRESSIONS, problem_with_columns

    with bad_input_exits():
        if len(paths) < 2:
            raise InvalidError("give at least two paths: what to read, and last where to write")
        *given, out = paths
        sources = expand(given)
        layout = layout_of([source.uri for source in sources], described)
        target = to_format.data_format if to_format is not None else named_format(out)
        if target is None:
            raise InvalidError(f"{out}: choose the format with --format: {', '.join(FileFormat)}")
        problem = problem_with_columns(target, layout.columns)
        if problem is not None:
            raise InvalidError(problem)
        compression = compression or _compression_of(out, target)
        if compression not in COMPRESSIONS[target]:
            raise InvalidError(f"--compression {compression}: {target} can have {', '.join(COMPRESSIONS[target])}")
        targets = _targets(sources, out, target, compression, overwrite)
        conversion = Conversion(tuple(targets), target, layout.csv, compression, max_bad_records)
        with stages_bar("looking for files", MofNCompleteColumn(), TimeRemainingColumn()) as tell:
            converted = convert_files(sources, layout.raw_reader(), conversion, tell)
    manifest_data = _manifest_data(targets, target, layout)
    if output is Output.JSON:
        document = {
            "files": [
                {"path": str(path), "bytes": path.size(), "records": records}
                for path, records in zip(targets, converted.records, strict=True)
            ],
            "truncated_records": converted.truncated_records,
            "bad_records": [str(bad) for bad in converted.bad_records],
            "data": manifest_data,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    for path, records in zip(targets, converted.records, strict=True):
        remark = "" if records else ": there was none to convert"
        typer.echo(f"{path}: {records:,} records, {path.size():,} bytes{remark}")
    if converted.truncated_records:
        typer.echo(
            f"lists of {converted.truncated_records:,} records were truncated: raise the maximum with --list COLUMN:MAX"
        )
    for bad in converted.bad_records:
        typer.echo(f"left out: {bad}")
    typer.echo("In the manifest:\n")
    typer.echo(yaml.safe_dump({"data": manifest_data}, sort_keys=False, default_flow_style=None, width=100).rstrip())


def _compression_of(out: str, target: DataFormat) -> str:
    from emberscale_trainer.data.streams import compression_of

    return "zstd" if target is DataFormat.PARQUET else compression_of(out) or "none"


def _targets(
    sources: Sequence[DataFile], out: str, target: DataFormat, compression: str, overwrite: bool
) -> list["Target"]:
    """Returns the target of each source, and makes the folder. Raises InvalidError and DataUnavailableError."""
    from emberscale_trainer.data.files import Target
    from emberscale_trainer.data.formats import SUFFIXES
    from emberscale_trainer.data.streams import uncompressed_name

    whole = Target.of(out)
    with os_errors_named(f"{out}: cannot be inspected"):
        if not (out.endswith("/") or whole.is_folder() or len(sources) > 1):
            targets, folder = [whole], os.path.dirname(out)
        else:
            ending = target.ending + ("" if target is DataFormat.PARQUET else SUFFIXES.get(compression, ""))
            names = [Path(uncompressed_name(source.uri)).stem + ending for source in sources]
            targets, folder = [Target.of(os.path.join(out, name)) for name in names], out
        for one in targets:
            if [other.uri for other in targets].count(one.uri) > 1:
                raise InvalidError(f"{one}: several of the files would be written there; convert them one by one")
            if any(one.uri == source.uri for source in sources):
                raise InvalidError(f"{one}: is one of the files to read; choose another path")
            if one.exists() and not overwrite:
                raise InvalidError(f"{one}: already exists; --overwrite replaces it")
            if one.is_folder():
                raise InvalidError(f"{one}: is a folder")
    with os_errors_named(f"{folder}: cannot be created"):
        if whole.local:
            Path(folder).mkdir(parents=not Path(folder).is_absolute(), exist_ok=True)
        else:
            whole.filesystem.makedirs(os.path.dirname(targets[0].path), exist_ok=True)
    return targets


def _manifest_data(targets: Sequence["Target"], target: DataFormat, layout: Layout) -> dict[str, Any]:
    """Returns the `spec.data` that reads the new files."""
    data: dict[str, Any] = {"format": target.value, "train": [str(path) for path in targets]}
    if target is DataFormat.CRITEO_TSV:
        return data
    columns: ColumnMapping = layout.columns
    data["columns"] = columns.model_dump(mode="json", by_alias=True, exclude_defaults=columns is not CRITEO_COLUMNS)
    if columns is CRITEO_COLUMNS:
        data["columns"].pop("lists")
    if target is DataFormat.CSV and layout.csv != CSVSpec():
        data["csv"] = layout.csv.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return data
