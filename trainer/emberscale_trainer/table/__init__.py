"""The embedding tables of a parameter server: dynamic hash tables with fused optimizers, in compiled kernels.

`store`      TableStore: pull, push, load, retire     `snapshot`, `changes`  what readers take while training goes on
`layout`     the bytes of a row                      `slab`, `descriptor`  where rows live, and what kernels know of it
`dense`      the dense parameters as rows
`rows`       the one place where rows change         `index`, `hashing`    from key to slot
`optimizers`, `initializers`  the arithmetic          `kernels`             the entry points
`gradients`  what must not reach a row
`compiled`, `memory`, `vector`  what Numba lacks: options, addresses, and registers of eight floats
"""

from emberscale_trainer.table.compiled import warm_up
from emberscale_trainer.table.dense import DensePieces
from emberscale_trainer.table.descriptor import Reader
from emberscale_trainer.table.gradients import NonFiniteGradientError, require_finite
from emberscale_trainer.table.layout import RowLayout, keys_of
from emberscale_trainer.table.snapshot import Lock, Snapshot, SnapshotAbandonedError
from emberscale_trainer.table.store import TableStore

__all__ = [
    "DensePieces",
    "Lock",
    "NonFiniteGradientError",
    "Reader",
    "RowLayout",
    "Snapshot",
    "SnapshotAbandonedError",
    "TableStore",
    "keys_of",
    "require_finite",
    "warm_up",
]
