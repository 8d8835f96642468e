"""A partition, and a snapshot of one."""

from dataclasses import dataclass

from emberscale_trainer.partition.applied import AppliedBatches
from emberscale_trainer.partition.dense import DenseSlice, DenseState
from emberscale_trainer.table import Lock, Reader, Snapshot, TableStore


@dataclass(frozen=True)
class PartitionSnapshot:
    """A partition at one moment; later pushes do not change it.

    `dense` and `applied` are copies. The rows are not: a push that changes one saves its old bytes until `tables` is
    drained and ended.
    """

    tables: Snapshot
    dense: DenseState
    applied: AppliedBatches


@dataclass(frozen=True)
class Partition:
    """The parts change in place, under the lock of whoever holds the partition."""

    routing_epoch: int
    tables: TableStore
    dense: DenseSlice
    applied: AppliedBatches

    def snapshot(self, reader: Reader, lock: Lock) -> PartitionSnapshot:
        """Everything as it is now; `lock` is the one that is held. It takes no longer where there are more rows."""
        return PartitionSnapshot(self.tables.snapshot(reader, lock), self.dense.state(), self.applied.copy())
