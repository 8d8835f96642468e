"""Commands for TrainingJobs on the cluster that KUBECONFIG names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from emberscale._commands.options import ManifestFile, Namespace, Output, OutputFormat, Overrides, bad_input_exits
from emberscale._console import open_console
from emberscale_api.errors import InvalidError
from emberscale_api.job import load_manifest
from emberscale_api.job.status import RESTING, CheckpointCost, ConditionType, JobPhase, TrainingJobStatus
from emberscale_api.readable import bytes_text, duration_text, rate_text

if TYPE_CHECKING:
    from emberscale._client import TrainingJobClient

JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a TrainingJob.")]


def submit(file: ManifestFile, overrides: Overrides = None, namespace: Namespace = None) -> None:
    """Creates a TrainingJob on the cluster that KUBECONFIG names."""
    with bad_input_exits():
        job = load_manifest(file, overrides or ())
        client = _client(namespace)
        name = client.submit(job)
        typer.echo(f"{name}: submitted to namespace {client.namespace}; to follow it: emberscale status {name} --watch")


def status(
    name: JobName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Updates until the job ends.")] = False,
    namespace: Namespace = None,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows the status of a TrainingJob on the cluster; exit code 1 if it has Failed."""
    with bad_input_exits(), _local_run_named(name):
        client = _client(namespace)
        found = client.status(name)
        if watch:
            with Live(render(name, found), console=open_console(stderr=output is Output.JSON)) as live:
                found = client.wait(name, observer=lambda latest: live.update(render(name, latest)))
        elif output is Output.TEXT:
            open_console().print(render(name, found))
        if output is Output.JSON:
            typer.echo(found.model_dump_json(by_alias=True, exclude_none=True))
    raise typer.Exit(1 if found.phase is JobPhase.FAILED else 0)


def logs(
    name: JobName,
    member: Annotated[
        str, typer.Argument(help="Member whose log to print, such as master-0, ps-1 or worker-0.")
    ] = "master-0",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follows the log until the pod ends.")] = False,
    namespace: Namespace = None,
) -> None:
    """Prints the log of a TrainingJob's master, or of another of its members."""
    with bad_input_exits(), _local_run_named(name):
        for line in _client(namespace).logs(name, member, follow):
            typer.echo(line)


def suspend(name: JobName, namespace: Namespace = None) -> None:
    """Takes a checkpoint of a TrainingJob and deletes its pods; `emberscale resume` continues it."""
    with bad_input_exits(), _local_run_named(name):
        _client(namespace).suspend(name)
        typer.echo(f"{name}: suspends once its checkpoint is complete")


def resume(name: JobName, namespace: Namespace = None) -> None:
    """Continues a suspended TrainingJob from its checkpoint."""
    with bad_input_exits(), _local_run_named(name):
        _client(namespace).resume(name)
        typer.echo(f"{name}: resumes")


def delete(name: JobName, namespace: Namespace = None) -> None:
    """Deletes a TrainingJob and its pods; its checkpoints stay."""
    with bad_input_exits(), _local_run_named(name):
        _client(namespace).delete(name)
        typer.echo(f"{name}: deleted")


@contextmanager
def _local_run_named(name: str) -> Iterator[None]:
    """Adds to an InvalidError that the name is that of a run on this machine, if it is."""
    try:
        yield
    except InvalidError as error:
        folder = Path("runs", name)
        if not (folder / "run.json").exists():
            raise
        raise InvalidError(
            f"{error}; this command is for jobs on a cluster, and {folder} holds a run of this machine, with its "
            "results and logs"
        ) from error


def _client(namespace: str | None) -> "TrainingJobClient":
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale._client import TrainingJobClient

    return TrainingJobClient(namespace)


def _cost(newest: CheckpointCost, restore_seconds: float | None) -> str:
    """Describes the cost of the newest checkpoint, and of a restore from it."""
    took = "" if restore_seconds is None else f", about {duration_text(restore_seconds)}"
    return (
        f"{newest.checkpoint}: {bytes_text(newest.written_bytes)} in {duration_text(newest.seconds)}, pushes held "
        f"{duration_text(newest.held_seconds)}; a restore reads {bytes_text(newest.bytes)}{took}"
    )


def render(name: str, status: TrainingJobStatus) -> Group:
    """The status as text."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("Job", name)
    table.add_row("Phase", f"{status.phase} ({status.reason})" if status.reason else str(status.phase))
    table.add_row("", status.message)
    for title, role in (("Workers", status.worker), ("PS", status.ps)):
        if role is not None:
            restarts = f", {role.restarts} restarts" if role.restarts else ""
            table.add_row(title, f"{role.ready} of {role.wanted} ready{restarts}")
    scaling = status.condition(ConditionType.SCALING)
    if scaling is not None and (scaling.status == "True" or scaling.reason == "GaveUpScaling"):
        table.add_row("Scaling", f"{scaling.reason}: {scaling.message}")
    slow = status.condition(ConditionType.SLOW)
    if slow is not None and slow.status == "True":
        table.add_row("Slow", f"{slow.message} (since {slow.last_transition_time:%H:%M:%S})")
    protected = status.condition(ConditionType.PROTECTED)
    if protected is not None and status.phase not in RESTING:
        table.add_row("Parity", f"{protected.reason}: {protected.message}")
    progress = status.progress
    if progress is not None and progress.expected_samples:
        eta = f", {progress.eta} left" if progress.eta else ""
        table.add_row(
            "Progress",
            f"{progress.percent} of {progress.expected_samples:,} samples, "
            f"{rate_text(progress.samples_per_second)}{eta}",
        )
        if progress.checkpoints:
            table.add_row("Checkpoint", _cost(progress.checkpoints[-1], progress.restore_seconds))
        if progress.loss is not None:
            auc = f", AUC {progress.auc:.4f}" if progress.auc is not None else ""
            table.add_row("Loss", f"{progress.loss:.4f}{auc}")
    warnings = [f"warning: {warning}" for warning in (progress.warnings if progress is not None else ())]
    waiting = [
        f"{member.role}-{member.index}: {member.reason} {member.message}".rstrip()
        for member in status.members
        if member.reason and member.state != "Running"
    ]
    return Group(table, *(Text(line, style="yellow") for line in (*warnings, *waiting[:10])))
