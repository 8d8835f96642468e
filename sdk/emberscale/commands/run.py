"""`emberscale run`: trains a manifest on this machine."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console

from emberscale.checkpoints import CheckpointFolder
from emberscale.commands.options import ManifestFile, Output, OutputFormat, Overrides, bad_input_exits, paragraphs
from emberscale.errors import BadInputError
from emberscale.model_folder import ModelUnavailableError, export_model
from emberscale.preflight import check_data, ensure_writable, local_path
from emberscale.progress import open_progress
from emberscale.recorder import Recorder
from emberscale.run_folder import (
    CompleteAlreadyError,
    Run,
    RunPaths,
    RunStatus,
    open_run,
    read_record,
    write_atomically,
)
from emberscale.summary import Summary, finite_json, summarize
from emberscale.summary_table import summary_table
from emberscale_api.job import TrainingJob, load_manifest
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import LocalJob, Snapshot, StartError

_STATUS = {
    pb.COMPLETE: RunStatus.COMPLETE,
    pb.FAILED: RunStatus.FAILED,
    pb.SUSPENDED: RunStatus.SUSPENDED,
}
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HELP = paragraphs("""\
Trains a manifest on this machine: one process for every pod that a cluster would run.

Progress goes to stderr, the summary to stdout and, with the metrics, their picture, the logs and the model, to the
run's folder. Exit code [green]0[/] only for Complete, [red]1[/] for Failed, [red]2[/] for bad input (nothing was
started), [yellow]130[/] after Ctrl-C.

[bold]Ctrl-C[/] takes a checkpoint and stops every process; a second one stops them at once. Either way
[cyan]--resume[/] goes on from the last checkpoint.

A new run replaces a Complete or Failed one in the same folder; one that can be resumed only with [cyan]--overwrite[/],
and a folder that holds anything else never.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale run deploy/examples/criteo-dlrm.yaml

  emberscale run job.yaml --set spec.worker.replicas=4 --set spec.training.epochs=2

  emberscale run job.yaml --resume

  emberscale run job.yaml --output json | jq .auc
"""


def run(
    file: ManifestFile,
    overrides: Overrides = None,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder. [dim]default: runs/<job name>[/]", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Goes on with the run in the folder; replicas and resources may differ.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Starts anew even if the folder holds a run that can be resumed.")
    ] = False,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Uses this Redis instead of one of the job's own.", show_default=False),
    ] = None,
    master_port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Where the master listens; 0 takes any free port.")
    ] = 0,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Trains a manifest on this machine."""
    with Interruption() as interruption, bad_input_exits():
        if resume and overwrite:
            raise BadInputError("--resume and --overwrite contradict each other: give one of them")
        job = load_manifest(file, overrides or ())
        check_data(job)
        _check_checkpoint_uri(job, resume)
        root = workdir or Path("runs", job.metadata.name)
        try:
            with open_run(root, job, resume, overwrite) as held:
                summary = _train(held, redis, master_port, interruption)
        except CompleteAlreadyError:
            summary = _summary_of(RunPaths(root))
            typer.echo(f"{root}: the run is Complete; there is nothing to resume", err=True)
        if output is Output.JSON:
            typer.echo(finite_json(summary.as_document()))
        else:
            Console().print(summary_table(summary, root))
    raise typer.Exit(_exit_code(summary, interruption))


class Interruption:
    """What signals that ask for an end do: before the job runs they end the command; while it runs, the first saves
    its state and the second does not wait for that; after it they do nothing, as all is done in a moment.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._local: LocalJob | None = None
        self._over = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in _STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def of(self, local: LocalJob) -> Iterator[None]:
        """The job runs in the body."""
        self._local = local
        try:
            yield
        finally:
            self._local, self._over = None, True

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if self._over:
            return
        if self._local is None:
            raise SystemExit(128 + number)
        if self.signal is None:
            self._local.suspend()
        else:
            self._local.kill()
        self.signal = number


def _check_checkpoint_uri(job: TrainingJob, resume: bool) -> None:
    uri = job.spec.checkpoint.uri
    if uri is None:
        return
    folder = local_path(uri)
    if folder is not None:
        ensure_writable(folder, "spec.checkpoint.uri")
    if not resume:
        CheckpointFolder(uri).refuse_if_used()


def _train(held: Run, redis: str | None, master_port: int, interruption: Interruption) -> Summary:
    begun = time.monotonic()
    with LocalJob(held.job, held.record.uid, held.processes, redis, master_port) as local:
        held.begin()
        with (
            open_progress(held.record.name) as progress,
            Recorder(held.paths.metrics, held.record.seconds) as recorder,
            interruption.of(local),
        ):

            def observe(snapshot: Snapshot) -> None:
                progress.show(snapshot)
                recorder.record(snapshot)

            try:
                outcome = local.run(observe)
            except StartError:
                held.cancel()
                raise
    seconds = held.record.seconds + time.monotonic() - begun
    summary = summarize(held.record.name, outcome, seconds)
    write_atomically(held.paths.summary, finite_json(summary.as_document()) + "\n")
    status = _STATUS.get(outcome.phase, RunStatus.INTERRUPTED)
    held.save(status=status, seconds=seconds, ended_at=datetime.now(UTC))
    _illustrate(held, summary)
    return summary


def _illustrate(held: Run, summary: Summary) -> None:
    # matplotlib takes a second to import, which only this moment should cost
    from emberscale.picture import draw_metrics

    draw_metrics(held.paths.metrics, held.paths.picture, held.record.name)
    uri = held.job.spec.checkpoint.uri
    if uri is not None and summary.checkpoint is not None:
        try:
            export_model(uri, summary.checkpoint, held.paths.model)
        except ModelUnavailableError as error:
            typer.echo(f"warning: {error}", err=True)


def _summary_of(paths: RunPaths) -> Summary:
    read_record(paths)
    return Summary(**json.loads(paths.summary.read_text(encoding="utf-8")))


def _exit_code(summary: Summary, interruption: Interruption) -> int:
    if summary.phase == "Complete":
        return 0
    if interruption.signal is not None and summary.phase != "Failed":
        return 128 + interruption.signal
    return 1
