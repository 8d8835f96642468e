"""Changes the numbers of processes of a run while it is under way, and when it is resumed."""

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from emberscale._run.record import RunPaths, RunRecord, RunStatus, record_if_any
from emberscale_api.errors import InvalidError
from emberscale_api.job import RoleSpec, TrainingJob, TrainingJobSpec
from emberscale_operator.local.edits import edit_manifest
from emberscale_operator.local.folder import RunFolder, try_lock

Edit = Callable[[TrainingJobSpec], TrainingJobSpec]
BETWEEN_LAUNCHES = "the run is just starting, or about to end; try again in a moment"


def scale_run(root: Path, edit: Edit) -> tuple[TrainingJobSpec, TrainingJobSpec]:
    """Edits the manifest of the run under way in a folder; returns its spec before and after.

    Its `emberscale run` follows within a moment. Raises InvalidError if none runs there, and what `edit` raises.
    """
    hint = "; continue it with `emberscale run FILE --resume --set spec.worker.replicas=NUMBER`"
    folder = folder_under_way(root, hint)

    def edited(job: TrainingJob) -> TrainingJob:
        # a launch removes the token, writes the manifest, and then a new token; a run that saves to end has no address
        if not (folder.token.exists() and folder.master_address.exists()):
            raise InvalidError(f"{root}: {BETWEEN_LAUNCHES}")
        return job.model_copy(update={"spec": edit(job.spec)})

    before, after = edit_manifest(folder.manifest, edited)
    return before.spec, after.spec


def resized(spec: TrainingJobSpec, numbers: Mapping[str, int]) -> TrainingJobSpec:
    """Returns the spec with these numbers, by role. Raises InvalidError for numbers that no manifest may have."""
    try:
        return spec.resized(**numbers)
    except ValidationError as error:
        wanted = " ".join(f"{role}={number}" for role, number in numbers.items())
        problems = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise InvalidError(f"{wanted}: {problems}") from error


def folder_under_way(root: Path, hint: str = "") -> RunFolder:
    """The folder of the processes of the run under way in `root`; `hint` tells what to do with one that could go on.

    Raises InvalidError if none runs there.
    """
    home = RunPaths(root)
    paths, record = next(
        ((paths, record) for paths in (home.next, home) if (record := record_if_any(paths)) is not None),
        (home, None),
    )
    if record is None:
        raise InvalidError(f"{root}: holds no run")
    if not _is_held(root) or record.status is not RunStatus.RUNNING:
        stopped = record.status is RunStatus.RUNNING
        state = "was cut short" if stopped else f"is {record.status}"
        ended = record.status in (RunStatus.COMPLETE, RunStatus.FAILED)
        raise InvalidError(f"{root}: the run is not running: it {state}{'' if ended else hint}")
    return RunFolder(paths.root)


def scaled_numbers(paths: RunPaths, earlier: RunRecord, job: TrainingJob) -> dict[str, int]:
    """The numbers that an earlier launch was scaled to, by role, where the manifest is as it was then."""
    try:
        left = TrainingJob.from_json(RunFolder(paths.root).manifest.read_text(encoding="utf-8")).spec
    except (OSError, ValidationError):
        return {}
    given = earlier.given.spec
    return {
        name: scaled.replicas
        for name, scaled, before, now in (
            ("worker", left.worker, given.worker, job.spec.worker),
            ("ps", left.ps, given.ps, job.spec.ps),
        )
        if scaled.replicas is not None and scaled.replicas != before.replicas and _numbers(now) == _numbers(before)
    }


def _numbers(role: RoleSpec) -> tuple[int | None, int | None, int | None]:
    """Returns the numbers of processes in a manifest."""
    return role.replicas, role.min_replicas, role.max_replicas


def _is_held(root: Path) -> bool:
    """Whether an `emberscale run` owns the folder."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)  # several may look at the same time
    finally:
        os.close(descriptor)
