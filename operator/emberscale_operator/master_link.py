"""The conversation with one job's master, which may come, go and come back."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from emberscale_api.frozen import replace
from emberscale_api.job.running import JobPlan, JobStatus
from emberscale_api.job.status import RESTING
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import tls
from emberscale_api.rpc.codec import wire_role
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.running_codec import plan_from_wire, status_from_wire
from emberscale_api.rpc.tls import handshake_problem_async
from emberscale_api.rpc.token import CHANNEL_OPTIONS, call_metadata
from emberscale_operator.machine import InstanceExit, InstanceId, MasterReport, PhaseNews, Scale
from emberscale_operator.master_bounds import MAX_CHARACTERS, MAX_MESSAGE_BYTES, bounded

_CALL_SECONDS = 5.0
_UNKNOWN_OUTCOMES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_SUSPEND_SECONDS = 900.0
_LONGEST_RETRY_SECONDS = 8.0
_MOST_PLANS, _MOST_PLANS_SECONDS = 20, 2.0
"""The most plans in so many seconds: a master may stream without end."""
_PATIENCE = 8
_SIGNS_OF_TLS = ("SSL_ERROR", "Socket closed")
"""A part of gRPC's message for a server that cannot be reached."""
_CHANNEL = tuple(
    {
        **dict(CHANNEL_OPTIONS),
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.keepalive_time_ms": 10_000,
        "grpc.keepalive_timeout_ms": 5_000,
    }.items()
)


_Said = TypeVar("_Said", bound=Message)
_log = structlog.get_logger()


@dataclass(frozen=True)
class MasterAddress:
    """Where a master listens, and what opens it; `authority` (PEM) speaks for one that serves TLS.

    `authority_source` says for people where that comes from.
    """

    address: str
    token: str
    authority: bytes | None = None
    authority_source: str = "the authority in the job's Secret"


