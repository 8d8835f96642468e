"""How long a worker waits for a newer routing table before it starts again."""

import threading
import time
from typing import Any, cast

from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership import MasterClient
from emberscale_trainer.worker.routes import Routes


class Master:
    """Publishes tables: `version` is that of the newest one. Once the job is `over`, answers at once as it ends."""

    def __init__(self) -> None:
        self.member = master_pb2.Member()
        self.stub = self
        self.version = 1
        self.over = False
        self.asked = threading.Event()
        self._changed = threading.Condition()

    def GetRouting(self, request: master_pb2.GetRoutingRequest) -> master_pb2.Routing:
        with self._changed:
            if request.newer_than:
                self.asked.set()
            self._changed.wait_for(lambda: self.over or self.version > request.newer_than, request.max_wait_seconds)
            return master_pb2.Routing(generation=1, version=self.version, ready=True)

    def call(self, method: Any, request: Any, waits: float = 0.0, stopping: threading.Event | None = None) -> Any:
        return method(request)

    def publish(self) -> None:
        with self._changed:
            self.version += 1
            self._changed.notify_all()


def routes_of(master: Master) -> Routes:
    return Routes(cast(MasterClient, master), threading.Event())


def test_a_pause_ends_with_a_newer_table() -> None:
    master = Master()
    routes = routes_of(master)
    pause = threading.Thread(target=routes.pause, args=(600.0,), daemon=True)
    pause.start()
    assert master.asked.wait(60)
    assert pause.is_alive()
    master.publish()
    pause.join(60)
    assert not pause.is_alive()


def test_a_pause_without_a_newer_table_is_whole_even_if_the_master_answers_early() -> None:
    """A worker whose servers are gone would otherwise start again and again, as fast as it can, until it is stopped."""
    master = Master()
    routes = routes_of(master)
    for master.over in (False, True):
        began = time.monotonic()
        routes.pause(0.2)
        assert time.monotonic() - began >= 0.2
