"""Checkpoints: writing one server's part of a snapshot, and reading the parts of any number of servers.

* `files`, `encoding`: the files of one server, and the layout of rows in them.
* `writer`, `chains`: writing a snapshot, all rows or those that changed; `reader`: loading what one server owns.
* `flash`, `flash_redis`, `flash_inventory`: the same in Redis.
* `priority`, `choosing`: saves of priority rows between checkpoints, and the choice of these rows.
* `work`: progress, retries, the rate and the end of work on storage, and reading ahead.
"""

from emberscale_trainer.checkpoint.chains import ChainDraft, ChainWriter, owned_rows
from emberscale_trainer.checkpoint.files import CheckpointFiles
from emberscale_trainer.checkpoint.flash import FlashFiles, FlashWriter
from emberscale_trainer.checkpoint.flash_redis import FlashUnusableError
from emberscale_trainer.checkpoint.priority import PriorityWriter, PushWatch
from emberscale_trainer.checkpoint.reader import (
    load_partition,
    load_priority_rows,
    read_dense,
    read_records,
    server_history,
)
from emberscale_trainer.checkpoint.work import (
    AbandonedError,
    StorageUnreachableError,
    TokenBucket,
    Work,
    WriteLimit,
)
from emberscale_trainer.checkpoint.writer import Share

__all__ = [
    "AbandonedError",
    "ChainDraft",
    "ChainWriter",
    "CheckpointFiles",
    "FlashFiles",
    "FlashUnusableError",
    "FlashWriter",
    "PriorityWriter",
    "PushWatch",
    "Share",
    "StorageUnreachableError",
    "TokenBucket",
    "Work",
    "WriteLimit",
    "load_partition",
    "load_priority_rows",
    "owned_rows",
    "read_dense",
    "read_records",
    "server_history",
]
