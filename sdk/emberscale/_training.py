"""Training on this machine: the code that `emberscale run` and `emberscale.train` share."""

import hashlib
import json
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from emberscale._progress import open_progress
from emberscale._run.audit import AuditReport
from emberscale._run.brain_choice import choose_brain
from emberscale._run.checkpoints import (
    ModelUnavailableError,
    SavedCheckpoints,
    audit_checkpoints,
    check_initial,
    export_model,
)
from emberscale._run.folder import CompleteAlreadyError, Run, alone_with_checkpoints, open_run
from emberscale._run.interruption import Interruption
from emberscale._run.metrics import MetricsRecorder
from emberscale._run.preflight import check_columns, check_data, check_model
from emberscale._run.record import RunPaths, RunStatus, write_atomically
from emberscale._run.summary import Summary, finite_json, summarize
from emberscale_api.errors import InvalidError, UnavailableError, UnwritableError, disk_problem
from emberscale_api.job import API_VERSION, KIND, TrainingJob, load_manifest, parse_manifest
from emberscale_operator.local.brain import BrainAddress, EmbeddedBrain
from emberscale_operator.local.runner import LocalJob
from emberscale_operator.local.snapshot import RunView

_ARGUMENTS = {"resume": "resume=True", "overwrite": "overwrite=True", "workdir": "workdir", "brain": "brain"}
_OPTION = re.compile(rf"(?<!\S)--({'|'.join(_ARGUMENTS)})(?![\w/-]|\.\w)")
"""An option as a word of its own; a path may have one in it."""


@dataclass(frozen=True)
class Training:
    """The result of a run: its summary, and its folder with metrics, logs, checkpoints and the model."""

    summary: Summary
    folder: Path

    @property
    def paths(self) -> RunPaths:
        """The files in the folder."""
        return RunPaths(self.folder)

    def __repr__(self) -> str:
        summary = self.summary
        auc = "" if summary.auc is None else f", AUC {summary.auc:.4f}"
        return f"<Training {summary.name}: {summary.phase}, {summary.samples:,} samples{auc}, in {self.folder}>"


class TrainingFailedError(Exception):
    """The job has Failed; `training` has its results so far."""

    def __init__(self, training: Training) -> None:
        summary = training.summary
        super().__init__(f"{summary.name}: {summary.reason}: {summary.message}; logs are in {training.paths.logs}")
        self.training = training


def train(
    manifest: Path | str | Mapping[str, Any],
    *,
    name: str | None = None,
    workdir: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    brain: str = "auto",
) -> Training:
    """Trains on this machine, as `emberscale run` does, and shows the progress.

    `manifest` is a file, a whole TrainingJob as a mapping, or only its `spec`; then `name` is the job's name, by
    default `training-` and a fingerprint of the spec, so that another spec never trains into this one's folder. The
    run's folder is `workdir`, or else `runs/<name>`; `resume` continues the run there, `overwrite` starts anew
    even if it could be resumed. `brain` says who plans numbers of processes that are left open: "auto" is a brain
    beside the job, "off" nobody, and "host:port" the brain there.

        training = emberscale.train({"data": {"train": ["data/*.tsv"]}, "training": {"epochs": 2}}, name="first")
        training.summary.auc

    Ctrl-C, or interrupting the notebook's kernel, takes a checkpoint, stops every process, and raises
    KeyboardInterrupt. Raises TrainingFailedError, InvalidError, UnavailableError, and for a full disk UnwritableError.
    """
    try:
        if resume and overwrite:
            raise InvalidError("resume and overwrite contradict each other: give one of them")
        job = parse_manifest(_whole(manifest, name)) if isinstance(manifest, Mapping) else load_manifest(Path(manifest))
        with Interruption([signal.SIGINT], ending=lambda _: KeyboardInterrupt()) as interruption:
            root = Path(workdir) if workdir is not None else default_folder(job)
            training = run_job(
                job, root, interruption, resume=resume, overwrite=overwrite, brain=choose_brain(job, brain, (), None)
            )
        phase = training.summary.phase
        if phase == RunStatus.FAILED:
            raise TrainingFailedError(training)
        if phase != RunStatus.COMPLETE:
            raise KeyboardInterrupt(f"the run in {training.folder} is {phase}: resume=True continues it")
        return training
    except (InvalidError, UnavailableError, TrainingFailedError, KeyboardInterrupt) as error:
        if isinstance(error, InvalidError) and error.trace:
            error.add_note(error.trace)
        error.args = tuple(_in_python(part) if isinstance(part, str) else part for part in error.args)
        # where in here it came to light helps nobody: what is shown is the caller's line and the message
        raise error.with_traceback(None) from None


def _in_python(problem: str) -> str:
    """Returns a problem that names options of `emberscale run` with the arguments of `train` instead."""
    return _OPTION.sub(lambda found: _ARGUMENTS[found[1]], problem)


def _whole(manifest: Mapping[str, Any], name: str | None) -> Mapping[str, Any]:
    if "spec" in manifest:
        return manifest
    if name is None:
        spec = json.dumps(manifest, sort_keys=True, default=str)
        name = f"training-{hashlib.sha256(spec.encode()).hexdigest()[:8]}"
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": manifest}


