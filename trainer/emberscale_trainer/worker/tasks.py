"""Asking the master for work."""

import threading
from collections.abc import Callable

from emberscale_api.job import DataSpec
from emberscale_api.rpc import master_pb2
from emberscale_api.rpc.codec import file_from_wire
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.membership import JobOverError, MasterClient
from emberscale_trainer.worker.channel import ChannelClosedError
from emberscale_trainer.worker.leases import FinishedTask, LeaseBook, ShardLease
from emberscale_trainer.worker.messages import lease_of, wire_result

_IDLE_WAIT_SECONDS = 5.0
_BUSY_WAIT_SECONDS = 0.1


class TaskFeed:
    """The stream of tasks. It does tasks that prepare the data itself, and passes on training and evaluation."""

    def __init__(self, master: MasterClient, leases: LeaseBook, data: DataSpec, stopping: threading.Event) -> None:
        self._master = master
        self._leases = leases
        self._data = data
        self._format = record_format(data)
        self._stopping = stopping

    def next(self, unwanted: Callable[[], bool] = lambda: False) -> ShardLease:
        """Returns the next lease, which the lease book then holds. Reports finished tasks meanwhile.

        Raises ChannelClosedError once the task is `unwanted`, JobOverError, SupersededError, DataUnavailableError.
        """
        while True:
            task = self._acquire(unwanted)
            if (lease := lease_of(task)) is not None:
                self._leases.hold(lease)
                return lease
            self._leases.finish(self._prepare(task))

    def _acquire(self, unwanted: Callable[[], bool]) -> master_pb2.Task:
        while not self._stopping.is_set():
            if unwanted():  # the held leases may stay unfinished, and then no task would ever come
                raise ChannelClosedError
            # Batches in flight finish soon; the wait is short so that their results are reported promptly.
            busy = bool(self._leases.held())
            request = master_pb2.AcquireTaskRequest(
                member=self._master.member,
                finished=map(wire_result, self._leases.take_finished()),
                max_wait_seconds=0.0 if busy else _IDLE_WAIT_SECONDS,
            )
            reply = self._master.call(self._master.stub.AcquireTask, request, waits=request.max_wait_seconds)
            if reply.stop:
                break
            if reply.HasField("task"):
                return reply.task
            if busy:
                self._leases.wait_for_finished(_BUSY_WAIT_SECONDS)
        raise JobOverError("the job has no more work for this worker")

    def _prepare(self, task: master_pb2.Task) -> FinishedTask:
        if task.kind == master_pb2.DISCOVER:
            return FinishedTask(task.token, tuple(expand(self._data.train)), tuple(expand(self._data.evaluation)))
        file = file_from_wire(task.file)
        self._format.check_file(file)
        blocks = self._format.index_file(file, task.file_number, self._data.shuffling.block_records)
        return FinishedTask(task.token, blocks=tuple(blocks))
