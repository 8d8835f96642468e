"""Drives the parameter servers: assigns them, takes checkpoints, and brings the job back when one is lost.

A thread that looks at the state, does the one thing that is due, and puts the outcome into the state. Whatever it was
doing when the master died, the next master does again from the start.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

import grpc
import structlog

from emberscale_api.checkpoint import CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import TrainingJobSpec
from emberscale_api.routing import PsAddress
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster import lifecycle, messages, progress
from emberscale_jobmaster.applied import Applied, on_all
from emberscale_jobmaster.checkpoints import CheckpointFolder, checkpoint_id, incompatibility
from emberscale_jobmaster.cut import CutTaker
from emberscale_jobmaster.membership import Role
from emberscale_jobmaster.parameter_servers import AbandonedError, ParameterServers, ServerCallError
from emberscale_jobmaster.runtime import ClosingError, JobRuntime
from emberscale_jobmaster.scaling import reshape_due, reshaped
from emberscale_jobmaster.state import JobState, Restored, Stage, Trouble, servers_missing
from emberscale_jobmaster.store import DeposedError, StoreUnavailableError

_RETRY_SECONDS = 1.0
_HOLD_SECONDS = 120.0
"""How long pushes wait at most for the rows to move; after that training goes on, and goes back when they have."""
_ATTEMPTS = 8
"""Failures in a row after which the job stops trying what it cannot go on without."""

_log = structlog.get_logger()


class NoUsableCheckpointError(Exception):
    """There are checkpoints, and the job cannot go on from any; `reason` is that of its failure."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class Step(Enum):
    """What the conductor does next."""

    ASSIGN = auto()
    CHECKPOINT = auto()
    RESHAPE = auto()
    SUSPEND = auto()


def next_step(state: JobState, spec: TrainingJobSpec, checkpoint_due: bool) -> Step | None:
    """What is due now; None while there is nothing."""
    if state.over:
        return None
    trained = state.stage in (Stage.TRAIN, Stage.EVALUATE, Stage.SAVE)
    if state.suspending and not (state.routing.ready and trained and spec.checkpoint.uri):
        return Step.SUSPEND
    if not state.routing.ready:
        return None if servers_missing(state, spec) else Step.ASSIGN
    if spec.checkpoint.uri and reshape_due(state):
        return Step.RESHAPE
    if spec.checkpoint.uri and (state.suspending or state.stage is Stage.SAVE or (checkpoint_due and trained)):
        return Step.CHECKPOINT
    return None


