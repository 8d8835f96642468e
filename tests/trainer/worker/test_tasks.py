"""Waiting for work."""

import threading
from typing import Any, cast

import pytest

from emberscale_api.dataset import Split
from emberscale_api.job import DataSpec
from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership import MasterClient
from emberscale_trainer.worker.channel import ChannelClosedError
from emberscale_trainer.worker.leases import LeaseBook, ShardLease
from emberscale_trainer.worker.tasks import TaskFeed


class MasterWithoutWork:
    """A master without further work for this worker; counts the requests."""

    member = master_pb2.Member(role=master_pb2.WORKER, incarnation="w")

    def __init__(self) -> None:
        self.stub = self
        self.asked = 0

    def AcquireTask(self) -> None:
        raise NotImplementedError

    def call(self, method: Any, request: Any, waits: float = 0.0) -> master_pb2.AcquireTaskReply:
        self.asked += 1
        return master_pb2.AcquireTaskReply()


def test_a_pipeline_that_is_torn_down_waits_for_no_further_lease() -> None:
    leases, master = LeaseBook(), MasterWithoutWork()
    leases.hold(ShardLease(1, Split.TRAINING, 0, 0, 8, 0))
    feed = TaskFeed(cast(MasterClient, master), leases, DataSpec(train=["x"]), threading.Event())
    with pytest.raises(ChannelClosedError):
        feed.next(lambda: master.asked == 2)
    assert [lease.token for lease, _ in leases.held()] == [1]
