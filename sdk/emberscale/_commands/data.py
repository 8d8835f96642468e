"""`emberscale data`: makes, inspects and converts data sets."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from emberscale._commands import convert, skew
from emberscale._commands.layout import FileFormat, Layout, LayoutOptions, layout_of, with_layout_options
from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console, progress_bar, stages_bar
from emberscale_api.dataset import DataFile
from emberscale_api.errors import InvalidError
from emberscale_api.job import DataFormat
from emberscale_api.readable import bytes_text

if TYPE_CHECKING:
    from emberscale_trainer.data.inspect import DataSummary, FrequentId
    from emberscale_trainer.data.synthetic import DatasetSpec, SynthesisResult

_SHOWN_CHARACTERS = 32
_WHOLE_DECIMAL = re.compile(r"-?\d+\.0+")
HELP = "Makes synthetic data sets, inspects data files before training, measures their skew, and converts them."

SYNTH_HELP = paragraphs("""\
Writes a synthetic data set with the columns of Criteo: OUT/train-00000.tsv and so on, OUT/evaluation.tsv,
OUT/metadata.json; or the same rows as Parquet or CSV.

Ids follow power laws with very different cardinalities, new ids keep arriving, fields are missing, and a hidden teacher
model draws the labels. The teacher's own AUC, about 0.8, is the best that a model can reach; the command prints it and
writes it to metadata.json.

The same options give the same bytes. If OUT already holds this data set, the command does nothing.
""")
SYNTH_EXAMPLES = """\
[bold]Examples[/]

  emberscale data synth data/criteo-synthetic --rows 1000000 --seed 7

  emberscale data synth data/big --rows 20000000 --parts 8 --evaluation-fraction 0

  emberscale data synth data/parquet --format parquet
"""
INSPECT_HELP = paragraphs("""\
Counts the records of data files and shows their content: malformed records with file and line, the share of
positives, and for each column the share of empty fields and the range of its numbers, its distinct and most frequent
ids, or the lengths of its lists.

Paths are files, globs (quote them) or fsspec URIs such as s3://bucket/day_*. Name the columns of Parquet and CSV files
with [cyan]--label[/], [cyan]--dense[/], [cyan]--categorical[/] and [cyan]--list[/], unless they are those of Criteo; if
you name none, an error lists the columns of the files. Exit code [green]0[/] even if some records are malformed,
[red]2[/] if all are, or if there is nothing to read.
""")
INSPECT_EXAMPLES = """\
[bold]Examples[/]

  emberscale data inspect data/criteo-synthetic/evaluation.tsv

  emberscale data inspect 'day_*.tsv.gz' --max-records 10000000 --output json

  emberscale data inspect 'clicks-*.parquet' --label clicked --dense price,age --categorical user,item --list history:50

  emberscale data inspect 'clicks-*.csv' --manifest job.yaml
"""

data_app = typer.Typer(name="data", help=HELP, no_args_is_help=True, rich_markup_mode="rich")
data_app.command(
    "convert", short_help="Writes data files in another format.", help=convert.HELP, epilog=convert.EXAMPLES
)(convert.convert)
data_app.command(
    "skew",
    short_help="Shows how skewed accesses are, and what hot rows would save.",
    help=skew.HELP,
    epilog=skew.EXAMPLES,
)(skew.skew)


@data_app.command(
    "synth",
    short_help="Writes a synthetic data set with the columns of Criteo.",
    help=SYNTH_HELP,
    epilog=SYNTH_EXAMPLES,
)
def synth(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write. The parents of an absolute path must exist.")
    ],
    rows: Annotated[int, typer.Option(help="Number of rows in all files together.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed; each has its own teacher and ids.")] = 0,
    parts: Annotated[int, typer.Option(help="Number of training files, which share the rows.")] = 1,
    evaluation_fraction: Annotated[
        float, typer.Option(help="Share of the rows, taken from the end, that goes to evaluation.tsv.")
    ] = 0.1,
    file_format: Annotated[FileFormat, typer.Option("--format", "-f", help="Format of the files.")] = FileFormat.CRITEO,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Writes a synthetic data set with the columns of Criteo."""
    # takes a moment to import, which `--help` should not cost
    from emberscale_trainer.data.synthetic import DatasetSpec

    with bad_input_exits():
        result = _write(out, DatasetSpec(rows, seed, parts, evaluation_fraction, file_format.data_format))
    if output is Output.JSON:
        typer.echo(json.dumps({"path": str(out), "written": result.written, **result.metadata}, indent=2))
    else:
        _show_synthesis(out, result)


def _write(out: Path, spec: "DatasetSpec") -> "SynthesisResult":
    from emberscale_trainer.data.synthetic import write_dataset

    with progress_bar("writing rows", MofNCompleteColumn(), TimeRemainingColumn(), total=spec.rows) as update:
        return write_dataset(out, spec, lambda rows: update(advance=rows))


def _show_synthesis(out: Path, result: "SynthesisResult") -> None:
    typer.echo(f"{out} {'is written' if result.written else 'already exists; nothing was done'}")
    table = _table("split", "files", "rows", "size", "positives", "teacher AUC", "teacher log loss")
    for split, measured in result.metadata["splits"].items():
        files = [file for file in result.metadata["files"] if file["name"].startswith(split)]
        table.add_row(
            split,
            str(len(files)),
            f"{measured['rows']:,}",
            bytes_text(sum(file["bytes"] for file in files)),
            f"{measured['positives'] / measured['rows']:.2%}",
            _score(measured["teacher_auc"]),
            _score(measured["teacher_log_loss"]),
        )
    open_console().print(table)


