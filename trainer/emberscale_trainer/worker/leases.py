"""The worker's side of the ledger: its leases with their committed positions, and finished tasks."""

import threading
from dataclasses import dataclass

from emberscale_api.dataset import Block, DataFile, Split
from emberscale_trainer.worker.statistics import EvaluationTotals


@dataclass(frozen=True)
class ShardLease:
    """Positions [start, stop) of an epoch, to train on or, of the evaluation data, to evaluate.

    `shard` is the start of the shard as first cut; together with the epoch it names the shard.
    """

    token: int
    split: Split
    epoch: int
    start: int
    stop: int
    shard: int

    @property
    def trains(self) -> bool:
        """Whether it is for training."""
        return self.split is Split.TRAINING


@dataclass(frozen=True)
class FinishedTask:
    """The result of a task: files that were found, the blocks of a file, an evaluation, or only its end."""

    token: int
    training_files: tuple[DataFile, ...] = ()
    evaluation_files: tuple[DataFile, ...] = ()
    blocks: tuple[Block, ...] = ()
    evaluation: EvaluationTotals | None = None


class LeaseBook:
    """Shared by the pipeline's stages and the heartbeat."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[int, tuple[ShardLease, int]] = {}  # by token; the position up to which each is committed
        self._finished: list[FinishedTask] = []

    def hold(self, lease: ShardLease) -> None:
        """Adds a lease."""
        with self._changed:
            self._held[lease.token] = (lease, lease.start)

    def held(self) -> list[tuple[ShardLease, int]]:
        """Leases in the order in which they were granted, and the position up to which each is committed."""
        with self._changed:
            return [*self._held.values()]

    def commit(self, token: int, position: int) -> bool:
        """Commits the lease up to `position`. Returns whether that completes the lease."""
        with self._changed:
            if token not in self._held:
                return False
            lease, _ = self._held[token]
            self._held[token] = (lease, position)
            if position < lease.stop:
                return False
            self._finish(FinishedTask(token))
            return True

    def finish(self, result: FinishedTask) -> None:
        """Notes that a task other than training is done."""
        with self._changed:
            self._finish(result)

    def _finish(self, result: FinishedTask) -> None:
        self._held.pop(result.token, None)
        self._finished.append(result)
        self._changed.notify_all()

    def take_finished(self) -> list[FinishedTask]:
        """Returns the results to report, each once."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait_for_finished(self, seconds: float) -> None:
        """Waits until a task is finished, or for this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, timeout=seconds)

    def progress(self) -> dict[int, int]:
        """Returns the position of each lease by token: of all held ones, and 0 for those with an unreported end."""
        with self._changed:
            held = {token: committed for token, (_, committed) in self._held.items()}
            return held | {result.token: 0 for result in self._finished}

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