def default_folder(job: TrainingJob) -> Path:
    """Returns the folder of a run unless the user names another."""
    return Path("runs", job.metadata.name)


def run_job(
    job: TrainingJob,
    root: Path,
    interruption: Interruption,
    *,
    resume: bool = False,
    overwrite: bool = False,
    redis: str | None = None,
    master_port: int = 0,
    brain: BrainAddress | EmbeddedBrain | None = None,
    picture: bool = True,
) -> Training:
    """Trains a job in a folder, and writes its results there; leaves a run that is Complete as it is.

    While a Complete run is in the folder, a new one is written to `next` in it, and takes its place once it is Complete
    too. Raises InvalidError, UnavailableError, and UnwritableError for a disk that is full.
    """
    check_data(job)
    check_columns(job.spec.data)
    for remark in check_model(job):
        _warn(remark)
    if not resume:  # one that resumes may have checkpoints of its own, and those of the other job may be gone
        for skipped in check_initial(job):
            _warn(f"warning: {skipped}")
    try:
        with (
            alone_with_checkpoints(job.spec.checkpoint.uri, root),
            _open_run(root, job, resume, overwrite) as held,
        ):
            if held.scaled:
                numbers = " ".join(f"{role}={number}" for role, number in held.scaled.items())
                _warn(f"{numbers}, as the run was scaled before; `emberscale scale {root}` changes that as it trains")
            try:
                return _train(held, redis, master_port, brain, interruption, picture)
            except OSError as error:
                problem = disk_problem(error)
                if problem is None:
                    raise
                again = "continue with --resume" if held.paths.record.exists() else "start it again"
                raise UnwritableError(
                    f"{held.paths.root}: cannot be written: {problem}; free some space, then {again}"
                ) from error
    except CompleteAlreadyError:
        _warn(f"{root}: the run is Complete; there is nothing to resume")
        document = RunPaths(root).summary.read_text(encoding="utf-8")
        return Training(Summary(**json.loads(document)), root)


def _open_run(root: Path, job: TrainingJob, resume: bool, overwrite: bool) -> Run:
    uri = job.spec.checkpoint.uri
    if uri is not None and not resume:
        SavedCheckpoints(uri).refuse_if_used()
    return open_run(root, job, resume, overwrite)


def _train(
    held: Run,
    redis: str | None,
    master_port: int,
    brain: BrainAddress | EmbeddedBrain | None,
    interruption: Interruption,
    picture: bool,
) -> Training:
    begun = time.monotonic()
    with LocalJob(held.job, held.record.uid, held.processes, redis, master_port, brain=brain) as local:
        held.begin()
        with (
            open_progress(held.record.name) as progress,
            MetricsRecorder(held.paths.metrics, held.record.seconds) as recorder,
            interruption.of(local),
        ):

            def observe(snapshot: RunView) -> None:
                progress.show(snapshot)
                recorder.record(snapshot)

            try:
                outcome = local.run(observe)
            except (InvalidError, UnavailableError):
                held.cancel()
                raise
    seconds = held.record.seconds + time.monotonic() - begun
    summary = summarize(held.record.name, outcome, seconds, _saved(held))
    write_atomically(held.paths.summary, finite_json(summary.as_document()) + "\n")
    if picture:
        _draw(held, summary)
    _export(held, summary)
    # the run is Complete once all that belongs to it is there: only then may it take the place of the one before
    status = RunStatus.INTERRUPTED if outcome.phase is None else RunStatus(outcome.phase)
    held.save(status=status, seconds=seconds, ended_at=datetime.now(UTC))
    held.take_place()
    if held.paths is not held.home:
        _warn(f"{held.home.root}: still holds the previous Complete run; this one is in {held.paths.root}")
    return Training(summary, held.paths.root)


def _saved(held: Run) -> AuditReport | None:
    """Returns the audit of the newest whole checkpoint of the run, None if none can be read."""
    try:
        folder = SavedCheckpoints(held.record.checkpoint_uri(held.paths))
        report, _ = audit_checkpoints(folder, folder.find({held.record.uid, *held.record.earlier_uids}))
    except InvalidError:
        return None
    return report


def _draw(held: Run, summary: Summary) -> None:
    # matplotlib takes a second to import, which only this moment should cost
    from emberscale._reports.pictures import draw_metrics

    draw_metrics(
        held.paths.metrics,
        held.paths.picture,
        held.record.name,
        summary.evaluations,
        summary.expected_samples,
        held.job.spec.training.epochs,
    )


def _export(held: Run, summary: Summary) -> None:
    uri = held.record.checkpoint_uri(held.paths)
    if summary.checkpoint is not None:
        if any(entry.id == summary.checkpoint and entry.builds_on for entry in SavedCheckpoints(uri).entries()):
            _warn(f"{held.paths.model}: not written: checkpoint {summary.checkpoint} builds on others in {uri}")
            return
        try:
            _warn("writing the model")
            export_model(uri, summary.checkpoint, held.paths.model)
        except ModelUnavailableError as error:
            _warn(f"warning: {error}")


def _warn(text: str) -> None:
    typer.echo(text, err=True)
