"""Ownership of a folder: when a run may begin or continue in it, and replace another."""

import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Self

from emberscale._run.preflight import ensure_writable, local_path
from emberscale._run.record import RunPaths, RunRecord, RunStatus, record_if_any, unfinished, write_atomically
from emberscale._run.resumption import (
    refuse_another_job,
    refuse_changes_of_a_complete_run,
    refuse_fewer_epochs_than_begun,
)
from emberscale._run.scaling import resized, scaled_numbers
from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob
from emberscale_operator.local.edits import end_edits
from emberscale_operator.local.folder import RunFolder, try_lock

_LOOK_SECONDS = 1.0
"""How long a new run waits for `emberscale scale`, which briefly holds the folder to see whether a run holds it."""
_ENDED = frozenset({RunStatus.COMPLETE, RunStatus.FAILED})


class CompleteAlreadyError(Exception):
    """There is nothing to resume: the run is Complete, and the requested job is the same."""


class Run:
    """A run's folder, held by this process alone while it is entered.

    `home` is the folder that the person named. `paths` are the run's own: the same or, while a Complete run is there,
    `next` in it.
    """

    def __init__(
        self, home: RunPaths, paths: RunPaths, record: RunRecord, lock: int, scaled: Mapping[str, int] | None = None
    ) -> None:
        self.home = home
        self.paths = paths
        self.record = record
        self.scaled = scaled or {}
        """The numbers, by role, to which an earlier launch was scaled; this launch begins with them."""
        self._lock = lock

    @property
    def processes(self) -> RunFolder:
        """The part of the folder that the job's processes use."""
        return RunFolder(self.paths.root)

    @property
    def job(self) -> TrainingJob:
        """The manifest as this run resolved it, with the numbers that it was scaled to. Raises InvalidError."""
        job = self.record.job(self.paths)
        return job.model_copy(update={"spec": resized(job.spec, self.scaled)})

    def begin(self) -> None:
        """Writes run.json; a new run first removes what an earlier one left, a resumed run the picture of its past."""
        for path in self.paths.all() if self.record.launches == 1 else (self.paths.picture,):
            _remove(path)
        self.paths.root.mkdir(exist_ok=True)
        self.save()

    def cancel(self) -> None:
        """Records a failed launch: a new run may be replaced, a resumed one stays unchanged."""
        self.save(status=RunStatus.FAILED if self.record.launches == 1 else RunStatus.INTERRUPTED)

    def save(self, **changes: object) -> None:
        """Writes run.json with these fields changed."""
        self.record = self.record.model_copy(update=changes)
        write_atomically(self.paths.record, self.record.model_dump_json(indent=2) + "\n")

    def take_place(self) -> None:
        """Moves a Complete run to the place of the previous one."""
        _take_place(self.home)
        if self.record.status is RunStatus.COMPLETE:
            self.paths = self.home

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)


def open_run(root: Path, job: TrainingJob, resume: bool, overwrite: bool) -> Run:
    """Takes a folder for a run; nothing in it changes before `Run.begin`.

    A new run replaces a Failed one at once, and a Complete one at its own end. It replaces a run that can be resumed
    only with `overwrite`, and takes no folder with files but no run. Raises InvalidError or CompleteAlreadyError.
    """
    existed = root.exists()
    if existed and not root.is_dir():
        raise InvalidError(f"{root} is not a folder: name another with --workdir")
    if resume and not any(paths.record.exists() for paths in (RunPaths(root), RunPaths(root).next)):
        raise InvalidError(f"--resume: {root} holds no run; start one without --resume")
    if not resume:
        _refuse_own_origin(root, job)
    ensure_writable(root, "the folder of the run")
    lock = _lock(root, f"{root} is in use by another `emberscale run`", "folder with --workdir")
    try:
        _take_place(RunPaths(root))
        for paths in (RunPaths(root), RunPaths(root).next):  # a killed run leaves its token
            end_edits(RunFolder(paths.root))
        return _open_locked(RunPaths(root), job, resume, overwrite, lock)
    except BaseException:
        os.close(lock)
        if not existed:
            root.rmdir()
        raise