class MasterLink:
    """Follows the plan and the status of one master.

    `wake` is called when there is news. `clock` is that of the decisions, in seconds. A status is asked for every
    `status_seconds`; a master that is away is looked for every `retry_seconds`, less often the longer it is silent.
    """

    def __init__(
        self,
        master: MasterAddress,
        wake: Callable[[], None],
        clock: Callable[[], float],
        status_seconds: float,
        retry_seconds: float = 1.0,
    ) -> None:
        self._master = master
        self._metadata = call_metadata(master.token)
        self._channel = tls.connect_async(master.address, master.authority, _CHANNEL)
        self._stub = MasterStub(self._channel)
        self._wake = wake
        self._clock = clock
        self._status_seconds = status_seconds
        self._retry_seconds = retry_seconds
        self._explained = False
        self._exceeded: set[str] = set()
        self._suspension: asyncio.Task[bool] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._opened_at = clock()
        self._report = MasterReport()
        """What is known of the master beyond its plan and its status; `report` adds these."""
        self._reached = asyncio.Event()
        self._asking = asyncio.Lock()
        self.plan: JobPlan | None = None
        self.status: JobStatus | None = None
        self._tasks = [asyncio.create_task(self._follow_plan()), asyncio.create_task(self._follow_status())]

    @property
    def answers(self) -> bool:
        """Whether the last call was answered."""
        return self._reached.is_set()

    def report(self) -> MasterReport:
        """Returns the master's latest reports, as the job machine takes them."""
        plan, status = self.plan, self.status
        end = None
        if plan is not None and plan.phase in RESTING:
            end = PhaseNews(plan.phase, plan.reason, plan.message)
        said = None
        if status is not None and status.phase is not None:
            said = PhaseNews(status.phase, status.reason, status.message)
        return replace(
            self._report,
            sizes=plan.shapes if plan is not None else None,
            plan_heard=plan is not None,
            asked=plan.asked if plan is not None else None,
            end=end,
            status=said,
            silent=frozenset(plan.silent) if plan is not None else frozenset(),
            drained=frozenset(plan.drained) if plan is not None else frozenset(),
            joined=frozenset(one.member for one in status.members) if status is not None else None,
            answers=self.answers,
            suspended=self._suspended,
        )

    async def report_exit(self, instance: InstanceId, name: str, ended: InstanceExit) -> bool:
        """Tells the master that a member is gone; False where it must be told again."""
        member = pb.Member(role=wire_role(instance.role), index=instance.index, incarnation=name)
        request = pb.ReportExitRequest(member=member, exit_code=ended.code, reason=str(ended.reason))
        try:
            await self._stub.ReportExit(request, timeout=_CALL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return False
        return True

    def suspend(self) -> None:
        """Asks for a checkpoint and the end of the run, unless that is under way or done."""
        if self._suspension is None or (self._suspension.done() and not self._suspended):
            self._suspension = asyncio.create_task(self._suspend())
            self._suspension.add_done_callback(lambda _: self._wake())

    def scale(self, wanted: Scale) -> None:
        """Tells the master of edits, unless it is just being told."""
        if self._scaling is None or self._scaling.done():
            self._report = replace(self._report, told_at=self._clock())
            self._scaling = asyncio.create_task(self._scale(wanted))
            self._scaling.add_done_callback(lambda _: self._wake())

    async def shut_down(self) -> None:
        """Fetches the last status from the master of a finished job, then tells it to end.

        A master may go away before its answer is out, so one that does not answer counts as told.
        """
        await self.refresh_status()
        if not self.answers:
            return
        try:
            await self._stub.Shutdown(pb.ShutdownRequest(), timeout=_CALL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _UNKNOWN_OUTCOMES:
                self._report = replace(self._report, cannot_be_told=True)
                return
        self._report = replace(self._report, told_to_end_at=self._clock())

    async def refresh_status(self) -> None:
        """Asks for the status now, if the master answers.

        One caller at a time: the answer to an earlier one could come last, and hide how the job ended.
        """
        async with self._asking:
            begun_at = self._clock()
            try:
                status = await self._stub.GetStatus(
                    pb.GetStatusRequest(), timeout=_CALL_SECONDS, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                self._reached.clear()
                if self._report.unanswered_since is None:
                    # if this program itself was stopped meanwhile, count at most the longest call
                    since = max(begun_at, self._clock() - _CALL_SECONDS)
                    self._report = replace(self._report, unanswered_since=since)
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self._report = replace(self._report, refuses=True)
                await self._explain(error)
            else:
                said = status_from_wire(self._bounded(status))
                # an answer that was on its way when the master told how the job ended may be from before that
                if self.plan is None or self.plan.final is None or said.phase in RESTING:
                    self.status = said
                now, answered = self._clock(), self._report.answers_since
                since = now if answered is None or self._report.unanswered_since is not None else answered
                self._report = replace(
                    self._report, answers_since=since, heard_at=now, unanswered_since=None, refuses=False
                )
                self._reached.set()

    @property
    def _suspended(self) -> bool:
        task = self._suspension
        return task is not None and task.done() and not task.cancelled() and task.result()

    async def close(self) -> None:
        """Ends the conversation."""
        tasks = [*self._tasks, *(task for task in (self._suspension, self._scaling) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(grace=None)

    def _bounded(self, said: _Said) -> _Said:
        """Brings what the master says within bounds; logs once each field that exceeded them."""
        exceeding: set[str] = set()
        bounded(said, exceeding.add)
        if new := exceeding - self._exceeded:
            self._exceeded |= new
            _log.warning("master_exceeds_bounds", address=self._master.address, fields=sorted(new))
        return said

    async def _explain(self, error: grpc.aio.AioRpcError) -> None:
        """Tells once of a master that differs about the token or TLS; one that is away comes back by itself."""
        said, master = error.details() or "", self._master
        if self._explained:
            return
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            problem: str | None = said
        elif any(sign in said for sign in _SIGNS_OF_TLS):
            problem = await handshake_problem_async(master.address, master.authority, master.authority_source)
        else:
            return
        if problem is not None:
            self._explained = True
            _log.warning("master_unreachable", address=master.address, problem=problem)

    async def _scale(self, wanted: Scale) -> None:
        """Tells the master the manifest's numbers; they are sent again until a plan acknowledges them."""
        request = pb.ScaleRequest(ps=wanted.ps, workers=wanted.workers, waits=wanted.waits[:MAX_CHARACTERS])
        try:
            await self._stub.Scale(request, timeout=_CALL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            _log.warning("edit_not_delivered", problem=error.details())
        await asyncio.sleep(self._retry_seconds)

    async def _suspend(self) -> bool:
        try:
            await self._stub.Suspend(pb.SuspendRequest(), timeout=_SUSPEND_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(self._retry_seconds)
            return False
        await self.refresh_status()
        return True

    async def _follow_plan(self) -> None:
        heard: deque[float] = deque([-_MOST_PLANS_SECONDS] * _MOST_PLANS, _MOST_PLANS)
        while True:
            await self._reached.wait()
            known = self.plan.version if self.plan else 0
            try:
                call = self._stub.WatchPlan(pb.WatchPlanRequest(newer_than=known), metadata=self._metadata)
                async for message in call:
                    self.plan = plan_from_wire(self._bounded(message))
                    # the master may be gone before it can be asked
                    self.status = self.plan.final or self.status
                    await self.refresh_status()
                    self._wake()
                    heard.append(time.monotonic())
                    await asyncio.sleep(heard[0] + _MOST_PLANS_SECONDS - heard[-1])
            except grpc.aio.AioRpcError:
                self._reached.clear()
            await asyncio.sleep(self._retry_seconds)
            await self.refresh_status()

    async def _follow_status(self) -> None:
        while True:
            answered = self.answers
            await self.refresh_status()
            if self.answers or answered:
                self._wake()
            silent = self._clock() - (self._report.heard_at or self._opened_at)
            await asyncio.sleep(self._status_seconds if self.answers else retry_pause(silent, self._retry_seconds))


def retry_pause(silent: float, shortest: float = 1.0) -> float:
    """Returns when to ask a master again that was silent for so long, in seconds: hundreds are not to keep us busy."""
    return min(max(shortest, silent / _PATIENCE), _LONGEST_RETRY_SECONDS)
