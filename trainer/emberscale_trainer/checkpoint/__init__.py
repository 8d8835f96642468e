"""Checkpoints: writing a server's part of a snapshot, and reading what all servers wrote, with any number of them."""

from emberscale_trainer.checkpoint.files import CheckpointFiles
from emberscale_trainer.checkpoint.reader import LoadedPartition, load_partition, read_dense, read_records
from emberscale_trainer.checkpoint.writer import write_snapshot

__all__ = ["CheckpointFiles", "LoadedPartition", "load_partition", "read_dense", "read_records", "write_snapshot"]