def _refuse_own_origin(root: Path, job: TrainingJob) -> None:
    """Raises InvalidError for a run that would remove the checkpoint from which it starts."""
    initial = job.spec.checkpoint.initial_from
    place = None if initial is None else local_path(initial.uri)
    if initial is None or place is None:
        return
    replaced = (path.resolve() for path in (*RunPaths(root).all(), RunPaths(root).next.root))
    if any(place.resolve().is_relative_to(path) for path in replaced):
        raise InvalidError(
            f"{root} holds the checkpoints of spec.checkpoint.initialFrom ({initial.uri}), and a new run there "
            "replaces them: choose another folder with --workdir"
        )


def _open_locked(home: RunPaths, job: TrainingJob, resume: bool, overwrite: bool, lock: int) -> Run:
    there, beside = record_if_any(home), record_if_any(home.next)
    newest, paths = (beside, home.next) if beside is not None else (there, home)
    if resume and newest is not None:
        return Run(home, paths, _resumed(paths, newest, job), lock, scaled_numbers(paths, newest, job))
    if newest is None and any(path != unfinished(home.record) for path in home.root.iterdir()):
        raise InvalidError(f"{home.root} is not empty and holds no run.json: choose another folder with --workdir")
    if newest is not None and newest.status not in _ENDED and not overwrite:
        raise InvalidError(
            f"{paths.root} holds a run that was interrupted: continue with --resume, start over with --overwrite, or "
            "choose another folder with --workdir"
        )
    complete = there is not None and there.status is RunStatus.COMPLETE
    record = RunRecord(
        name=job.metadata.name,
        uid=str(uuid.uuid4()),
        status=RunStatus.RUNNING,
        started_at=datetime.now(UTC),
        versions=_versions(),
        manifest=job.model_dump(mode="json", by_alias=True, exclude_none=True),
    )
    return Run(home, home.next if complete else home, record, lock)


def _resumed(paths: RunPaths, earlier: RunRecord, job: TrainingJob) -> RunRecord:
    if earlier.status is RunStatus.COMPLETE:
        refuse_changes_of_a_complete_run(paths, earlier, job)
        raise CompleteAlreadyError
    refuse_another_job(earlier, job)
    refuse_fewer_epochs_than_begun(paths, earlier, job)
    failed = earlier.status is RunStatus.FAILED
    return earlier.model_copy(
        update={
            "uid": str(uuid.uuid4()) if failed else earlier.uid,
            "earlier_uids": [*earlier.earlier_uids, earlier.uid] if failed else earlier.earlier_uids,
            "status": RunStatus.RUNNING,
            "launches": earlier.launches + 1,
            "ended_at": None,
            "versions": _versions(),
            "manifest": job.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
    )


def _take_place(home: RunPaths) -> None:
    """Replaces the previous run by the Complete run in `next/`.

    Continues after an interruption: the old run's record is removed last, and the new run's record is moved last, so
    the records show the progress.
    """
    beside = record_if_any(home.next)
    if beside is None or beside.status is not RunStatus.COMPLETE:
        return
    if home.record.exists():
        for path in home.all():
            _remove(path)
    for path, place in zip(home.next.all(), home.all(), strict=True):
        if path.exists():
            path.rename(place)
    shutil.rmtree(home.next.root)


@contextmanager
def alone_with_checkpoints(uri: str | None, root: Path) -> Iterator[None]:
    """Holds the folder of checkpoints that the manifest of the run in `root` names, if it is on this machine.

    Raises InvalidError if it cannot be written to, or another run holds it: their checkpoints would have the same ids.
    """
    place = None if uri is None else local_path(uri)
    if place is None:
        yield
        return
    ensure_writable(place, "spec.checkpoint.uri")
    if place.resolve() == root.resolve():  # the run holds it anyway
        yield
        return
    lock = _lock(place, f"spec.checkpoint.uri: {uri} is in use by another `emberscale run`", "URI")
    try:
        yield
    finally:
        os.close(lock)


def _lock(root: Path, problem: str, other: str) -> int:
    """Locks a folder until it is closed. Raises InvalidError with the problem, and what `other` to choose."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + _LOOK_SECONDS
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            os.close(descriptor)
            raise InvalidError(f"{problem}: wait until it ends, or choose another {other}")
        time.sleep(0.02)
    return descriptor


def _versions() -> dict[str, str]:
    packages = ("emberscale", "torch", "numpy", "numba")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
