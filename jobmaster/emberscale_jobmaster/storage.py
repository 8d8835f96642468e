"""Carries out calls on the checkpoint folder, each in its own thread, so that none can block another.

A call that hangs is abandoned; the machine has a deadline for it. The threads are daemons, so they do not keep the
process alive.
"""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog

from emberscale_api.checkpoint import (
    CheckpointManifest,
    DamagedCheckpointError,
    DataFileIdentity,
    EpochApplied,
    format_of,
    is_flash,
    number_of,
)
from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob
from emberscale_jobmaster.checkpoints import CheckpointFolder, incompatibility
from emberscale_jobmaster.effects import DeleteCheckpoint, FindCheckpoint, PruneCheckpoints, WriteManifest
from emberscale_jobmaster.events import CallAnswer, CheckpointFound, Event, ManifestWritten, PruningDone, StorageFailed
from emberscale_jobmaster.flash_manifests import FlashManifests, FlashOutOfReachError
from emberscale_jobmaster.initial import InitialFolder, InitialUnreachableError, restored_of
from emberscale_jobmaster.operations import Source
from emberscale_jobmaster.store import JobStore

_MOST_CALLS = 32
"""The largest number of calls under way; while that many hang, further calls fail at once."""

_CREDENTIAL_ERRORS = frozenset({"DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"})
"""Names of the errors for missing credentials in libraries that may not be installed (botocore, google-auth)."""

AnsweredEffect = FindCheckpoint | WriteManifest | PruneCheckpoints
StorageEffect = AnsweredEffect | DeleteCheckpoint
_Answer = TypeVar("_Answer", bound=CallAnswer)
_log = structlog.get_logger()


