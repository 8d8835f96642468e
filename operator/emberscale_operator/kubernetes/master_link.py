"""The conversation with one job's master, which may come, go and come back."""

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio
import structlog

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import tls
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.tls import handshake_problem_async
from emberscale_api.rpc.token import CHANNEL_OPTIONS
from emberscale_operator.kubernetes.demands import NUMBERS
from emberscale_operator.machine import InstanceExit, InstanceId

_RETRY_SECONDS = 1.0
_CALL_SECONDS = 5.0
_SUSPEND_SECONDS = 900.0
_LONGEST_RETRY_SECONDS = 8.0
_PATIENCE = 8
_AUTHORITY = "the authority in the job's Secret"
_SIGNS_OF_TLS = ("SSL_ERROR", "Socket closed")
"""In what gRPC says of a server that cannot be talked to."""
_KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))

_log = structlog.get_logger()


class MasterLink:
    """Follows the plan and the status. `wake` is called when there is news of the plan or of a suspension.

    `authority` speaks for a master that serves TLS.
    """

    def __init__(
        self,
        address: str,
        token: str,
        wake: Callable[[], None],
        status_seconds: float,
        authority: bytes | None = None,
    ) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = tls.connect_async(address, authority, [*CHANNEL_OPTIONS, *_KEEPALIVE])
        self._stub: MasterStub = MasterStub(self._channel)
        self._authority = authority
        self._explained = False
        self._wake = wake
        self._status_seconds = status_seconds
        self._suspension: asyncio.Task[bool] | None = None
        self._heard_at = time.monotonic()
        self._reached = asyncio.Event()
        self._asking = asyncio.Lock()
        self.plan: pb.Plan | None = None
        self.status: pb.JobStatus | None = None
        self.answers = False
        """Whether the last call was answered."""
        self._tasks = [asyncio.create_task(self._follow_plan()), asyncio.create_task(self._follow_status())]

    async def report_exit(self, instance: InstanceId, uid: str, ended: InstanceExit, cause: str) -> bool:
        """Tells the master that a member is gone; False where it must be told again."""
        reason = cause if cause == "NodeLost" else str(ended.reason)
        member = pb.Member(role=NUMBERS[instance.role], index=instance.index, incarnation=uid)
        request = pb.ReportExitRequest(member=member, exit_code=ended.code, reason=reason)
        try:
            await self._stub.ReportExit(request, timeout=_CALL_SECONDS, metadata=self._metadata)  # type: ignore[misc]
        except grpc.aio.AioRpcError:
            return False
        return True

    def suspend(self) -> bool:
        """Asks for a checkpoint and the end, unless that is under way; True once the job rests."""
        if self._suspension is None:
            self._suspension = asyncio.create_task(self._suspend())
            self._suspension.add_done_callback(lambda _: self._wake())
        if not self._suspension.done():
            return False
        done = not self._suspension.cancelled() and self._suspension.result()
        if not done:
            self._suspension = None
        return done

    async def shut_down(self) -> bool:
        """Tells the master of a job that is over to end; False where it cannot be told."""
        try:
            await self._stub.Shutdown(  # type: ignore[misc]  # the stubs know of threads only
                pb.ShutdownRequest(), timeout=_CALL_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return False
        return True

    async def refresh_status(self) -> None:
        """Asks for the status now, if the master answers.

        One caller at a time: the answer to an earlier one could come last, and hide how the job ended.
        """
        async with self._asking:
            try:
                self.status = await self._stub.GetStatus(  # type: ignore[misc]  # the stubs know of threads only
                    pb.GetStatusRequest(), timeout=_CALL_SECONDS, metadata=self._metadata
                )
                self._hears()
            except grpc.aio.AioRpcError as error:
                self._hears_nothing()
                await self._explain(error.details() or "")

    def _hears(self) -> None:
        self.answers = True
        self._heard_at = time.monotonic()
        self._reached.set()

    async def _explain(self, said: str) -> None:
        """Tells once of a master that differs about TLS; one that is away comes back by itself."""
        if self._explained or not any(sign in said for sign in _SIGNS_OF_TLS):
            return
        problem = await handshake_problem_async(self.address, self._authority, _AUTHORITY)
        if problem is not None:
            self._explained = True
            _log.warning("a master cannot be talked to", problem=problem)

    def _hears_nothing(self) -> None:
        self.answers = False
        self._reached.clear()

    async def close(self) -> None:
        """Ends the conversation."""
        tasks = [*self._tasks, *([self._suspension] if self._suspension else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(grace=None)

    async def _suspend(self) -> bool:
        try:
            await self._stub.Suspend(  # type: ignore[misc]  # the stubs know of threads only
                pb.SuspendRequest(), timeout=_SUSPEND_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_RETRY_SECONDS)
            return False
        await self.refresh_status()
        return True

    async def _follow_plan(self) -> None:
        while True:
            await self._reached.wait()
            known = self.plan.version if self.plan else 0
            try:
                call = self._stub.WatchPlan(pb.WatchPlanRequest(newer_than=known), metadata=self._metadata)
                async for plan in call:  # type: ignore[attr-defined]  # the stubs know of threads only
                    self.plan = plan
                    await self.refresh_status()
                    self._wake()
            except grpc.aio.AioRpcError:
                self._hears_nothing()
            await asyncio.sleep(_RETRY_SECONDS)
            await self.refresh_status()

    async def _follow_status(self) -> None:
        while True:
            answered = self.answers
            await self.refresh_status()
            if self.answers != answered or self.answers:
                self._wake()
            silent = time.monotonic() - self._heard_at
            await asyncio.sleep(self._status_seconds if self.answers else retry_seconds(silent))


def retry_seconds(silent: float) -> float:
    """When to ask a master again that was silent for so long: hundreds of them are not to keep an operator busy."""
    return min(max(_RETRY_SECONDS, silent / _PATIENCE), _LONGEST_RETRY_SECONDS)