class Conductor:
    """One job's conductor; `run` returns when the master closes."""

    def __init__(
        self,
        runtime: JobRuntime,
        token: str,
        authority: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._spec = runtime.spec
        self._servers = ParameterServers(token, authority)
        self._clock = clock
        uri = self._spec.checkpoint.uri
        self._folder = CheckpointFolder(uri) if uri is not None else None
        self._rested_at = clock()
        self._rest: float | None = None
        self._damaged: dict[str, str] = {}
        self._failures = 0

    def run(self) -> None:
        """Does what is due until the master closes."""
        try:
            while True:
                try:
                    self._act()
                except StoreUnavailableError as error:
                    _log.warning("conductor waits for the store", problem=str(error))
                    self._runtime.pause(_RETRY_SECONDS)
        except (ClosingError, DeposedError):
            return
        finally:
            self._servers.forget(keep=())

    def _act(self) -> None:
        state, _ = self._runtime.snapshot()
        if state.cut is not None:
            self._undo_cut(state, state.cut.number, "it was left unfinished")
            return
        wait = max(0.0, self._due() - self._clock())
        step = self._runtime.wait_until(lambda now: next_step(now, self._spec, self._clock() >= self._due()), wait)
        match step:
            case Step.ASSIGN:
                self._assign()
            case Step.CHECKPOINT if self._folder is not None:
                self._checkpoint(self._folder)
            case Step.RESHAPE if self._folder is not None:
                self._reshape(self._folder)
            case Step.SUSPEND:
                self._runtime.update(lambda now: progress.suspended(now) if now.suspending else now)
            case None if wait == 0.0:
                self._rest_until_due()

    def _due(self) -> float:
        """When the next checkpoint is; another interval counts from the last one."""
        return self._rested_at + (self._runtime.checkpoint_interval if self._rest is None else self._rest)

    def _rest_until_due(self, rest: float | None = None) -> None:
        """Nothing is due for the interval, or for so many seconds."""
        self._rested_at, self._rest = self._clock(), rest

    def _assign(self) -> None:
        try:
            source = self._newest_sound_checkpoint()
        except OSError as error:
            self._assignment_failed("CheckpointUnreachable", self._unreachable(error))
            return
        except NoUsableCheckpointError as error:
            reason, message = error.reason, str(error)
            self._runtime.update(lambda now: progress.failed(now, reason, message))
            return
        table = self._runtime.update(self._with_assignment).routing.table
        if not table.servers:
            return
        _log.info("assigning", routing_epoch=table.epoch, checkpoint=source.id if source else None)
        request = pb.AssignRequest(
            routing=messages.wire_routing(table, ready=False),
            manifest_json=self._runtime.job.to_json(),
            checkpoint_uri=self._folder.uri_of(source.id) if source and self._folder else "",
        )
        try:
            replies = self._servers.call(
                lambda stub: stub.Assign,
                dict.fromkeys(table.servers, request),
                pb.AssignReply,
                self._abandons(table.epoch),
            )
        except AbandonedError:
            return
        except ServerCallError as error:
            if error.code is grpc.StatusCode.FAILED_PRECONDITION and source:
                self._refuse(source.id, error.details)
            elif error.code is grpc.StatusCode.INVALID_ARGUMENT:
                message = str(error)
                self._runtime.update(lambda now: progress.failed(now, "ModelRefused", message))
            else:
                self._assignment_failed("AssignFailed", str(error), counts=not (error.away or error.superseded))
            return
        applied = on_all([messages.applied(reply.applied) for reply in replies.values()])
        restored = _restored(applied, source)
        checkpoint = source.id if source else ""
        self._runtime.update(lambda now: progress.assigned(now, table.epoch, restored, checkpoint))
        self._failures = 0
        self._rest_until_due()

    def _with_assignment(self, state: JobState) -> JobState:
        """A table of a fresh epoch: one that another master began may be half adopted."""
        if state.over:
            return state
        if state.routing.table.servers:
            state = progress.unrouted(state, self._spec)
        return progress.assignment_begun(state, self._spec)

    def _newest_sound_checkpoint(self) -> CheckpointManifest | None:
        """What to load; None where there is no checkpoint. Raises NoUsableCheckpointError and OSError."""
        if self._folder is None:
            return None
        identifiers = self._folder.complete()
        for identifier in reversed(identifiers):
            if identifier in self._damaged:
                continue
            try:
                manifest = self._folder.read(identifier)
            except DamagedCheckpointError as error:
                self._refuse(identifier, str(error))
                continue
            if problem := incompatibility(manifest, self._runtime.job):
                raise NoUsableCheckpointError("CheckpointIncompatible", f"{self._folder.uri_of(identifier)}: {problem}")
            return manifest
        if identifiers:
            problems = "; ".join(f"{identifier}: {self._damaged[identifier]}" for identifier in identifiers)
            raise NoUsableCheckpointError("CheckpointDamaged", f"no checkpoint can be used: {problems}")
        return None

    def _refuse(self, identifier: str, problem: str) -> None:
        _log.error("checkpoint is damaged and refused", checkpoint=identifier, problem=problem)
        self._damaged[identifier] = problem
        self._runtime.apply(lambda now: lifecycle.checkpoint_refused(now, problem))

    def _assignment_failed(self, reason: str, problem: str, counts: bool = True) -> None:
        self._failures += counts
        _log.warning("assignment failed", reason=reason, problem=problem, failures=self._failures)
        if self._failures < _ATTEMPTS:
            self._runtime.update(lambda now: replace(now, trouble=Trouble(reason, problem)))
            self._runtime.pause(_RETRY_SECONDS)
        else:
            self._runtime.update(lambda now: progress.failed(now, reason, problem))

    def _reshape(self, folder: CheckpointFolder) -> None:
        """Moves the rows to another number of servers; pushes wait from the cut to the end of it."""
        state, _ = self._runtime.snapshot()
        epoch, since, began = state.routing.table.epoch, state.scaling.target_since, self._clock()
        self._checkpoint(folder, hold_seconds=_HOLD_SECONDS)
        if self._runtime.snapshot()[0].routing.table.epoch == epoch:
            return
        self._assign()
        state, _ = self._runtime.snapshot()
        if state.routing.ready:
            pause = self._clock() - began
            _log.info("reshaped", servers=len(state.routing.table.servers), pause_seconds=round(pause, 3))
            self._runtime.started_up(Role.PS, since, pause)

    def _checkpoint(self, folder: CheckpointFolder, hold_seconds: float = 0.0) -> None:
        """Takes a checkpoint; with `hold_seconds`, as the way to another number of servers."""
        try:
            taken = [int(identifier) for identifier in folder.folders()]
        except OSError as error:
            self._checkpoint_failed(self._unreachable(error))
            return
        state = self._runtime.update(lambda now: progress.cut_begun(now, max([now.next_cut - 1, *taken]) + 1))
        if state.cut is None:
            return
        number = state.cut.number
        taker = CutTaker(self._runtime, self._servers, folder, state, number, self._abandons(state.routing.table.epoch))
        try:
            manifest = taker.take(hold_seconds)
        except AbandonedError:
            self._undo_cut(state, number, "the job went on otherwise")
            return
        except (ServerCallError, OSError) as error:
            self._undo_cut(state, number, str(error))
            self._checkpoint_failed(str(error), counts=not (isinstance(error, ServerCallError) and error.away))
            return
        # Before anybody is told: once the job is Complete, this process may be ended at any moment.
        try:
            folder.prune(self._spec.checkpoint.keep, self._damaged)
        except OSError as error:
            _log.warning("old checkpoints stay", problem=str(error))
        if hold_seconds:
            self._runtime.update(lambda now: reshaped(now, self._spec, number, manifest.id))
        else:
            applied = {one.epoch: one.ranges for one in manifest.applied}
            self._runtime.update(lambda now: progress.cut_saved(now, number, manifest.id, applied))
        self._failures = 0
        self._rest_until_due()

    def _undo_cut(self, state: JobState, number: int, why: str) -> None:
        """Thaws every server and removes what was written, unless the checkpoint is complete after all."""
        identifier = checkpoint_id(number)
        _log.warning("checkpoint is given up", checkpoint=identifier, reason=why)
        for server in state.routing.table.servers:
            self._thaw(server, number)
        complete = False
        if self._folder is not None:
            try:
                complete = identifier in self._folder.complete()
                if not complete:
                    self._folder.delete(identifier)
            except OSError as error:
                _log.warning("what was written of it stays", checkpoint=identifier, problem=str(error))
        if complete:
            self._runtime.update(lambda now: progress.cut_saved(now, number, identifier))
        else:
            self._runtime.update(lambda now: progress.cut_abandoned(now, number))

    def _thaw(self, server: PsAddress, number: int) -> None:
        request = {server: pb.ThawRequest(cut=number)}
        try:
            self._servers.call(
                lambda stub: stub.Thaw, request, pb.ThawReply, lambda: self._runtime.closing, seconds=5.0
            )
        except (ServerCallError, AbandonedError) as error:
            _log.info("thaw failed", member=f"ps-{server.index}", problem=str(error))

    def _checkpoint_failed(self, problem: str, counts: bool = True) -> None:
        """Tries again later; a job that can do nothing else gives up after some attempts."""
        state, _ = self._runtime.snapshot()
        self._failures += counts or state.suspending
        _log.warning("checkpoint failed", problem=problem, failures=self._failures)
        self._rest_until_due(self._runtime.checkpoint_interval / 10)
        if self._failures >= _ATTEMPTS and state.suspending:
            self._runtime.update(progress.suspended)
        elif self._failures >= _ATTEMPTS and state.stage is Stage.SAVE:
            self._runtime.update(lambda now: progress.failed(now, "CheckpointFailed", problem))
        else:
            self._runtime.update(lambda now: replace(now, trouble=Trouble("CheckpointFailed", problem)))
            self._runtime.pause(_RETRY_SECONDS)

    def _unreachable(self, error: OSError) -> str:
        return f"spec.checkpoint.uri ({self._spec.checkpoint.uri}) cannot be used: {error}"

    def _abandons(self, epoch: int) -> Callable[[], bool]:
        def abandoned() -> bool:
            state, _ = self._runtime.snapshot()
            return self._runtime.closing or state.over or state.routing.table.epoch != epoch

        return abandoned


def _restored(applied: Applied, source: CheckpointManifest | None) -> Restored:
    if source is None:
        return Restored(applied)
    data = tuple((file.uri, file.bytes) for file in (*source.training_files, *source.evaluation_files))
    return Restored(applied, source.evaluations, data, source.training_seconds)
