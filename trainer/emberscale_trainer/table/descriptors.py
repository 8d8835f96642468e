"""The tables of a store as the kernels see them: a descriptor of each, and the indexes to which these point."""

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import TableSpec
from emberscale_api.routing import BUCKETS
from emberscale_trainer.jit.memory import CACHE_LINE, address_of
from emberscale_trainer.table import initializers, kernels, optimizers
from emberscale_trainer.table.dense import DensePieces
from emberscale_trainer.table.index import ENTRY_BYTES
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.slab import TABLE, Reader


class Descriptors:
    """One `TABLE` for each of `specs`. The indexes live as long as this object.

    * `tables`: the descriptors themselves.
    * `bucket_rows`: the rows of each bucket of each table, uint32[tables, BUCKETS].
    * `clock`: int64[1], which rows of tables with eviction note; see `TableStore.clock`.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        layouts: Sequence[RowLayout],
        sketches: Mapping[int, int],
        dense: DensePieces | None,
    ) -> None:
        """`sketches` has the number of the sketches' table by that of the table with admission.

        With `dense`, the last table is that of the dense pieces.
        """
        self.tables = np.zeros(len(specs), TABLE)
        self.bucket_rows = np.zeros((len(specs), BUCKETS), np.uint32)
        self.clock = np.zeros(1, np.int64)
        self._directories = np.zeros((len(specs), BUCKETS), np.int64)
        self._address = address_of(self.tables)
        for number, (spec, layout) in enumerate(zip(specs, layouts, strict=True)):
            self._describe(number, spec, layout)
        for number, sketch in sketches.items():
            self.tables[number]["sketch"] = self.address(sketch)
            self.tables[number]["min_count"] = specs[number].admission.min_count
        if dense is not None:
            self._describe_dense(dense)
        weakref.finalize(self, _free_indexes, self.tables, self._directories, self.bucket_rows).atexit = False

    def address(self, table: int) -> int:
        """Returns the address of a table's descriptor. Raises IndexError for a table that does not exist."""
        if not 0 <= table < len(self.tables):
            raise IndexError(f"there is no table {table}, only {len(self.tables)} of them")
        return self._address + TABLE.itemsize * table

    def entry(self, table: int, reader: Reader) -> np.void:
        """Returns a view of the kernels' entry for a reader of a table."""
        entry: np.void = self.tables[table]["readers"][reader]
        return entry

    def absent(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns those of the keys, int64[n], that have no row."""
        keys = np.ascontiguousarray(keys, np.int64)
        missing = np.empty_like(keys)
        count = kernels.absent(self.address(table), address_of(keys), len(keys), address_of(missing))
        return missing[:count]

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the indexes take."""
        used = self._directories[self._directories != 0]
        entries = int((np.int64(ENTRY_BYTES) << (used & (CACHE_LINE - 1))).sum())
        return self._directories.nbytes + self.bucket_rows.nbytes + entries

    def _describe(self, number: int, spec: TableSpec, layout: RowLayout) -> None:
        table = self.tables[number]
        table["directory"] = address_of(self._directories[number])
        table["bucket_rows"] = address_of(self.bucket_rows[number])
        table["number"] = number
        table["dimension"] = spec.dimension
        table["stride"] = layout.stride
        table["pushes"] = layout.pushes_offset
        table["touched"] = layout.touched_offset
        table["clock"] = address_of(self.clock)
        table["optimizer"] = optimizers.CODES[spec.optimizer.type]
        table["initializer"] = initializers.CODES[spec.initializer.type]
        table["seed"] = initializers.table_seed(spec)
        table["scale"] = spec.initializer.scale
        parameters = optimizers.parameters_of(spec.optimizer)
        table["parameters"][: len(parameters)] = parameters

    def _describe_dense(self, dense: DensePieces) -> None:
        table = self.tables[-1]
        table["optimizer"] = optimizers.DENSE_CODES[dense.optimizer.type]
        table["initializer"] = initializers.GIVEN
        table["seed"] = address_of(dense.initial)


def _free_indexes(tables: NDArray[np.void], directories: NDArray[np.int64], bucket_rows: NDArray[np.uint32]) -> None:
    """Frees all sub-indexes. The arguments keep the other two arrays alive, to which the descriptors point."""
    for number in range(len(tables)):
        kernels.drop_index(address_of(tables) + TABLE.itemsize * number, BUCKETS)
