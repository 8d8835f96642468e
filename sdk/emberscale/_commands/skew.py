"""`emberscale data skew`: how skewed the accesses of a data set are, and what hot rows would save."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TimeRemainingColumn

from emberscale._commands.layout import LayoutOptions, layout_of, with_layout_options
from emberscale._commands.options import (
    Output,
    OutputFormat,
    Overrides,
    bad_input_exits,
    paragraphs,
)
from emberscale._console import open_console, stages_bar
from emberscale._run.preflight import check_data, ensure_drawable
from emberscale._run.summary import finite_json
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import (
    InitializerSpec,
    OptimizerSpec,
    OptimizerType,
    TrainingJob,
    load_manifest,
    memory_bytes,
)
from emberscale_api.job.resolved import ResolvedModel, TableSpec, columns_of, resolve_model

if TYPE_CHECKING:
    from emberscale_api.job import ColumnMapping
    from emberscale_trainer.data.records import RecordFormat
    from emberscale_trainer.hot.skew import SkewReport, SkewRequest

HELP = paragraphs("""\
Shows how unevenly a data set accesses the rows of its embedding tables, and what workers would save by keeping the
popular rows, the [bold]hot[/] rows.

Give data files, or a manifest (.yaml) with training files, tables, batch size and workers. The command counts accesses
in a sample of 5% of the records, by the method of FAE (Adnan et al., VLDB 2022). For each memory budget it prints the
threshold of accesses from which on a row is hot, the number of hot rows, their share of the accesses, and the share of
samples that access [bold]only[/] hot rows: workers could train these without the parameter servers. It measures that
share, and the bytes of rows on the wire, on records outside the sample.

It prints the bytes for workers that share one copy of the hot rows, and for workers with a copy each, which must
exchange every step. Dense parameters and headers are not included.

[cyan]--exact[/] reads everything twice and prints the error of the sample. Exit code [red]2[/] for files that cannot be
read.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale data skew job.yaml --plot skew.png

  emberscale data skew 'day_*.tsv.gz' --budget 16Mi,64Mi,256Mi --exact

  emberscale data skew 's3://bucket/clicks-*.parquet' --label clicked --categorical user,item --list history:50

  emberscale profile job.yaml -o json > profile.json; emberscale data skew job.yaml --profile profile.json
"""
_BUDGETS = "1Mi,4Mi,16Mi,64Mi,256Mi"
_MANIFEST_SUFFIXES = {".yaml", ".yml"}
_DEFAULT_BATCH_SIZE, _DEFAULT_WORKERS, _DEFAULT_DIMENSION = 2048, 2, 16
_TABLES = "Tables and batches, without a manifest"


@with_layout_options
def skew(
    paths: Annotated[
        list[str], typer.Argument(metavar="FILE...|MANIFEST", help="Files, globs, URIs; or a TrainingJob.")
    ],
    budget: Annotated[
        list[str], typer.Option(metavar="QUANTITY,...", help="Memory for hot rows in a worker. Repeatable.")
    ] = [_BUDGETS],  # noqa: B006  # typer copies it
    sample: Annotated[float, typer.Option(help="Share of the records to count, above 0 and at most 0.5.")] = 0.05,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also counts every record, to measure the error of the sample.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draws the result into FILE (.png, .svg or .pdf).")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of `emberscale profile -o json` for this job; adds a bound on the speed-up."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Each seed draws another sample.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"{_DEFAULT_BATCH_SIZE} if not given.", rich_help_panel=_TABLES)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help=f"{_DEFAULT_WORKERS} if not given.", rich_help_panel=_TABLES)
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of every table. {_DEFAULT_DIMENSION} if not given.", rich_help_panel=_TABLES),
    ] = None,
    optimizer: Annotated[
        OptimizerType | None,
        typer.Option(help="Its state is part of a row. RowWiseAdagrad if not given.", rich_help_panel=_TABLES),
    ] = None,
    overrides: Overrides = None,
    *,
    described: LayoutOptions,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows how skewed the accesses of a data set are."""
    from emberscale_trainer.data.files import expand
    from emberscale_trainer.data.formats import format_reader

    with bad_input_exits():
        budgets = _budgets(budget)
        if not 0 < sample <= 0.5:
            raise InvalidError(f"--sample must be above 0 and at most 0.5 (got {sample:g})")
        if plot is not None:
            ensure_drawable(plot)
        speeds = None if profile is None else _speeds(profile)
        job, paths = _job(paths, described.manifest, overrides)
        if job is not None and (dimension is not None or optimizer is not None):
            raise InvalidError(
                "--dimension and --optimizer are for data files without a manifest: change the manifest with --set"
            )
        if job is not None and described.says_columns_or_format:
            raise InvalidError("the manifest describes the files: omit --from, --label and the like")
        files = expand(paths)
        if job is not None:
            reader = format_reader(job.spec.data.format, columns_of(job.spec.data), job.spec.data.csv, raw=True)
            model = resolve_model(job.spec)
        else:
            layout = layout_of([file.uri for file in files], described)
            reader = layout.raw_reader()
            model = _plain_model(layout.columns, dimension or _DEFAULT_DIMENSION, optimizer)
        request = _request(job, budgets, batch_size, workers, sample, seed, exact)
        report = _measure(files, reader, model, request)
        if plot is not None:
            # matplotlib takes a second to import, which only this option should cost
            from emberscale._reports.skew_picture import draw_skew

            with os_errors_named(f"--plot {plot}: cannot be written"):
                draw_skew(report, plot)
    gains = None if speeds is None else [_bound(speeds, point.hot_share) for point in report.budgets]
    if output is Output.JSON:
        document = asdict(report)
        for number, point in enumerate(document["budgets"]):
            point["largest_speedup"] = gains[number] if gains else None
        typer.echo(finite_json({**document, "plot": str(plot) if plot else None}))
        return
    from emberscale._reports.skew_tables import skew_tables

    console = open_console()
    for part in skew_tables(report, gains):
        console.print(part)
    if plot is not None:
        console.print(f"picture: {plot}", highlight=False)


