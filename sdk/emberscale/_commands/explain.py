"""`emberscale explain`: what a manifest means."""

from itertools import groupby
from pathlib import Path

import typer
import yaml
from rich.syntax import Syntax
from rich.table import Table

from emberscale._commands.options import ManifestFile, Overrides, bad_input_exits, paragraphs
from emberscale._console import open_console
from emberscale_api.job import (
    DataContinuation,
    FlashMode,
    InitializerType,
    RoleSpec,
    TableSpec,
    TrainingJob,
    load_manifest,
    resolve_model,
)
from emberscale_api.job.roles import Role
from emberscale_api.job.units import IN_WORDS
from emberscale_api.readable import bytes_text, duration_text
from emberscale_operator.kubernetes.names import budget_name
from emberscale_operator.machine import demands_of, leave_seconds

HELP = paragraphs("""\
Prints a manifest with every default filled in, then its embedding tables, the processes that it would start and their
resources, the sizes that the brain would plan, and the paths that a run reads and writes. Starts nothing.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale explain deploy/examples/criteo-dlrm.yaml

  emberscale explain job.yaml --set spec.ps.replicas=4
"""


def explain(file: ManifestFile, overrides: Overrides = None) -> None:
    """Shows what a manifest resolves to."""
    with bad_input_exits():
        job = load_manifest(file, overrides or ())
    console = open_console()
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True, context=IN_WORDS)
    text = yaml.safe_dump(document, sort_keys=False)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text)
    for table in (tables_of(job), rows_of(job), processes_of(job), disruptions_of(job), files_of(job)):
        if table.row_count:
            console.print(table)
            console.print()


def tables_of(job: TrainingJob) -> Table:
    """Returns a table with one row for every run of equal embedding tables."""
    table = Table(
        "tables", "dimension", "pooling", "optimizer", "initializer", title="Embedding tables", title_justify="left"
    )
    for alike, group in groupby(resolve_model(job.spec).tables, key=_settings):
        table.add_row(_name([entry.name for entry in group]), *alike)
    return table


def _settings(table: TableSpec) -> tuple[str, ...]:
    initializer = table.initializer
    return (
        str(table.dimension),
        table.pooling or "one id",
        f"{table.optimizer.type} {table.optimizer.learning_rate:g}",
        initializer.type if initializer.type is InitializerType.ZEROS else f"{initializer.type} {initializer.scale:g}",
    )


def rows_of(job: TrainingJob) -> Table:
    """When ids get rows, and when rows are removed; only for tables that set admission or eviction."""
    table = Table("tables", "added at push", "most rows", "removed after", title="Rows", title_justify="left")
    for (admission, eviction), group in groupby(
        resolve_model(job.spec).tables, key=lambda spec: (spec.admission, spec.eviction)
    ):
        if admission.min_count > 1 or eviction.removes_rows:
            most, ttl = eviction.max_rows, eviction.ttl_batches
            table.add_row(
                _name([entry.name for entry in group]),
                str(admission.min_count),
                "any" if most is None else f"{most:,}",
                "never" if ttl is None else f"{ttl:,} batches without a push",
            )
    return table


def _name(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def processes_of(job: TrainingJob) -> Table:
    """Returns a table with a row per process, or one for a role with a planned number; marks planned values."""
    spec, planned = job.spec, job.spec.leaves_replicas_open
    table = Table("process", "CPU cores", "memory limit", title="Processes", title_justify="left")
    table.add_row("redis-0", "any", "none")
    flash = spec.checkpoint.flash
    if flash.mode is not FlashMode.DISABLED:
        table.add_row("redis-1", "any", f"{bytes_text(flash.bytes_limit)} of flash checkpoints")
    if planned:
        table.add_row("brain-0", "any", "none")
        table.caption = "planned: chosen by the brain within the bounds, and adjusted while the job trains"
        table.caption_justify = "left"
    for demand in demands_of(spec):
        role = {Role.PS: spec.ps, Role.WORKER: spec.worker}.get(demand.role)
        names = [f"{demand.role}-{index}" for index in range(demand.replicas)]
        open_cores, open_memory = "any", "none"
        if planned and role is not None:
            open_cores = open_memory = "planned"
            names = names if role.replicas is not None else [f"{demand.role}: {_bounds(role)}, planned"]
        cores, memory = demand.resources.cpu_cores, demand.resources.memory_bytes
        for name in names:
            table.add_row(
                name,
                open_cores if cores is None else f"{cores:g}",
                open_memory if memory is None else bytes_text(memory),
            )
    return table


_TRAINS = {
    DataContinuation.FRESH: "all data",
    DataContinuation.APPEND: "files that the checkpoint has not trained",
    DataContinuation.RESUME: "the rest of the same data",
}


def _bounds(role: RoleSpec) -> str:
    least, most = role.min_replicas or 1, role.max_replicas
    return f"{least} or more" if most is None else f"{least} to {most}"


def disruptions_of(job: TrainingJob) -> Table:
    """Returns a table of what a cluster may do to parameter servers when it drains their nodes."""
    table = Table(
        "PodDisruptionBudget",
        "evictions at a time",
        "grace period of a PS",
        title="Node drains, on a cluster",
        title_justify="left",
    )
    (resources,) = (demand.resources for demand in demands_of(job.spec) if demand.role is Role.PS)
    is_planned = job.spec.leaves_replicas_open and resources.memory_bytes is None
    seconds = f"{duration_text(leave_seconds(resources))}{', or more, by its memory' if is_planned else ''}"
    table.add_row(budget_name(job.metadata.name), "1", f"{seconds}, to move its rows")
    return table


def files_of(job: TrainingJob) -> Table:
    """Returns a table of the paths that `emberscale run` reads and writes."""
    root = Path("runs", job.metadata.name)
    table = Table(title="Files", title_justify="left")
    table.add_column("what")
    table.add_column("where", overflow="fold")
    table.add_row("training data", ", ".join(job.spec.data.train))
    table.add_row("held-out data", ", ".join(job.spec.data.evaluation) or "none")
    table.add_row("run", f"{root}/ (or --workdir)")
    table.add_row("checkpoints", job.spec.checkpoint.uri or f"{root}/checkpoints/")
    if (initial := job.spec.checkpoint.initial_from) is not None:
        which = "the newest checkpoint" if initial.id is None else f"checkpoint {initial.id}"
        table.add_row("starts from", f"{which} in {initial.uri}, and trains: {_TRAINS[job.spec.data.continuation]}")
    table.add_row("model", f"{root}/model/")
    table.add_row("logs", f"{root}/logs/<process>.log")
    table.add_row("summary, metrics", f"{root}/summary.json, metrics.csv, metrics.png")
    return table
