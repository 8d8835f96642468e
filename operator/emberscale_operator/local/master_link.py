"""The conversation with a job's master: its plan and status as they are now, and what is to be told to it."""

import threading
from collections.abc import Callable

import grpc

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.plan import MESSAGE_ROLES
from emberscale_operator.machine import InstanceExit, InstanceId

_RETRY_SECONDS = 0.2
_STATUS_SECONDS = 0.5
_CALL_TIMEOUT_SECONDS = 5.0


class MasterLink:
    """Follows the master in threads of its own; it may come, go and come back.

    `wake` is called, from those threads, whenever there is news.
    """

    def __init__(self, address: str, token: str, wake: Callable[[], None], authority: bytes | None = None) -> None:
        self._channel = open_channel(address, token, authority)
        self._stub = MasterStub(self._channel)
        self._wake = wake
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._closing = threading.Event()
        self._plan: pb.Plan | None = None
        self._status: pb.JobStatus | None = None
        self._reporting: dict[InstanceId, grpc.Future[pb.ReportExitReply]] = {}
        self._threads = [
            threading.Thread(target=self._follow_plan, name="plan", daemon=True),
            threading.Thread(target=self._follow_status, name="status", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def plan(self) -> pb.Plan | None:
        """The newest plan; None until the master was reached."""
        with self._lock:
            return self._plan

    @property
    def status(self) -> pb.JobStatus | None:
        """The newest status; None until the master was reached."""
        with self._lock:
            return self._status

    def refresh_status(self) -> None:
        """Asks for the status now, if the master answers.

        One caller at a time: the answer to an earlier one could come last, and hide how the job ended.
        """
        with self._asking:
            try:
                status = self._stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_TIMEOUT_SECONDS)
            except grpc.RpcError:
                return
            with self._lock:
                self._status = status

    def report_exit(self, instance: InstanceId, incarnation: str, ended: InstanceExit) -> None:
        """Starts to tell the master that a member is gone, unless that is under way."""
        if instance in self._reporting:
            return
        request = pb.ReportExitRequest(
            member=pb.Member(role=MESSAGE_ROLES[instance.role], index=instance.index, incarnation=incarnation),
            exit_code=ended.code,
            reason=str(ended.reason),
        )
        future = self._stub.ReportExit.future(request, timeout=_CALL_TIMEOUT_SECONDS)
        self._reporting[instance] = future
        future.add_done_callback(lambda _: self._wake())

    def take_reported(self) -> list[InstanceId]:
        """The exits that the master has confirmed since the last call; those that failed may be reported again."""
        done = [instance for instance, future in self._reporting.items() if future.done()]
        return [instance for instance in done if self._reporting.pop(instance).exception() is None]

    def suspend(self, timeout: float) -> "grpc.Future[pb.SuspendReply]":
        """Asks for a checkpoint and the end of the run; waits for the master if it is away."""
        future = self._stub.Suspend.future(pb.SuspendRequest(), timeout=timeout, wait_for_ready=True)
        future.add_done_callback(lambda _: self._wake())
        return future

    def close(self) -> None:
        """Ends the threads and the connection."""
        self._closing.set()
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout=_CALL_TIMEOUT_SECONDS)

    def _follow_plan(self) -> None:
        while not self._closing.is_set():
            plan = self.plan
            try:
                for newer in self._stub.WatchPlan(pb.WatchPlanRequest(newer_than=plan.version if plan else 0)):
                    with self._lock:
                        self._plan = newer
                    self._wake()
            except (grpc.RpcError, ValueError):  # ValueError: the channel was closed under the call
                pass
            self._closing.wait(_RETRY_SECONDS)

    def _follow_status(self) -> None:
        while not self._closing.is_set():
            try:
                self.refresh_status()
            except ValueError:
                return
            self._closing.wait(_STATUS_SECONDS)
