"""Checks the changes of a manifest with `--resume`; refusals name each field, with its new and its old value."""

import json
from typing import Any

from emberscale._run.checkpoints import SavedCheckpoints
from emberscale._run.record import RunPaths, RunRecord
from emberscale_api.checkpoint import MANIFEST_NAME, CheckpointManifest, DamagedCheckpointError
from emberscale_api.errors import InvalidError
from emberscale_api.job import Difference, Keeper, TrainingJob, broken_fields, differences, fixed_fields

_SHOWN_CHARACTERS = 60


def kept_by_a_run() -> str:
    """Names the fields that must not change when a run is resumed, for help texts."""
    return ", ".join(fixed_fields(Keeper.RUN))


def refuse_another_job(earlier: RunRecord, job: TrainingJob) -> None:
    """Raises InvalidError, with a line for each field, if the run cannot be resumed as this job."""
    changed = broken_fields(earlier.given, job, Keeper.RUN)
    if changed:
        raise InvalidError(
            "\n".join(
                f"--resume: {_told(one)}: it must not change when a run resumes; restore it, or train in another "
                "--workdir"
                for one in changed
            )
        )


def refuse_fewer_epochs_than_begun(paths: RunPaths, earlier: RunRecord, job: TrainingJob) -> None:
    """Raises InvalidError if the newest checkpoint has trained in an epoch that the job would no longer have."""
    epochs = job.spec.training.epochs
    if epochs >= earlier.given.spec.training.epochs:
        return
    saved = SavedCheckpoints(earlier.checkpoint_uri(paths)).find({earlier.uid, *earlier.earlier_uids}).complete
    if saved and saved[0].begun_epochs > epochs:
        begun = saved[0].begun_epochs
        raise InvalidError(
            f"--resume: spec.training.epochs is {epochs}, and checkpoint {saved[0].id} is in epoch {begun}: give "
            f"{begun} at least"
        )


def refuse_changes_of_a_complete_run(paths: RunPaths, earlier: RunRecord, job: TrainingJob) -> None:
    """Raises InvalidError, with a line for each change, unless the job and its data are those of the Complete run."""
    changes = [_told(one) for one in differences(earlier.given, job)] + _changed_files(paths, job)
    if changes:
        raise InvalidError(
            "\n".join(
                f"--resume: {change}, but the run in {paths.root} is Complete and cannot continue: train without "
                "--resume, or undo the change to see that run's summary"
                for change in changes
            )
        )


def _changed_files(paths: RunPaths, job: TrainingJob) -> list[str]:
    """Returns a line for each data file whose size is not the one that the run read."""
    # slow to import, so only a resume of a Complete run pays for it
    from emberscale_trainer.data.files import expand

    manifest = paths.model / MANIFEST_NAME
    try:
        read = CheckpointManifest.from_json(manifest.read_bytes(), str(manifest))
    except (FileNotFoundError, DamagedCheckpointError):
        return []
    changes = []
    trained = {} if read.origin is None else {file.uri: file.bytes for file in read.origin.trained}
    for field, uris, files in (
        ("spec.data.train", job.spec.data.train, read.training_files),
        ("spec.data.evaluation", job.spec.data.evaluation, read.evaluation_files),
    ):
        now = {file.uri: file.bytes for file in expand(uris)}
        before = {uri: size for uri, size in trained.items() if uri in now}  # trained by the job before; may be gone
        before |= {file.uri: file.bytes for file in files}
        changes += [
            f"{field}: {uri} {_size(now.get(uri))} and {_size(before.get(uri))} in the run"
            for uri in sorted(before.keys() | now.keys())
            if before.get(uri) != now.get(uri)
        ]
    return changes


def _size(size: int | None) -> str:
    return "is missing" if size is None else f"has {size:,} bytes"


def _told(one: Difference) -> str:
    return f"{one.path} is {_shown(one.now)} and was {_shown(one.before)}"


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
