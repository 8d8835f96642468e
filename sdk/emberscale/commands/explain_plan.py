"""`emberscale explain-plan`: why the brain gave a job the shape that it has."""

import os
from pathlib import Path
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emberscale.brain_choice import BrainTokenFile, read_token
from emberscale.commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale.errors import BadInputError
from emberscale.run_folder import RunPaths, read_record
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.brain import default_database

GIB = 1 << 30
_FRONT_ROWS = 8

HELP = paragraphs("""\
Says why a job has the plan it has: the fit and how sure it is, the Pareto front, the point that was chosen, what it is
expected to gain and to cost, the past jobs behind a first plan, the memory forecast, and how the job recovers best from
the loss of a parameter server.

JOB is the folder of a run on this machine, or its name under runs/: what its brain planned is read from this user's
data folder. With [cyan]--brain[/] it is the UID of a job that the brain there knows, running or ended.

Exit code [red]2[/] for a job, a plan or a brain that cannot be found.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale explain-plan criteo-dlrm --plot plan.png

  emberscale explain-plan 0b1e7c5e-... --brain 127.0.0.1:50061 --brain-token-file token --output json
"""


def explain_plan(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A run's folder or name, or a UID.", show_default=False)],
    brain: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Asks the brain there.", show_default=False)
    ] = None,
    brain_token_file: BrainTokenFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draws the fit and the front (PNG).", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the brain.")] = 10.0,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Says why a job has the plan it has."""
    with bad_input_exits():
        explanation = _remembered(job) if brain is None else _ask(job, brain, read_token(brain_token_file), timeout)
        if plot is not None:
            try:
                draw_plan(explanation, plot)
            except OSError as error:
                raise BadInputError(f"--plot {plot}: cannot be written: {error.strerror}") from error
            typer.echo(f"drawn: {plot}", err=True)
    if output is Output.JSON:
        typer.echo(MessageToJson(explanation, preserving_proto_field_name=True))
    else:
        _show(explanation)


def _remembered(job: str) -> pb.PlanExplanation:
    """What the brain beside a run planned last, from the database that it wrote."""
    root = next((folder for folder in (Path(job), Path("runs", job)) if (folder / "run.json").exists()), None)
    if root is None:
        raise BadInputError(f"{job}: neither it nor {Path('runs', job)} is the folder of a run; give --brain for a UID")
    uid = read_record(RunPaths(root)).uid
    database = default_database(os.environ)
    if not database.exists():
        raise BadInputError(f"{root}: no job of this user was ever planned: {database} does not exist")
    # the brain's libraries take a second to import, which no other command should
    from emberscale_brain.history.database import DatabaseAwayError, DatabaseUnusableError
    from emberscale_brain.service.recall import recall

    try:
        explanation = recall(f"sqlite:///{database}", uid)
    except (DatabaseAwayError, DatabaseUnusableError) as error:
        raise BadInputError(f"{database}: {error}") from error
    if explanation is None:
        raise BadInputError(f"{root}: no plan was made for this run: its manifest gives its sizes, or --brain was off")
    return explanation


def _ask(job: str, brain: str, token: str, timeout: float) -> pb.PlanExplanation:
    with open_channel(brain, token) as channel:
        try:
            explanation: pb.PlanExplanation = BrainStub(channel).ExplainPlan(
                pb.ExplainPlanRequest(job_uid=job), timeout=timeout
            )
        except grpc.RpcError as error:
            raise BadInputError(f"brain at {brain}: {error.code().name}: {error.details()}") from error
    return explanation


def describe(shape: pb.Shape) -> str:
    """A shape in words."""
    return (
        f"{shape.workers} workers x {shape.worker_cpu:g} cores {shape.worker_memory / GIB:.3g} GiB, "
        f"{shape.ps} PS x {shape.ps_cpu:g} cores {shape.ps_memory / GIB:.3g} GiB"
    )


def _show(explanation: pb.PlanExplanation) -> None:
    console, plan, fit = Console(), explanation.plan, explanation.fit
    console.print(f"[bold]{plan.job_uid}[/], plan {plan.version} by {plan.planner or 'nobody yet'}: {plan.action}")
    if plan.HasField("shape"):
        console.print(f"  {describe(plan.shape)}")
    console.print(f"  {escape(plan.reason)}")
    if plan.stale_because:
        console.print(f"  [yellow]no newer plan:[/] {escape(plan.stale_because)}")
    if explanation.HasField("fit"):
        console.print(
            f"fit: error {fit.rmsle:.3f} (RMSLE) over {fit.profiles} profiles of {fit.distinct_shapes} shapes, "
            f"{fit.outliers} outliers set aside, noise {fit.noise:.1%}, {fit.prior_share:.0%} from similar jobs"
        )
    if explanation.HasField("chosen"):
        console.print(
            f"expected: {explanation.chosen.throughput:,.0f} samples/s +- {explanation.chosen.uncertainty:.0%}, "
            f"{explanation.expected_gain:+,.0f} samples/s and {explanation.expected_cost:+.2f} an hour, "
            f"{explanation.overhead_seconds:.0f} s of overhead, done {explanation.saved_seconds:,.0f} s sooner"
        )
    if explanation.HasField("memory"):
        memory = explanation.memory
        limit = f"; full at {memory.oom_at_samples:,.0f} samples" if memory.oom_at_samples else ""
        console.print(
            f"memory of the largest PS at the end: {memory.expected / GIB:.1f} GiB "
            f"({memory.lower / GIB:.1f} to {memory.upper / GIB:.1f}, {memory.law}){limit}"
        )
    if plan.HasField("fault_tolerance"):
        console.print(f"recovery: {escape(plan.fault_tolerance.reason)}")
    for similar in explanation.similar:
        console.print(f"like {similar.job_uid} ({similar.similarity:.0%}): {describe(similar.shape)}")
    if explanation.front:
        console.print(_front(explanation))


def _front(explanation: pb.PlanExplanation) -> Table:
    """The Pareto front, thinned evenly to a few rows."""
    table = Table("shape", title="Pareto front", title_justify="left")
    table.add_column("cost/h", justify="right")
    table.add_column("samples/s", justify="right")
    step = max(1, len(explanation.front) // _FRONT_ROWS)
    for point in explanation.front[::step]:
        table.add_row(describe(point.shape), f"{point.cost_per_hour:.2f}", f"{point.throughput:,.0f}")
    return table


def draw_plan(explanation: pb.PlanExplanation, picture: Path) -> None:
    """Draws predicted against measured throughput, and the front with the present and the chosen point."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        fit, front = figure.subplots(1, 2)
        measured = [point.profile.throughput for point in explanation.measured]
        fit.scatter(measured, [point.predicted for point in explanation.measured], color="#2f6db5")
        if measured:
            fit.plot([0, max(measured)], [0, max(measured)], color="#8a8f98", linewidth=1)
        fit.set_title("Fit against measurements")
        fit.set_xlabel("measured samples/s")
        fit.set_ylabel("predicted samples/s")
        points = explanation.front
        front.plot([p.cost_per_hour for p in points], [p.throughput for p in points], ".-", color="#8a8f98")
        for name, colour in (("present", "#d9722e"), ("chosen", "#3a8f5c")):
            if explanation.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
                point = getattr(explanation, name)
                front.scatter([point.cost_per_hour], [point.throughput], color=colour, label=name, zorder=3)
        front.set_title("Pareto front")
        front.set_xlabel("cost per hour")
        front.set_ylabel("predicted samples/s")
        if front.get_legend_handles_labels()[0]:
            front.legend(frameon=False)
        figure.savefig(picture, dpi=140)