def _job(
    paths: list[str], manifest: Path | None, overrides: Sequence[str] | None
) -> tuple[TrainingJob | None, list[str]]:
    """Returns the named job, if any, and the named data files, or else those of the job. Raises InvalidError."""
    alone = len(paths) == 1 and Path(paths[0]).suffix in _MANIFEST_SUFFIXES
    if alone and manifest is not None:
        raise InvalidError(f"{paths[0]} is a manifest: omit --manifest, or name data files")
    source = Path(paths[0]) if alone else manifest
    if source is None:
        if overrides:
            raise InvalidError("--set changes a manifest: name one")
        return None, paths
    job = load_manifest(source, overrides or ())
    if alone:
        check_data(job)
        paths = list(job.spec.data.train)
    return job, paths


def _budgets(texts: Sequence[str]) -> tuple[int, ...]:
    found = set()
    for text in (name for one in texts for name in one.split(",") if name):
        try:
            size = memory_bytes(text.strip())
        except ValueError as error:
            raise InvalidError(f"--budget: {error}") from error
        if size < 1:
            raise InvalidError(f"--budget {text}: must be above 0")
        found.add(size)
    if not found:
        raise InvalidError("--budget: name at least one, such as 256Mi")
    return tuple(sorted(found))


def _plain_model(columns: "ColumnMapping", dimension: int, optimizer: OptimizerType | None) -> ResolvedModel:
    """A table for each column, all of them alike."""
    kind = optimizer or OptimizerType.ROW_WISE_ADAGRAD
    tables = tuple(
        TableSpec(number, name, number, dimension, OptimizerSpec(type=kind, learning_rate=0.05), InitializerSpec(), 0)
        for number, name in enumerate(columns.id_columns)
    )
    return ResolvedModel(columns, tables)


def _request(
    job: TrainingJob | None,
    budgets: tuple[int, ...],
    batch_size: int | None,
    workers: int | None,
    rate: float,
    seed: int,
    exact: bool,
) -> "SkewRequest":
    from emberscale_trainer.hot.skew import SkewRequest

    if job is not None:
        batch_size = batch_size or job.spec.training.batch_size
        workers = workers or job.spec.worker.initial_replicas
    return SkewRequest(budgets, batch_size or _DEFAULT_BATCH_SIZE, workers or _DEFAULT_WORKERS, rate, seed, exact)


def _measure(
    files: Sequence[Any], reader: "RecordFormat", model: ResolvedModel, request: "SkewRequest"
) -> "SkewReport":
    from emberscale_trainer.hot.sampler import index_data
    from emberscale_trainer.hot.skew import measure_skew

    with stages_bar("looking for records", TimeRemainingColumn()) as tell:
        return measure_skew(index_data(files, reader, tell), model, request, tell)


def _speeds(profile: Path) -> tuple[float, float]:
    """Samples/s of a job and of its roof."""
    try:
        document = json.loads(profile.read_text(encoding="utf-8"))
        return float(document["samples_per_second"]), float(document["roof"]["samples_per_second"])
    except OSError as error:
        raise InvalidError(f"--profile {profile}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidError(f"--profile {profile}: is not what `emberscale profile JOB --output json` prints") from error


def _bound(speeds: tuple[float, float], hot_share: float) -> float:
    """Returns the speed-up if hot batches ran at the roof, the speed of a job without parameter servers."""
    speed, roof = speeds
    return 1 / (hot_share * min(speed / roof, 1.0) + 1 - hot_share)
