"""`emberscale profile`: where a job's time goes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from emberscale._commands.options import (
    ManifestFile,
    Output,
    OutputFormat,
    Overrides,
    bad_input_exits,
    paragraphs,
)
from emberscale._console import open_console, stages_bar
from emberscale._run.interruption import Interruption
from emberscale._run.preflight import check_columns, check_data, check_model, ensure_drawable
from emberscale._run.summary import finite_json
from emberscale_api.job import load_manifest
from emberscale_api.readable import duration_text, rate_text

if TYPE_CHECKING:
    from emberscale._profiling.job_profile import TimeBreakdown

HELP = paragraphs("""\
Trains a sample of a job on this machine, shows where the time goes, and discards the model.

The command prints the share of time by stage for every thread of the workers and for the parameter servers, the bytes
on the wire per sample, and the number of ids per key. It also measures the [bold]roof[/]: the speed of the workers'
code in one process, with as many threads, on batches whose rows are already there. A job whose parameter servers cost
nothing would reach it. The roof is measured after the job: as the speed of a machine varies, a job close to it may be
above 100%.

Evaluation, checkpoints, and the start of training with its small bound on staleness are not part of the measurement.
The picture shows all figures.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale profile deploy/examples/criteo-dlrm.yaml

  emberscale profile job.yaml --set spec.ps.replicas=4 --samples 1000000

  emberscale profile job.yaml --output json | jq .share_of_roof
"""


def profile(
    file: ManifestFile,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Samples to measure, after a quarter as many to warm up.")
    ] = 400_000,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw the profile (.png, .svg or .pdf).")] = Path(
        "profile.png"
    ),
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows where a job's time goes."""
    with Interruption() as interruption, bad_input_exits():
        job = load_manifest(file, overrides or ())
        check_data(job)
        check_columns(job.spec.data)
        for remark in check_model(job):
            typer.echo(remark, err=True)
        ensure_drawable(plot)
        from emberscale._profiling.measure import ProfileFailedError, profile_job

        try:
            with stages_bar("starting", MofNCompleteColumn(), TextColumn("samples")) as tell:
                measured = profile_job(job, samples, interruption, tell)
        except ProfileFailedError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1 if interruption.signal is None else 128 + interruption.signal) from error
    # matplotlib takes a second to import, which only this moment should cost
    from emberscale._profiling.picture import draw_profile

    draw_profile(measured, plot)
    if output is Output.JSON:
        typer.echo(finite_json({**measured.as_document(), "plot": str(plot)}))
    else:
        _print(measured, plot)


def share_of_roof_text(share: float) -> str:
    """A share, and why it may be above 1: the job and its roof are measured one after the other."""
    noise = "; servers cost no more than the speed of this machine varies between the two measurements"
    return f"{share:.0%}{noise if share > 1 else ''}"


def _print(measured: "TimeBreakdown", plot: Path) -> None:
    from emberscale._profiling.job_profile import WORKER_THREADS
    from emberscale_api.metrics import WAITS

    console = open_console()
    table = Table("process", "thread", "stage", title=f"{measured.name}: where the time goes", title_justify="left")
    table.add_column("share of time", justify="right")
    table.add_column("ms a batch", justify="right")
    per_batch = 1e3 * measured.seconds * measured.workers / measured.batches
    for thread, stages in WORKER_THREADS.items():
        for stage in stages:
            share = measured.worker_stages[stage]
            mark = " *" if thread == measured.bottleneck and stage not in WAITS else ""
            table.add_row("worker", thread, stage + mark, f"{share:.1%}", f"{share * per_batch:.2f}")
    table.add_section()
    per_batch = 1e3 * measured.seconds / measured.batches
    for stage, share in measured.server_stages.items():
        table.add_row("ps", "all", stage, f"{share:.1%}", f"{share * per_batch:.2f}")
    console.print(table)
    roof = measured.roof
    console.print("* the busiest thread of the workers; for the rest of the time, a thread waits for the others\n")
    received, sent = measured.received_bytes_per_sample, measured.sent_bytes_per_sample
    cpu, roof_cpu = 1e6 * measured.cpu_seconds_per_sample, 1e6 * roof.cpu_seconds_per_sample
    lines = (
        ("speed", f"{rate_text(measured.samples_per_second)} over {duration_text(measured.seconds)}"),
        ("roof", f"{rate_text(roof.samples_per_second)} without parameter servers, {roof.threads} threads"),
        ("share of the roof", share_of_roof_text(measured.share_of_roof)),
        ("CPU time", f"{cpu:,.1f} µs a sample, all processes; without parameter servers {roof_cpu:,.1f}"),
        ("on the wire", f"{received:,.0f} bytes received and {sent:,.0f} sent a sample, by the workers"),
        ("de-duplication", f"{measured.ids_per_key:.2f} ids a key"),
        ("staleness bound", f"requests were held for {duration_text(measured.hold_seconds)} in all"),
        ("picture", str(plot)),
    )
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    summary.add_column(style="dim", no_wrap=True)
    summary.add_column(overflow="fold")
    for name, text in lines:
        summary.add_row(name, text)
    console.print(summary)
