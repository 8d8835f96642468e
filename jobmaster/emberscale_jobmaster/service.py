"""The gRPC service of the master: checks a request, steps the machine, and answers once the state is durable."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import structlog
from pydantic import ValidationError

from emberscale_api.dataset import DataFile, Split
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.codec import message_of, role_from_wire, same_fields
from emberscale_jobmaster import draining, messages, status, stragglers, tasks
from emberscale_jobmaster.effects import Granted, LeasesVoid
from emberscale_jobmaster.events import (
    DrainWanted,
    Exited,
    FailureReported,
    HeartbeatReceived,
    Registered,
    SuspensionWanted,
    TaskFinished,
    TaskWanted,
)
from emberscale_jobmaster.figures import wanted_sizes
from emberscale_jobmaster.membership import SupersededMemberError, UnknownMemberError
from emberscale_jobmaster.reports import Vitals
from emberscale_jobmaster.runtime import ClosingError, JobRuntime
from emberscale_jobmaster.state import PREPARATION, JobState, Stage
from emberscale_jobmaster.store import JobStore, StoreUnavailableError
from emberscale_jobmaster.tasks import InvalidReportError, Task


class DatasetNotReadyError(Exception):
    """The data is not indexed yet; a worker that waits for a task learns when it is."""

    def __init__(self) -> None:
        super().__init__("the data is not indexed yet: call again")


class DatasetCatalog:
    """Reads the index from the store once, when it is complete."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._dataset: pb.Dataset | None = None

    def get(self, state: JobState) -> pb.Dataset:
        """Files and blocks of both splits. Raises DatasetNotReadyError."""
        if state.stage in PREPARATION:
            raise DatasetNotReadyError
        with self._lock:
            if self._dataset is None:
                self._dataset = self._load(state)
            return self._dataset

    def _load(self, state: JobState) -> pb.Dataset:
        by_file = {key: pb.TaskResult.FromString(blocks).blocks for key, blocks in self._store.blocks().items()}

        def blocks(split: Split, files: tuple[DataFile, ...]) -> list[pb.Block]:
            return [block for number, file in enumerate(files) if not file.trained for block in by_file[split, number]]

        return message_of(
            pb.Dataset,
            state,
            training_blocks=blocks(Split.TRAINING, state.training_files),
            evaluation_blocks=blocks(Split.EVALUATION, state.evaluation_files),
        )


STEERING = ("ReportExit", "Scale", "Replace", "Suspend", "Shutdown")
"""The calls that only the operator makes."""

_LONGEST_WAIT_SECONDS = 10.0
_CODES: dict[type[Exception], grpc.StatusCode] = {
    UnknownMemberError: grpc.StatusCode.NOT_FOUND,
    SupersededMemberError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidReportError: grpc.StatusCode.INVALID_ARGUMENT,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    ClosingError: grpc.StatusCode.UNAVAILABLE,
    DatasetNotReadyError: grpc.StatusCode.UNAVAILABLE,
    ValidationError: grpc.StatusCode.INVALID_ARGUMENT,
}
_Call = TypeVar("_Call", bound=Callable[..., Any])
_log = structlog.get_logger()


def _answering(call: _Call) -> _Call:
    """Turns what the core raises into a status that the caller can act on."""

    @functools.wraps(call)
    def answer(self: "MasterService", request: Any, context: grpc.ServicerContext) -> Any:
        try:
            messages.check_numbers(request)
            return call(self, request, context)
        except tuple(_CODES) as error:
            if isinstance(error, InvalidReportError):
                member = getattr(request, "member", pb.Member())
                slot = f"{role_from_wire(member.role) or 'unknown'}-{member.index}"
                _log.warning("report_refused", call=call.__name__, member=slot, problem=str(error))
            context.abort(_CODES[type(error)], str(error))

    return answer  # type: ignore[return-value]  # same signature, which mypy cannot see through Any


