"""The worker's side of the ledger: the leases that it holds, how far each is committed, and finished tasks."""

import threading
from dataclasses import dataclass

from emberscale_api.rpc import master_pb2


@dataclass
class _Progress:
    task: master_pb2.Task
    committed: int


class LeaseBook:
    """Shared by the pipeline's stages and the heartbeat."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[int, _Progress] = {}
        self._finished: list[master_pb2.TaskResult] = []

    def hold(self, task: master_pb2.Task) -> None:
        """Adds a lease."""
        with self._changed:
            self._held[task.token] = _Progress(task, task.start)

    def held(self) -> list[tuple[master_pb2.Task, int]]:
        """Leases in the order in which they were granted, and the position up to which each is committed."""
        with self._changed:
            return [(progress.task, progress.committed) for progress in self._held.values()]

    def commit(self, token: int, position: int) -> bool:
        """Commits the lease up to `position`. Returns whether that completes the lease."""
        with self._changed:
            progress = self._held.get(token)
            if progress is None:
                return False
            progress.committed = position
            if position < progress.task.stop:
                return False
            self._finish(master_pb2.TaskResult(token=token))
            return True

    def finish(self, result: master_pb2.TaskResult) -> None:
        """Notes that a task other than training is done."""
        with self._changed:
            self._finish(result)

    def _finish(self, result: master_pb2.TaskResult) -> None:
        self._held.pop(result.token, None)
        self._finished.append(result)
        self._changed.notify_all()

    def take_finished(self) -> list[master_pb2.TaskResult]:
        """Returns the results to report, each once."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait_for_finished(self, seconds: float) -> None:
        """Waits until a task is finished, or for this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, timeout=seconds)

    def progress(self) -> list[master_pb2.LeaseProgress]:
        """Returns the leases for a heartbeat: all held, and the finished ones that are not reported yet."""
        with self._changed:
            held = [
                master_pb2.LeaseProgress(token=token, committed=progress.committed)
                for token, progress in self._held.items()
            ]
            return held + [master_pb2.LeaseProgress(token=result.token) for result in self._finished]

    def revoke(self, tokens: set[int]) -> bool:
        """Drops leases that the master has given to others. Returns whether this worker held any of them."""
        with self._changed:
            lost = [token for token in tokens if token in self._held]
            for token in lost:
                del self._held[token]
            return bool(lost)

    def drop_all(self) -> None:
        """Forgets everything: the job has rolled back, and the master has revoked all leases."""
        with self._changed:
            self._held.clear()
            self._finished.clear()
