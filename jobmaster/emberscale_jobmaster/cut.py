"""One checkpoint: freeze, cut, save, and the manifest last."""

from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DataFileIdentity, EpochApplied
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster import messages
from emberscale_jobmaster.applied import Applied, minus, on_all, on_any
from emberscale_jobmaster.checkpoints import CheckpointFolder, checkpoint_id
from emberscale_jobmaster.parameter_servers import ParameterServers
from emberscale_jobmaster.progress import cut_made
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState, Stage

_FREEZE_SECONDS = 30.0
_SETTLE_SECONDS = 2.0
_COPY_SECONDS = 300.0
_SLOWED = 0.1
"""The share of training that is taken to be lost while a checkpoint is written beside it."""

_log = structlog.get_logger()


class CutTaker:
    """Takes one checkpoint of a job whose `state` holds leases back, from all servers of its routing table.

    Methods raise ServerCallError, AbandonedError and OSError; the caller then thaws the servers and removes what was
    written.
    """

    def __init__(
        self,
        runtime: JobRuntime,
        servers: ParameterServers,
        folder: CheckpointFolder,
        state: JobState,
        number: int,
        abandoned: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._servers = servers
        self._folder = folder
        self._state = state
        self._targets = state.routing.table.servers
        self._number = number
        self._abandoned = abandoned

    def take(self, hold_seconds: float = 0.0) -> CheckpointManifest:
        """Takes the checkpoint and returns its manifest, which is written.

        The servers hold pushes for `hold_seconds` after the cut, unless they are assigned anew before.
        """
        started = self._runtime.now()
        applied, pause = self._cut(hold_seconds)
        self._runtime.update(lambda state: cut_made(state, self._number))
        files = self._saved_files()
        self._runtime.store.confirm()
        manifest = self._manifest(applied, files)
        self._folder.write(manifest)
        seconds = self._runtime.now() - started
        self._runtime.checkpoint_taken(pause + _SLOWED * max(0.0, seconds - pause))
        _log.info(
            "checkpoint is complete",
            checkpoint=manifest.id,
            bytes=sum(file.bytes for file in files),
            seconds=round(seconds, 3),
        )
        return manifest

    def _cut(self, hold_seconds: float) -> tuple[Applied, float]:
        """Holds pushes on all servers, settles what only some have applied, and copies.

        Returns what is applied, and for how many seconds pushes were held.
        """
        asked = {self._state.epoch: self._state.ledger.under_way} if self._state.stage is Stage.TRAIN else {}
        request = pb.FreezeRequest(cut=self._number, asked=messages.wire_applied(asked))
        frozen = self._servers.call(
            lambda stub: stub.Freeze,
            dict.fromkeys(self._targets, request),
            pb.FreezeReply,
            self._abandoned,
            _FREEZE_SECONDS,
        )
        begun = {server: messages.applied(reply.applied) for server, reply in frozen.items()}
        anywhere = on_any(begun.values())
        requests = {
            server: pb.CutRequest(
                cut=self._number,
                settle=messages.wire_applied(minus(anywhere, begun[server])),
                settle_seconds=_SETTLE_SECONDS,
                hold_seconds=hold_seconds,
                uri=f"{self._folder.uri_of(checkpoint_id(self._number))}/",
            )
            for server in self._targets
        }
        cuts = self._servers.call(
            lambda stub: stub.Cut, requests, pb.CutReply, self._abandoned, _SETTLE_SECONDS + _COPY_SECONDS
        )
        pause = max(reply.pause_seconds for reply in cuts.values())
        _log.info("cut", cut=self._number, pause_seconds=pause)
        return on_all([messages.applied(reply.applied) for reply in cuts.values()]), pause

    def _saved_files(self) -> tuple[CheckpointFile, ...]:
        replies = self._servers.call(
            lambda stub: stub.AwaitSaved,
            dict.fromkeys(self._targets, pb.AwaitSavedRequest(cut=self._number)),
            pb.AwaitSavedReply,
            self._abandoned,
        )
        return tuple(
            CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32)
            for server in self._targets
            for file in replies[server].files
        )

    def _manifest(self, applied: Applied, files: tuple[CheckpointFile, ...]) -> CheckpointManifest:
        state, job = self._state, self._runtime.job
        return CheckpointManifest(
            id=checkpoint_id(self._number),
            cut=self._number,
            created=datetime.now(UTC),
            job_uid=self._runtime.job_uid,
            job=job,
            ps_count=len(self._targets),
            routing_epoch=state.routing.table.epoch,
            epoch=state.epoch,
            batch_size=job.spec.training.batch_size,
            training_records=state.training_records,
            applied=tuple(EpochApplied(epoch=epoch, ranges=batches) for epoch, batches in applied.items()),
            evaluations=state.evaluations,
            training_files=tuple(DataFileIdentity(uri=file.uri, bytes=file.bytes) for file in state.training_files),
            evaluation_files=tuple(DataFileIdentity(uri=file.uri, bytes=file.bytes) for file in state.evaluation_files),
            training_seconds=state.clock.training_seconds,
            files=files,
        )