def _score(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(first: str, *numbers: str) -> Table:
    table = Table(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


@data_app.command("inspect", short_help="Shows what is in data files.", help=INSPECT_HELP, epilog=INSPECT_EXAMPLES)
@with_layout_options
def inspect(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Data files.")],
    max_records: Annotated[
        int, typer.Option(help="Most records to examine, spread evenly over all files; all records are counted.")
    ] = 1_000_000,
    *,
    described: LayoutOptions,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows what is in data files."""
    from emberscale_trainer.data.files import expand

    with bad_input_exits():
        if max_records < 1:
            raise InvalidError(f"--max-records must be at least 1 (got {max_records})")
        files = expand(paths)
        layout = layout_of([file.uri for file in files], described)
        if layout.format is DataFormat.CRITEO_TSV and not (described.manifest or described.from_format):
            _refuse_other_text(files, layout)
        summary = _inspect(files, layout, max_records)
        if not summary.records:
            raise InvalidError(f"{', '.join(paths)}: no records")
    if output is Output.JSON:
        typer.echo(json.dumps(asdict(summary), indent=2))
    else:
        _show_summary(summary, "08x" if layout.format is DataFormat.CRITEO_TSV else "d")
    with bad_input_exits():
        if summary.examined == summary.bad_records:
            raise InvalidError("all examined records are malformed, so there is nothing to show of the columns")


def _refuse_other_text(files: list[DataFile], layout: Layout) -> None:
    """Raises InvalidError for files that were taken for Criteo TSV by their names only, and are not."""
    from emberscale_trainer.data.records import DataUnavailableError

    for file in files:
        try:
            layout.raw_reader().check_file(file)
        except DataUnavailableError as error:
            raise InvalidError(
                f"{error}; files of this name are read as Criteo TSV: for other text, pass --from csv "
                "--delimiter '\\t' (or its delimiter), and describe its columns"
            ) from error


def _inspect(files: list[DataFile], layout: Layout, max_records: int) -> "DataSummary":
    from emberscale_trainer.data.inspect import inspect_files

    with stages_bar("looking for files", TimeRemainingColumn()) as tell:
        return inspect_files(files, layout.raw_reader(), max_records, tell)


def _show_summary(summary: "DataSummary", id_format: str) -> None:
    console = open_console()
    files = _table("file", "bytes", "records")
    for file in summary.files:
        files.add_row(file.uri, f"{file.bytes:,}", f"{file.records:,}")
    console.print(files)
    part = "all" if summary.examined == summary.records else f"{summary.examined:,} of"
    positives = "" if summary.positive_rate is None else f", {summary.positive_rate:.2%} positive"
    typer.echo(f"Examined {part} {summary.records:,} records: {summary.bad_records:,} malformed{positives}")
    for bad in summary.bad_record_samples:
        typer.echo(f"  {bad}")
    if summary.bad_records > len(summary.bad_record_samples):
        typer.echo(f"  and {summary.bad_records - len(summary.bad_record_samples):,} more")
    if summary.dense:
        dense = _table("dense", "missing", "min", "mean", "max")
        for numbers in summary.dense:
            row = (_number(numbers.minimum), _mean(numbers.mean), _number(numbers.maximum))
            dense.add_row(numbers.name, f"{numbers.missing:.1%}", *row)
        console.print(dense)
    if summary.categorical:
        categorical = _table("categorical", "missing", "distinct ids", "most frequent, with their share of records")
        for ids in summary.categorical:
            top = "  ".join(f"{_shown_id(one, id_format)} {one.share:5.1%}" for one in ids.top)
            categorical.add_row(ids.name, f"{ids.missing:.1%}", f"{ids.distinct:,}", top)
        console.print(categorical)
        for ids in summary.categorical:
            decimal = next((one.text for one in ids.top if one.text and _WHOLE_DECIMAL.fullmatch(one.text)), None)
            if decimal is not None:
                whole = decimal.partition(".")[0]
                typer.echo(f"{ids.name}: {decimal!r} is not the id {whole!r}; write whole numbers without a fraction")
    if summary.lists:
        lists = _table("lists", "empty", "ids a record", "longest", "truncated", "distinct ids", "most frequent")
        for one in summary.lists:
            top = "  ".join(f"{_shown_id(frequent, id_format)} {frequent.share:5.1%}" for frequent in one.top)
            numbers_of_it = (f"{one.empty:.1%}", f"{one.mean_length:.1f}", f"{one.longest:,}", f"{one.truncated:.1%}")
            lists.add_row(one.name, *numbers_of_it, f"{one.distinct:,}", top)
        console.print(lists)
    if summary.examined < summary.records:
        typer.echo("Distinct ids are those of the examined records; all records may have more.")


def _shown_id(one: "FrequentId", id_format: str) -> str:
    if one.text is None:
        return f"{one.id:{id_format}}"
    return escape(repr(one.text if len(one.text) <= _SHOWN_CHARACTERS else f"{one.text[:_SHOWN_CHARACTERS]}..."))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value.is_integer() else f"{value:,.4g}"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
