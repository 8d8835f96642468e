"""A local run's conversation with its master."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterServicer, add_MasterServicer_to_server
from emberscale_operator.local.master_link import MasterLink


class SlowAtFirst(MasterServicer):
    """Its status counts how often it was asked; the first answer takes as long as it is told."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()
        self._lock = threading.Lock()
        self._times = 0

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:  # noqa: N802
        with self._lock:
            self._times += 1
            times = self._times
        self.asked.set()
        if times == 1:
            self.answers.wait(4)
        return pb.JobStatus(samples=times)


@pytest.fixture
def master() -> Iterator[tuple[SlowAtFirst, str]]:
    servicer = SlowAtFirst()  # type: ignore[abstract]  # what else a master does is not asked for
    server = grpc.server(ThreadPoolExecutor(4))
    add_MasterServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_an_answer_that_was_long_under_way_hides_no_later_one(master: tuple[SlowAtFirst, str]) -> None:
    servicer, address = master
    link = MasterLink(address, "token", lambda: None)
    try:
        assert servicer.asked.wait(20)  # by the thread that follows the status
        later = threading.Thread(target=link.refresh_status)
        later.start()
        later.join(0.5)  # it may have to wait for its turn
        servicer.answers.set()
        seen: list[int] = []
        while not seen or seen[-1] < 4:
            if link.status is not None:
                seen.append(link.status.samples)
            threading.Event().wait(0.01)
        later.join()
        assert seen == sorted(seen)
    finally:
        link.close()