class MasterService(rpc.MasterServicer):
    """The gRPC service of one job's master. `shut_down` must return before the process has ended."""

    def __init__(
        self, runtime: JobRuntime, own_status: Callable[[], pb.MemberStatus], shut_down: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        self._own_status = own_status
        self._shut_down = shut_down
        self._manifest = runtime.job.to_json()
        self._catalog = DatasetCatalog(runtime.store)

    @_answering
    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        """Joins the job."""
        member = messages.member_id(request.member, Role.PS, Role.WORKER)
        event = Registered(
            now=self._runtime.now(),
            member=member,
            process=messages.process(request, member.role),
            generation=request.generation,
            version=request.routing_version,
        )
        self._runtime.handle(event)
        _log.info("registered", member=member.slot, incarnation=member.incarnation, pid=request.pid, host=request.host)
        return pb.RegisterReply(
            manifest_json=self._manifest, heartbeat_seconds=self._runtime.spec.sharding.heartbeat_interval
        )

    @_answering
    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        """Keeps the member and its leases alive, and takes its progress."""
        member = self._caller(request.member, Role.PS, Role.WORKER)
        work = messages.work_report(request.worker) if request.HasField("worker") else None
        served = messages.server_report(request.ps) if request.HasField("ps") else None
        if request.bad_records:
            self._runtime.note_bad_records(messages.bad_records(request.bad_records))
        event = HeartbeatReceived(
            now=self._runtime.now(),
            member=member,
            vitals=same_fields(Vitals, request),
            leases={lease.token: lease.committed for lease in request.leases},
            sequence=request.delta_sequence,
            work=work,
            served=served,
            generation=request.ps.generation,
            version=request.ps.routing_version,
            next_token=request.ps.next_token,
            next_barrier=request.ps.next_barrier,
            next_checkpoint=request.ps.next_checkpoint,
        )
        handled = self._runtime.handle(event)
        state, table = handled.job, handled.job.routing.table
        wanted = wanted_sizes(state, handled.spec)
        size = wanted.worker if member.role is Role.WORKER else wanted.ps
        reply = pb.HeartbeatReply(
            generation=table.generation,
            routing_version=table.version,
            revoked_tokens=[
                token for answer in handled.answers if isinstance(answer, LeasesVoid) for token in answer.tokens
            ],
            stop=state.over,
            cpu_cores=size.cpu_cores or 0.0,
            memory_bytes=size.memory_bytes or 0,
        )
        if member.role is Role.PS and state.routing.ready and request.ps.generation == table.generation:
            reply.leases.CopyFrom(messages.lease_tokens(state))
        return reply

    @_answering
    def AcquireTask(self, request: pb.AcquireTaskRequest, context: grpc.ServicerContext) -> pb.AcquireTaskReply:
        """Takes finished tasks, and leases the next one."""
        member = self._caller(request.member, Role.WORKER)
        self._take_finished(member, request.finished)
        deadline = time.monotonic() + min(max(request.max_wait_seconds, 0.0), _LONGEST_WAIT_SECONDS)
        while True:
            task, over = self._lease(member)
            left = deadline - time.monotonic()
            if task is not None or over or left <= 0 or not context.is_active():
                return pb.AcquireTaskReply(task=messages.wire_task(task) if task is not None else None, stop=over)
            self._runtime.wait_until(functools.partial(self._has_work, member), left)

    @_answering
    def GetRouting(self, request: pb.GetRoutingRequest, context: grpc.ServicerContext) -> pb.Routing:
        """The routing table, when there is a newer one that is ready, or after the wait."""
        self._caller(request.member, Role.PS, Role.WORKER)

        def newer(state: JobState) -> bool | None:
            routing = state.routing
            return (state.over or (routing.ready and routing.table.version > request.newer_than)) or None

        self._runtime.wait_until(newer, min(max(request.max_wait_seconds, 0.0), _LONGEST_WAIT_SECONDS))
        state, _ = self._runtime.snapshot()
        return messages.wire_routing(state.routing.table, state.routing.ready)

    @_answering
    def GetDataset(self, request: pb.GetDatasetRequest, context: grpc.ServicerContext) -> pb.Dataset:
        """The index of the data."""
        self._caller(request.member, Role.PS, Role.WORKER)
        state, _ = self._runtime.snapshot()
        return self._catalog.get(state)

    @_answering
    def ReportFailure(self, request: pb.ReportFailureRequest, context: grpc.ServicerContext) -> pb.ReportFailureReply:
        """Takes the report of a member that cannot continue."""
        member = self._caller(request.member, Role.PS, Role.WORKER)
        reason, message = messages.failure(request)
        _log.error("failure_reported", member=member.slot, reason=reason, problem=message, fatal=request.fatal)
        self._runtime.handle(
            FailureReported(now=self._runtime.now(), member=member, reason=reason, message=message, fatal=request.fatal)
        )
        return pb.ReportFailureReply()

    @_answering
    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        """Returns the job's full status."""
        return self._status()

    def WatchPlan(self, request: pb.WatchPlanRequest, context: grpc.ServicerContext) -> Iterator[pb.Plan]:
        """Streams every plan newer than the one that the caller knows."""
        known = request.newer_than
        while context.is_active():
            try:
                plan = self._runtime.wait_until(functools.partial(self._newer_plan, known), _LONGEST_WAIT_SECONDS)
            except (ClosingError, StoreUnavailableError) as error:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            if plan is not None:
                known = plan.version
                yield plan

    @_answering
    def ReportExit(self, request: pb.ReportExitRequest, context: grpc.ServicerContext) -> pb.ReportExitReply:
        """Takes the operator's report that a process ended."""
        member = messages.member_id(request.member, Role.MASTER, Role.PS, Role.WORKER)
        _log.info("exited", member=member.slot, exit_code=request.exit_code, reason=request.reason)
        self._runtime.handle(
            Exited(now=self._runtime.now(), member=member, exit_code=request.exit_code, reason=request.reason)
        )
        return pb.ReportExitReply()

    @_answering
    def Scale(self, request: pb.ScaleRequest, context: grpc.ServicerContext) -> pb.ScaleReply:
        """Follows the edited numbers of the manifest."""
        self._runtime.rescale(request.ps, request.workers, request.waits)
        _log.info("manifest_edited", ps=request.ps, workers=request.workers, problem=request.waits)
        return pb.ScaleReply()

    @_answering
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        """Drains a parameter server; answers when it may go, or after the wait."""
        return self._drained(request, replaced=False)

    @_answering
    def Replace(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        """Begins to drain a parameter server; answers once it owns nothing, or after the wait."""
        return self._drained(request, replaced=True)

    def _drained(self, request: pb.DrainRequest, *, replaced: bool) -> pb.DrainReply:
        index, incarnation, why = messages.drain(request)
        _log.info("drain_wanted", member=f"ps-{index}", incarnation=incarnation, reason=why, replaced=replaced)
        now = self._runtime.now()
        self._runtime.handle(DrainWanted(now=now, index=index, incarnation=incarnation, why=why, replaced=replaced))
        wait = min(max(request.wait_seconds, 0.0), _LONGEST_WAIT_SECONDS)
        may_go = self._runtime.wait_until(lambda state: draining.may_go(state, index, incarnation) or None, wait)
        state, _ = self._runtime.snapshot()
        drain = state.drains.get(index)
        return pb.DrainReply(may_go=bool(may_go), begun=drain is not None and drain.incarnation == incarnation)

    @_answering
    def Suspend(self, request: pb.SuspendRequest, context: grpc.ServicerContext) -> pb.SuspendReply:
        """Takes a checkpoint and suspends the job; answers once the job is Suspended."""
        self._runtime.handle(SuspensionWanted(now=self._runtime.now()))
        state = self._runtime.wait_until(lambda state: state if state.over else None, context.time_remaining())
        if state is None:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the checkpoint is still being taken")
        return pb.SuspendReply(checkpoint=state.checkpoint)

    def Shutdown(self, request: pb.ShutdownRequest, context: grpc.ServicerContext) -> pb.ShutdownReply:
        """Ends the process once the job is over."""
        state, _ = self._runtime.snapshot()
        if not state.over:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the job has not ended")
        self._shut_down()
        return pb.ShutdownReply()

    def _caller(self, member: pb.Member, *roles: Role) -> MemberId:
        """Returns the calling member after checking that it may call."""
        caller = messages.member_id(member, *roles)
        self._runtime.hear(caller)
        return caller

    def _take_finished(self, member: MemberId, results: Sequence[pb.TaskResult]) -> None:
        for result in results:
            if result.bad_records:
                self._runtime.note_bad_records(messages.bad_records(result.bad_records))
            state, _ = self._runtime.snapshot()
            lease = state.ledger.leases.get(result.token)
            if lease is None or lease.holder != member:
                continue
            if state.stage is Stage.INDEX:
                split, number = tasks.file_of(state, lease.start)
                messages.check_blocks(result.blocks, tasks.file_at(state, lease.start), number)
                self._runtime.store.save_blocks(split, number, pb.TaskResult(blocks=result.blocks).SerializeToString())
            finding = messages.finding(result, state.stage)
            event = TaskFinished(now=self._runtime.now(), member=member, token=result.token, finding=finding)
            self._runtime.handle(event)

    def _lease(self, member: MemberId) -> tuple[Task | None, bool]:
        handled = self._runtime.handle(TaskWanted(now=self._runtime.now(), member=member))
        granted = next((answer.task for answer in handled.answers if isinstance(answer, Granted)), None)
        return granted, handled.job.over

    def _has_work(self, member: MemberId, state: JobState) -> bool | None:
        seen, now = self._runtime.snapshot()[1], self._runtime.now()
        leases, _ = stragglers.leases_for(state, seen, self._runtime.spec, member, now)
        return (state.over or tasks.acquire(state, self._runtime.spec, member, 1, leases)[1] is not None) or None

    def _newer_plan(self, known: int, state: JobState) -> pb.Plan | None:
        if state.plan_version <= known:
            return None
        plan = status.plan(state, self._runtime.spec)
        if state.over:
            plan.final.CopyFrom(self._status())
        return plan

    def _status(self) -> pb.JobStatus:
        state, seen, spec = self._runtime.view()
        answer = status.job_status(state, seen, spec, self._runtime.now())
        if (problem := self._runtime.store_problem) and not state.over:
            answer.reason, answer.message = "StateNotWritable", f"the job waits for its store: {problem}"
        answer.members.insert(0, self._own_status())
        return answer
