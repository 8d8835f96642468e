"""`emberscale explain-plan`: why the brain gave a job the shape that it has."""

import os
from pathlib import Path
from typing import Annotated

import grpc
import matplotlib as mpl
import typer
from google.protobuf.json_format import MessageToJson
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emberscale.commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale.errors import BadInputError
from emberscale_api.environment import TOKEN_FILE
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.token import open_channel

GIB = 1 << 30
_FRONT_ROWS = 8

HELP = paragraphs("""\
Asks the brain why a job has the plan it has: the fit and how sure it is, the Pareto front, the point that was chosen,
what it is expected to gain and to cost, the past jobs behind a first plan, and the memory forecast.

Works for jobs that have ended too, as long as the brain's database keeps them. Exit code [red]2[/] for a job or a brain
that cannot be found.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale explain-plan 0b1e7c5e --brain 127.0.0.1:50061 --token-file token

  emberscale explain-plan 0b1e7c5e --plot plan.png --output json
"""


def explain_plan_command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's UID.", show_default=False)],
    brain: Annotated[str, typer.Option(help="Host and port of the brain.")] = "127.0.0.1:50061",
    token_file: Annotated[
        Path | None, typer.Option(help=f"The brain's token; else {TOKEN_FILE} names it.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draws the fit and the front (PNG).", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the brain.")] = 10.0,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Says why a job has the plan it has."""
    with bad_input_exits():
        explanation = _ask(job, brain, _token(token_file), timeout)
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


def _token(given: Path | None) -> str:
    path = given or os.environ.get(TOKEN_FILE)
    if path is None:
        raise BadInputError(f"--token-file: is not given, and {TOKEN_FILE} is not set")
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInputError(f"--token-file {path}: cannot be read: {error.strerror}") from error


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
        front.legend(frameon=False)
        figure.savefig(picture, dpi=140)
