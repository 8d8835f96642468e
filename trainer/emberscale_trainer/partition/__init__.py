"""What one parameter server owns of a job's parameters, and which batches it has applied to them."""

from emberscale_trainer.partition.applied import AppliedBatches
from emberscale_trainer.partition.ownership import Ownership

__all__ = ["AppliedBatches", "Ownership"]
