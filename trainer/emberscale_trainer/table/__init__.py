"""The embedding tables of a parameter server: dynamic hash tables with fused optimizers, in compiled kernels.

* `store`: TableStore: pull, push, load, retire.
* `readers`: what each reader of the rows has yet to learn.
* `snapshot`: consistent copies of rows while training continues.
* `layout`: the bytes of a row.
* `slab`: the memory of rows, and the fields of its description for kernels.
* `descriptors`: these descriptions, and the indexes to which they point.
* `rows`: the one place where rows change.
* `index`: from key to slot.
* `dense`: the dense parameters as rows.
* `kernels`: the entry points.
* `admission`: which keys get rows.
* `eviction`: which rows leave.
* `compaction`: gives memory back to the system.
* `deltas`: the log of changes for parity of the rows.
* `scan`: copies of rows that go on changing.
* `slots`: which slots are in use, and which are free.
* `quantization`: weights as codes of a few bits.
* `packed`: rows with such weights, as checkpoints store them.
* `packing`: the kernels that write and read these.
* `held`: the update rules on rows that a worker holds.
* `optimizers`, `initializers`: the arithmetic.
"""

from emberscale_trainer.table.admission import holds_sketches, with_sketches
from emberscale_trainer.table.compaction import compact, trim_heap
from emberscale_trainer.table.deltas import DeltaLog
from emberscale_trainer.table.dense import DensePieces, NonFiniteGradientError, require_finite
from emberscale_trainer.table.eviction import Eviction, Sweep
from emberscale_trainer.table.held import step_ids, step_pieces
from emberscale_trainer.table.layout import RowLayout, keys_of
from emberscale_trainer.table.packed import MalformedBlockError, PackedRows
from emberscale_trainer.table.quantization import UnquantizableError
from emberscale_trainer.table.scan import Scan
from emberscale_trainer.table.slab import Reader
from emberscale_trainer.table.snapshot import Snapshot, SnapshotAbandonedError
from emberscale_trainer.table.store import TableStore

__all__ = [
    "DeltaLog",
    "DensePieces",
    "Eviction",
    "MalformedBlockError",
    "NonFiniteGradientError",
    "PackedRows",
    "Reader",
    "RowLayout",
    "Scan",
    "Snapshot",
    "SnapshotAbandonedError",
    "Sweep",
    "TableStore",
    "UnquantizableError",
    "compact",
    "holds_sketches",
    "keys_of",
    "require_finite",
    "step_ids",
    "step_pieces",
    "trim_heap",
    "with_sketches",
]
