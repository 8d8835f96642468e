"""`emberscale status`: where a TrainingJob on a cluster stands."""

from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from emberscale.commands.cluster import JobName, Namespace
from emberscale.commands.options import Output, OutputFormat, bad_input_exits
from emberscale_api.job.status import JobPhase, TrainingJobStatus

HELP = "Shows where a TrainingJob on the cluster stands; exit code 1 for a Failed one."


def status(
    name: JobName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Goes on until the job ends.")] = False,
    namespace: Namespace = None,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows where a TrainingJob stands."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        client = TrainingJobClient(namespace)
        found = client.status(name)
        if watch:
            with Live(render(name, found), console=Console(stderr=output is Output.JSON)) as live:
                found = client.wait(name, observer=lambda latest: live.update(render(name, latest)))
        elif output is Output.TEXT:
            Console().print(render(name, found))
        if output is Output.JSON:
            typer.echo(found.model_dump_json(by_alias=True, exclude_none=True))
    raise typer.Exit(1 if found.phase is JobPhase.FAILED else 0)


def render(name: str, status: TrainingJobStatus) -> Group:
    """The status for people."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("Job", name)
    table.add_row("Phase", f"{status.phase} ({status.reason})" if status.reason else str(status.phase))
    table.add_row("", status.message)
    for title, role in (("Workers", status.worker), ("PS", status.ps)):
        if role is not None:
            restarts = f", {role.restarts} restarts" if role.restarts else ""
            table.add_row(title, f"{role.ready} of {role.wanted} ready{restarts}")
    progress = status.progress
    if progress is not None and progress.expected_samples:
        eta = f", {progress.eta} left" if progress.eta else ""
        table.add_row(
            "Progress",
            f"{progress.percent} of {progress.expected_samples:,} samples, {progress.samples_per_second:,}/s{eta}",
        )
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
