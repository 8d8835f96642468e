"""What one parameter server holds at one routing epoch: rows, a dense slice, and the record of applied batches."""

from emberscale_trainer.partition.applied import AppliedBatches
from emberscale_trainer.partition.dense import DenseSlice, DenseState
from emberscale_trainer.partition.ownership import Ownership
from emberscale_trainer.partition.partition import Cut, Partition

__all__ = ["AppliedBatches", "Cut", "DenseSlice", "DenseState", "Ownership", "Partition"]
