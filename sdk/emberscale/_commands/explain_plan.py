"""`emberscale explain-plan`: why the brain gave a job the shape that it has."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.markup import escape

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console
from emberscale._reports.plan_report import plan_report
from emberscale._run.brain_choice import BrainCaFile, BrainTokenFile, read_authority, read_token
from emberscale._run.hot import hot_in_words, hot_of_run
from emberscale._run.preflight import ensure_drawable
from emberscale._run.record import RunPaths, RunRecord, read_record
from emberscale._run.summary import finite_json
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import ScalingMode
from emberscale_api.readable import duration_text
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.tls import handshake_problem
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.brain import default_database

HELP = paragraphs("""\
Explains the plan of a job: the fit and its uncertainty, the Pareto front, the chosen point with its expected gain and
cost, the past jobs behind a first plan, the memory forecast, and the best way to recover from the loss of a parameter
server. For a run on this machine with hotEmbeddings, it also says whether workers train rounds of batches, why, and
what that saves.

JOB is the folder of a run on this machine, or its name under runs/; the command reads the plan from the brain's
database in this user's data folder. With [cyan]--brain[/], JOB is the UID of a running or ended job that this brain
knows.

Exit code [red]2[/] for a job, a plan or a brain that cannot be found, and with [cyan]--plot[/] for a plan from before
the first measurement, which has nothing to draw.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale explain-plan criteo-dlrm --plot plan.png

  emberscale explain-plan 0b1e7c5e-... --brain 127.0.0.1:50061 --brain-token-file token --output json
"""


def explain_plan(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Folder or name of a run; with --brain, the UID of a job.")],
    brain: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Asks the brain at this address.")] = None,
    brain_token_file: BrainTokenFile = None,
    brain_ca_file: BrainCaFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draws the fit and the Pareto front into FILE (.png, .svg or .pdf)."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the brain.")] = 10.0,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Says why a job has the plan it has."""
    with bad_input_exits():
        hot: Mapping[str, Any] = {}
        root: Path | None = None
        if plot is not None:
            ensure_drawable(plot)
        if brain is None:
            root = _root_of(job)
            explanation, hot = _remembered(root), hot_of_run(root)
        else:
            explanation = _ask(job, brain, read_token(brain_token_file), read_authority(brain_ca_file), timeout)
        if plot is not None:
            _refuse_empty_picture(explanation, plot, root)
            from emberscale._reports.pictures import draw_plan  # matplotlib takes long to import

            with os_errors_named(f"--plot {plot}: cannot be written"):
                draw_plan(explanation, plot)
            typer.echo(f"drawn: {plot}", err=True)
    if output is Output.JSON:
        document = MessageToDict(explanation, preserving_proto_field_name=True)
        typer.echo(finite_json({**document, "hot_embeddings": hot} if hot else document))
    else:
        console = open_console()
        for part in plan_report(explanation, job):
            console.print(part)
        for line in hot_in_words(hot):
            console.print(f"[bold]rounds[/]    {escape(line)}")


def _refuse_empty_picture(explanation: pb.PlanExplanation, plot: Path, root: Path | None) -> None:
    """Raises InvalidError for a plan without a measurement or a shape to draw; `root` is a run on this machine."""
    points = any(explanation.HasField(name) for name in ("present", "chosen"))
    if explanation.measured or explanation.front or points:
        return
    after = "spec.scaling.profileInterval"
    if root is not None:
        after = f"{duration_text(read_record(RunPaths(root)).given.spec.scaling.profile_interval)} ({after})"
    raise InvalidError(
        f"--plot {plot}: nothing is measured yet, so there is nothing to draw: try again once the job has trained for "
        f"{after}, or leave --plot out"
    )


def _root_of(job: str) -> Path:
    root = next((folder for folder in (Path(job), Path("runs", job)) if (folder / "run.json").exists()), None)
    if root is None:
        raise InvalidError(f"{job}: neither it nor {Path('runs', job)} is the folder of a run; give --brain for a UID")
    return root


def _remembered(root: Path) -> pb.PlanExplanation:
    """Returns the last plan of a run's own brain, from its database. Raises InvalidError if there is none."""
    record = read_record(RunPaths(root))
    database = default_database(os.environ)
    if not database.exists():
        raise InvalidError(f"{root}: has no plan: {database} does not exist\n{_why_no_plan(record)}")
    # the brain's libraries take a second to import, which no other command should
    from emberscale_brain.history.database import DatabaseAwayError, DatabaseUnusableError
    from emberscale_brain.service.answers import explanation_to
    from emberscale_brain.service.learning import recall

    try:
        explained = recall(f"sqlite:///{database}", record.uid)
    except (DatabaseAwayError, DatabaseUnusableError) as error:
        raise InvalidError(f"{database}: {error}") from error
    if explained is None:
        raise InvalidError(f"{root}: has no plan in {database}\n{_why_no_plan(record)}")
    return explanation_to(explained)


def _why_no_plan(record: RunRecord) -> str:
    """Says why a run has no plan in this user's database, and what to do."""
    spec = record.given.spec
    elsewhere = (
        f"if a brain at HOST:PORT planned it: emberscale explain-plan {record.uid} --brain HOST:PORT "
        "--brain-token-file FILE"
    )
    if spec.leaves_replicas_open:
        return (
            "a run's brain writes its plans there, in $XDG_DATA_HOME or ~/.local/share; a run with --brain off has "
            f"none: run it without that option\n{elsewhere}"
        )
    if spec.scaling.mode is ScalingMode.MANUAL:
        fixed = "spec.scaling.mode is Manual: set it to Auto and leave out spec.ps.replicas or spec.worker.replicas"
    else:
        fixed = "its manifest gives spec.ps.replicas and spec.worker.replicas: leave one out"
    return f"{fixed}, and the brain beside the next run plans the number\n{elsewhere}"


def _ask(job: str, brain: str, token: str, authority: bytes | None, timeout: float) -> pb.PlanExplanation:
    with open_channel(brain, token, authority) as channel:
        try:
            explanation: pb.PlanExplanation = BrainStub(channel).ExplainPlan(
                pb.ExplainPlanRequest(job_uid=job), timeout=timeout
            )
        except grpc.RpcError as error:
            problem = handshake_problem(brain, authority, "--brain-ca-file")
            raise InvalidError(f"brain at {problem or f'{brain}: {error.code().name}: {error.details()}'}") from error
    return explanation
