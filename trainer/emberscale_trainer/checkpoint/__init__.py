"""A parameter server's part of a checkpoint: writing a cut, and loading one, with any number of servers."""

from emberscale_trainer.checkpoint.reader import LoadedPartition, load_partition
from emberscale_trainer.checkpoint.writer import write_cut

__all__ = ["LoadedPartition", "load_partition", "write_cut"]
