"""What one parameter server holds at one routing epoch: rows, a dense slice, and the record of applied batches."""

from emberscale_trainer.partition.applied import AppliedBatches
from emberscale_trainer.partition.dense import DenseSlice, DenseState
from emberscale_trainer.partition.partition import Partition, PartitionSnapshot

__all__ = ["AppliedBatches", "DenseSlice", "DenseState", "Partition", "PartitionSnapshot"]
