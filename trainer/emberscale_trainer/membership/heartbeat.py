"""The thread that keeps a member alive in the master's eyes."""

import threading
from collections.abc import Callable

import grpc
import psutil
import structlog

from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership.master import JobOverError, MasterClient, SupersededError

log = structlog.get_logger()


class Heartbeat:
    """Sends a heartbeat every `interval` seconds, and at once when `beat_now` is called.

    `fill` completes the request and `accepted` sees the reply; both run in the heartbeat's thread. `stopping` is set
    when the master says that the job is over, or that another process has taken this one's place.
    """

    def __init__(
        self,
        master: MasterClient,
        interval: float,
        fill: Callable[[master_pb2.HeartbeatRequest], None],
        accepted: Callable[[master_pb2.HeartbeatReply], None],
        stopping: threading.Event,
    ) -> None:
        self._master = master
        self._interval = interval
        self._fill = fill
        self._accepted = accepted
        self._wake = threading.Event()
        self._process = psutil.Process()
        self._peak = 0
        self._stopping = stopping
        self.superseded = False

    def start(self) -> None:
        """Begins, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beat_now(self) -> None:
        """Something worth telling has happened."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            request = self._request()
            try:
                reply = self._master.call(self._master.stub.Heartbeat, request)
            except SupersededError as error:
                log.warning("superseded", detail=str(error))
                self.superseded = True
                self._stopping.set()
                return
            except JobOverError:
                return
            except grpc.RpcError as error:
                log.error("heartbeat_refused", code=str(error.code()), detail=error.details())
            else:
                self._accepted(reply)
                if reply.stop:
                    self._stopping.set()
                    return
            self._wake.wait(self._interval)
            self._wake.clear()

    def _request(self) -> master_pb2.HeartbeatRequest:
        memory = self._process.memory_info().rss
        self._peak = max(self._peak, memory)
        times = self._process.cpu_times()
        request = master_pb2.HeartbeatRequest(
            member=self._master.member,
            memory_bytes=memory,
            peak_memory_bytes=self._peak,
            cpu_seconds=times.user + times.system,
        )
        self._fill(request)
        return request