class CheckpointStorage:
    """Carries out effects on one folder. `tell` is called with the outcome of each, from any thread.

    A job without a `folder` takes no checkpoints, but may start from a checkpoint in the folder `initial`.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        job: TrainingJob,
        job_uid: str,
        store: JobStore,
        tell: Callable[[Event], None],
        now: Callable[[], float],
        flash: FlashManifests | None = None,
        initial: InitialFolder | None = None,
    ) -> None:
        self._flash = flash
        self._initial = initial
        self._folder = folder
        self._job = job
        self._job_uid = job_uid
        self._store = store
        self._tell = tell
        self._now = now
        self._free = threading.BoundedSemaphore(_MOST_CALLS)
        self._flash_turn = threading.Lock()
        self._found_by = 0

    def start(self, effect: StorageEffect) -> None:
        """Begins to carry out an effect."""
        if not self._free.acquire(blocking=False):
            self._fail(effect, f"{_MOST_CALLS} earlier calls have not returned")
            return
        threading.Thread(target=self._run, args=(effect,), name="checkpoint-storage", daemon=True).start()

    def _run(self, effect: StorageEffect) -> None:
        try:
            event = self._carry_out(effect)
        except InitialUnreachableError as error:
            self._report_failure(effect, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001  # file systems raise errors of their own libraries
            self._fail(effect, f"{type(error).__name__}: {error}", error)
        else:
            if event is not None:
                self._tell(event)
        finally:
            self._free.release()

    def _carry_out(self, effect: StorageEffect) -> Event | None:
        match effect:
            case FindCheckpoint():
                return self._find(effect)
            case WriteManifest():
                self._write(self._manifest(effect), effect.operation)
                return self._answer(effect, ManifestWritten)
            case PruneCheckpoints():
                self._store.confirm()
                self._own.prune(effect.keep, effect.damaged)
                return self._answer(effect, PruningDone)
            case DeleteCheckpoint():
                self._store.confirm()
                if not is_flash(effect.checkpoint):
                    self._own.discard(effect.checkpoint)
                elif self._flash is not None:
                    self._flash.sweep(effect.gone)
                return None

    @property
    def _own(self) -> CheckpointFolder:
        if self._folder is None:
            raise InvalidError("spec.checkpoint.uri: the job has no folder for checkpoints")
        return self._folder

    def _fail(self, effect: StorageEffect, problem: str, cause: BaseException | None = None) -> None:
        if isinstance(effect, DeleteCheckpoint):
            _log.warning("checkpoint_stays", checkpoint=effect.checkpoint, problem=problem)
            return
        if self._folder is not None and not (isinstance(effect, WriteManifest) and is_flash(effect.checkpoint)):
            problem = f"spec.checkpoint.uri ({self._folder.uri}) cannot be used: {problem}"
        self._report_failure(effect, problem, cause)

    def _report_failure(self, effect: StorageEffect, problem: str, cause: BaseException | None) -> None:
        if isinstance(effect, DeleteCheckpoint):
            return
        lacks_credentials = type(cause).__name__ in _CREDENTIAL_ERRORS
        if lacks_credentials:
            problem += "; give all roles credentials of the store, in a TrainingJob by env or serviceAccountName"
        self._tell(self._answer(effect, StorageFailed, problem=problem, lacks_credentials=lacks_credentials))

    def _answer(self, effect: AnsweredEffect, kind: type[_Answer], **content: Any) -> _Answer:
        """Returns the event of this kind that answers an effect now."""
        return kind(now=self._now(), operation=effect.operation, serial=effect.serial, **content)

    def _write(self, manifest: CheckpointManifest, operation: int) -> None:
        if not is_flash(manifest.id):
            self._store.confirm()  # a deposed master must neither write nor remove anything
            self._own.write(manifest)
        elif self._flash is not None:
            with self._flash_turn:
                if operation < self._found_by:
                    raise FlashOutOfReachError("the job has gone back to another checkpoint meanwhile")
                before = self._flash.write(manifest, self._store.confirm)
            if before is not None:
                self._remove_replaced(self._flash, before, manifest)

    def _remove_replaced(self, flash: FlashManifests, before: CheckpointManifest, manifest: CheckpointManifest) -> None:
        """Removes replaced files. A failure is harmless: the server sweeps what remains, or it expires."""
        try:
            flash.remove_replaced(before, manifest)
        except FlashOutOfReachError as error:
            _log.warning("flash_checkpoint_stays", checkpoint=before.id, problem=str(error))

    def _newest_flash(self) -> CheckpointManifest | None:
        """Returns the newest flash checkpoint; None if Redis is unusable or holds none: the folder is then read."""
        try:
            return None if self._flash is None else self._flash.newest()
        except (DamagedCheckpointError, FlashOutOfReachError) as error:
            _log.warning("flash_checkpoint_unusable", problem=str(error))
            return None

    def _find(self, effect: FindCheckpoint) -> CheckpointFound:
        damaged: dict[str, str] = {}
        with self._flash_turn:  # a found checkpoint must not be replaced before it is loaded
            self._found_by = max(self._found_by, effect.operation)
            flash = self._newest_flash()
        number = 0 if flash is None else flash.number
        if flash is not None and (flash.id in effect.refused or incompatibility(flash, self._job)):
            flash = None
        if flash is not None and flash.id == effect.flash:
            return self._answer(effect, CheckpointFound, source=_source(flash))
        if self._folder is None:
            return self._started(effect, flash, number)
        newest = max(number, self._folder.newest_number())
        complete = self._folder.complete()
        for identifier in reversed(complete):
            if flash is not None and int(identifier) < flash.number:
                break
            if identifier in effect.refused:
                continue
            try:
                manifest = self._folder.read(identifier)
            except DamagedCheckpointError as error:
                damaged[identifier] = str(error)
                continue
            reason = incompatibility(manifest, self._job)
            problem = f"{self._folder.uri_of(identifier)}: {reason}" if reason else ""
            found = {"source": _source(manifest), "damaged": damaged, "incompatible": problem}
            return self._answer(effect, CheckpointFound, **found, newest=newest)
        if not complete:
            return self._started(effect, flash, newest)
        source = None if flash is None else _source(flash)
        return self._answer(effect, CheckpointFound, source=source, damaged=damaged, newest=newest)

    def _started(self, effect: FindCheckpoint, flash: CheckpointManifest | None, newest: int) -> CheckpointFound:
        """Returns the checkpoint of a job without one in the folder: that in Redis, else that of another job."""
        if flash is not None or self._initial is None or effect.initial is None:
            source = None if flash is None else _source(flash)
            return self._answer(effect, CheckpointFound, source=source, newest=newest)
        return self._answer(effect, CheckpointFound, **vars(self._initial.find(effect.initial)), newest=newest)

    def _manifest(self, effect: WriteManifest) -> CheckpointManifest:
        image = effect.image
        return CheckpointManifest(
            format_version=format_of(
                (file.path for file in effect.files),
                incremental=any(file.checkpoint for file in effect.files),
                partial_rows=effect.partial_rows,
            ),
            id=effect.checkpoint,
            number=number_of(effect.checkpoint),
            created=datetime.now(UTC),
            job_uid=self._job_uid,
            job=self._job,
            ps_count=effect.servers,
            generation=image.generation,
            routing_version=image.version,
            epoch=image.epoch,
            batch_size=self._job.spec.training.batch_size,
            training_records=effect.training_records,
            applied=tuple(EpochApplied(epoch=epoch, ranges=batches) for epoch, batches in effect.applied.items()),
            evaluations=image.evaluations,
            training_files=tuple(DataFileIdentity(uri=uri, bytes=size) for uri, size in effect.training_files),
            evaluation_files=tuple(DataFileIdentity(uri=uri, bytes=size) for uri, size in effect.evaluation_files),
            training_seconds=image.training_seconds,
            forgotten=image.forgotten,
            restores=dict(image.restores),
            origin=image.origin,
            partial_rows=effect.partial_rows,
            files=effect.files,
        )


def _source(manifest: CheckpointManifest) -> Source:
    return Source(manifest.id, restored_of(manifest, manifest.origin), manifest.weight_bits)
