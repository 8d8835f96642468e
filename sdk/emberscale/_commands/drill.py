"""`emberscale drill`: kills a parameter server of a live job, and reports what its loss cost."""

import dataclasses
import json
import time
from contextlib import ExitStack
from typing import Annotated, Protocol

import typer
from rich.table import Table

from emberscale import _drill
from emberscale._commands.drain import read_server
from emberscale._commands.options import Namespace, Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._commands.scale import JobOrRun, folder_of, no_run_here
from emberscale._console import open_console
from emberscale._drill import DrillReport, Look
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.readable import duration_text

HELP = paragraphs("""\
Kills a parameter server of a training job, and reports what its loss cost.

JOB is the name or the folder of a run on this machine. If there is no such run, or with [cyan]--namespace[/], JOB is a
TrainingJob on the cluster that KUBECONFIG names. The server of [cyan]--kill[/] dies without warning: its process gets
SIGKILL, or its pod is deleted without a grace period. The drill touches nothing else, and the job recovers by itself.
Kubernetes leaves such a pod a moment, in which a server with few rows may give them all away: then nothing is lost, and
the drill says so.

If the job keeps parity ([cyan]faultTolerance.strategy: ErasureCoding[/], or [cyan]Auto[/] while parity is expected to
cost least), the other servers rebuild the rows, and nothing should roll back. The report says how long the job had no
service, when all servers were protected again, how fast it trained before and during the recovery, how many bytes were
rebuilt, and whether anything rolled back.

The job must be Training, for which the drill waits while it evaluates, and protected: without parity, or before all
rows have parity, the loss of a server rolls the job back to its last checkpoint. With [cyan]--force[/], the drill kills
the server anyway; it prints first what will be trained again, and the report says how much it was.

Exit code [green]0[/]: the job has recovered and, if it was protected, lost nothing. [red]1[/]: it rolled back although
it was protected, or it had not recovered or was not protected again before [cyan]--timeout[/] or its end, or the
server gave its rows away first. [red]2[/]: nothing was killed.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale drill criteo-dlrm --kill ps-1

  emberscale drill criteo-dlrm --kill ps-0 --namespace ads --before 60 --output json

  emberscale drill runs/criteo-dlrm --kill ps-1 --force
"""
_LOCAL_BEFORE, _CLUSTER_BEFORE = 10.0, 30.0
"""Longer on a cluster: the status of a TrainingJob is only updated every few seconds."""
_LOCAL_POLL, _CLUSTER_POLL = 0.1, 0.5


class Drilled(Protocol):
    """A job whose server is killed."""

    def look(self) -> Look:
        """Returns what the job says now.

        Raises UnavailableError where it does not answer for the moment, and InvalidError where it is over.
        """

    def kill(self, index: int) -> float:
        """Kills a server that `look` has shown; returns when, on the clock of `Look.at`. Raises as `look` does."""


def drill(
    job: JobOrRun,
    kill: Annotated[str, typer.Option("--kill", metavar="SERVER", help="The server to kill, such as ps-1.")],
    force: Annotated[
        bool, typer.Option("--force", help="Kills it even if the job then rolls back to a checkpoint.")
    ] = False,
    before: Annotated[
        float | None,
        typer.Option(
            "--before",
            metavar="SECONDS",
            min=0,
            help="How long to watch the job before the kill. [dim]default: 10, or 30 on a cluster[/]",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0, help="How long the recovery may take before the drill fails."
        ),
    ] = 600.0,
    namespace: Namespace = None,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Rehearses the loss of a parameter server."""
    with bad_input_exits(), ExitStack() as held:
        index = read_server(kill)
        folder = None if namespace is not None else folder_of(job)
        drilled: Drilled
        if folder is not None:
            from emberscale._run.drilling import DrilledRun

            drilled, poll = held.enter_context(DrilledRun(folder)), _LOCAL_POLL
            watched = _LOCAL_BEFORE if before is None else before
        else:
            drilled, poll = _DrilledOnCluster(job, namespace), _CLUSTER_POLL
            watched = _CLUSTER_BEFORE if before is None else before
        result = rehearse(drilled, job, index, force, watched, timeout, poll)
    if output is Output.JSON:
        typer.echo(json.dumps(dataclasses.asdict(result) | {"passed": result.passed}))
    else:
        open_console().print(_table(job, result))
    raise typer.Exit(0 if result.passed else 1)


def rehearse(
    drilled: Drilled, job: str, index: int, force: bool, watched: float, timeout: float, poll: float
) -> DrillReport:
    """Watches a job for so many seconds, kills one of its servers, and watches until it has recovered.

    Raises InvalidError and UnavailableError, nothing being killed.
    """
    before = [drilled.look()]
    if _drill.waits(before[0]):
        _drill.check_server(before[0], index, force)
        _say(f"{job}: waiting until the job trains; it is {before[0].phase}")
    waited_until = time.monotonic() + timeout
    while _drill.waits(before[0]) and time.monotonic() < waited_until:
        time.sleep(poll)
        before = [drilled.look()]
    _drill.check(job, before[0], index, force)
    _warn(job, index, before[0])
    _say(f"{job}: watching for {duration_text(watched)}, then killing ps-{index}")
    while _drill.watches_on(before, watched, timeout):
        time.sleep(poll)
        before.append(drilled.look())
    _drill.check(job, before[-1], index, force)
    if before[0].protected:
        _warn(job, index, before[-1])
    killed_at = drilled.kill(index)
    _say(f"{job}: ps-{index} is killed; waiting until the job has recovered")
    after: list[Look] = []
    while not _drill.is_over(index, before, after) and (after or before)[-1].at - killed_at < timeout:
        time.sleep(poll)
        try:
            after.append(drilled.look())
        except UnavailableError:
            if time.monotonic() - killed_at >= timeout:
                break
        except InvalidError as error:
            _say(str(error))
            break
    return _drill.report(index, before, killed_at, after)


class _DrilledOnCluster:
    """A TrainingJob."""

    def __init__(self, name: str, namespace: str | None) -> None:
        from emberscale._client import ClusterError, TrainingJobClient

        self._name = name
        self._here = no_run_here(name, namespace)
        try:
            self._client = TrainingJobClient(namespace)
        except ClusterError as error:
            raise InvalidError(f"{name}: {self._here}{error}") from error

    def look(self) -> Look:
        from emberscale._client import ClusterError, JobNotFoundError

        try:
            return _drill.look_at_job(self._client.status(self._name), time.monotonic())
        except JobNotFoundError as error:
            raise InvalidError(f"{self._name}: {self._here}the cluster has no such job: {error}") from error
        except ClusterError as error:
            raise UnavailableError(f"{self._name}: {self._here}{error}") from error

    def kill(self, index: int) -> float:
        _say(f"{self._name}: pod {self._client.kill(self._name, index)} is deleted without a grace period")
        return time.monotonic()


def _table(job: str, result: DrillReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=f"{job}: the loss of {result.server}")
    table.title_justify = "left"
    for what, how_much in _drill.lines(result):
        table.add_row(what, how_much)
    return table


def _warn(job: str, index: int, look: Look) -> None:
    """Says what the loss of a server costs where it is unprotected."""
    if not look.protected:
        _say(f"{job}: killing ps-{index} although the job is unprotected: {_drill.consequence(look)}")


def _say(text: str) -> None:
    typer.echo(text, err=True)
