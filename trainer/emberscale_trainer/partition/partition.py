"""A partition, and a copy of one."""

from dataclasses import dataclass

from emberscale_trainer.partition.applied import AppliedBatches
from emberscale_trainer.partition.dense import DenseSlice, DenseState
from emberscale_trainer.table import TableSnapshot, TableStore


@dataclass(frozen=True)
class Cut:
    """A copy of a partition at one moment; later pushes do not change it."""

    tables: tuple[TableSnapshot, ...]
    dense: DenseState
    applied: AppliedBatches


@dataclass(frozen=True)
class Partition:
    """The parts change in place, under the lock of whoever holds the partition."""

    routing_epoch: int
    tables: TableStore
    dense: DenseSlice
    applied: AppliedBatches

    def cut(self) -> Cut:
        """Copies everything in memory; this is all that a checkpoint makes the training wait for."""
        return Cut(self.tables.snapshot(), self.dense.state(), self.applied.copy())
