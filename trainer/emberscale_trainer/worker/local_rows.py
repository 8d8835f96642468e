"""The rows and dense parameters that a worker steps itself for a round of batches, and the resulting changes.

The rows of all batches of a round are pulled once, with the state of their optimizers. Every batch then steps them by
the rules of the parameter servers, and the worker pushes the sum of the changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import OptimizerSpec, Pooling, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.jit import typed_kernel, warm_up
from emberscale_trainer.jit.memory import address_of, shift_right
from emberscale_trainer.table import optimizers, require_finite, step_ids, step_pieces
from emberscale_trainer.table.index import mix64
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.table.slab import TABLE
from emberscale_trainer.worker.keys import BUCKET_BITS, KeyPlan, exchange_bytes


@dataclass(frozen=True, eq=False)
class LocalChanges:
    """The changes of a round, in the layout of `plan`, a plan of rows with state.

    `rows` float32 [plan.values]; `dense` float32 [DENSE_PIECES * (piece length + state of a piece)].
    """

    plan: KeyPlan
    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


class LocalRows:
    """The rows and dense parameters of one round at a time; the next round reuses the memory.

    `single_bytes` and `single_rows` are what its batches so far would have taken on the wire, and pulled, one by one.
    """

    def __init__(self, tables: Sequence[TableSpec], dense: OptimizerSpec, parameters: int) -> None:
        """`parameters` is the length of the flat dense vector, which `dense` steps.

        Raises ValueError for a rule that is not additive, and for a table with admission.
        """
        warm_up()
        for spec in tables:
            if spec.admission.min_count > 1:
                raise ValueError(f"table {spec.name} has admission: its rows are not stepped locally")
        for rule in {dense.type, *(spec.optimizer.type for spec in tables)}:
            if not rule.is_additive:
                raise ValueError(f"changes by {rule} do not add up: its rows are not stepped locally")
        self._tables = tuple(tables)
        dimensions = [spec.dimension for spec in tables]
        self._starts = [sum(dimensions[:number]) for number in range(len(dimensions))]
        self._width = sum(dimensions)
        self._piece_length = piece_length(parameters)
        # the rules that step rows and dense parameters alike
        rules = [(spec.dimension, spec.optimizer) for spec in tables] + [(self._piece_length, dense)]
        self._rules = np.zeros(len(rules), TABLE)
        for entry, (dimension, optimizer) in zip(self._rules, rules, strict=True):
            numbers = optimizers.parameters_of(optimizer)
            entry["dimension"], entry["optimizer"] = dimension, optimizers.CODES[optimizer.type]
            entry["parameters"][: len(numbers)] = numbers
        self._places = np.empty(0, np.uint32)
        self._owners = np.empty(0, np.uint32)
        self._sums = np.empty(0, np.float32)
        self.dense = np.zeros(DENSE_PIECES * self._piece_length, np.float32)
        """The flat dense vector as it is now: float32 [DENSE_PIECES * piece length], padded with zeros."""

    def begin(
        self,
        plan: KeyPlan,
        rows: NDArray[np.float32],
        dense: NDArray[np.float32],
        previous: LocalChanges | None = None,
    ) -> None:
        """Begins a round with pulled arrays, which it takes over and changes.

        `plan` is one of rows with state, `rows` float32 [plan.values], `dense` as in LocalChanges. If the pull came
        before the push of the `previous` round, that round's changes are added first, and `changes` does not repeat
        them. Raises ValueError for arrays of another type, size or layout.
        """
        for array, size in ((rows, plan.values), (dense, plan.dense_values)):
            _check(array, (size,))
        if previous is not None:
            _add_common(plan, rows, previous)
            dense += previous.dense
        self._plan, self.rows, self._pieces = plan, rows, dense
        self.single_bytes = self.single_rows = 0
        self._pulled_rows, self._pulled_pieces = rows.copy(), dense.copy()
        self.dense.reshape(DENSE_PIECES, -1)[:] = dense.reshape(DENSE_PIECES, -1)[:, : self._piece_length]
        if len(self._places) < plan.values:
            self._places = np.empty(plan.values, np.uint32)

    def step(self, batch: KeyPlan, gradients: NDArray[np.float32], dense_gradients: NDArray[np.float32]) -> None:
        """Steps the rows of a batch, each once, and the dense vector.

        * `batch`: `plan.of_records` of the round's plan.
        * `gradients`: of its embeddings, float32 [batch, width], contiguous.
        * `dense_gradients`: float32 [DENSE_PIECES * piece length], padded with zeros.

        Raises ValueError for arrays of another type, size or layout.
        """
        records = len(batch.offsets)
        _check(gradients, (records, self._width))
        _check(dense_gradients, self.dense.shape)
        if batch.value_edges != self._plan.value_edges:
            raise ValueError("the batch is not one of this round")
        self._make_room(batch)
        rules, singles = address_of(self._rules), address_of(batch.offsets)
        size, stride = batch.offsets.itemsize, batch.offsets.itemsize * batch.offsets.shape[1]
        rule_bytes = TABLE.itemsize
        scratch = (address_of(self._places), address_of(self._owners), address_of(self._sums))
        rows, first, width = address_of(self.rows), address_of(gradients), FLOAT_BYTES * self._width
        place, lists = 0, iter(batch.lists)
        for number, spec in enumerate(self._tables):
            if spec.pooling is None:
                ids = (singles + size * place, stride, records, 0, 0)
                place += 1
            else:
                column = next(lists)
                edges, mean = address_of(column.edges), int(spec.pooling is Pooling.MEAN)
                ids = (address_of(column.rows), column.rows.itemsize, len(column.rows), edges, mean)
            of_table = (records, first + FLOAT_BYTES * self._starts[number], width)
            distinct = step_ids(rules + rule_bytes * number, rows, *ids, *of_table, *scratch)
            self.single_bytes += exchange_bytes(distinct, distinct * spec.dimension)
            self.single_rows += distinct
        self.single_bytes += exchange_bytes(DENSE_PIECES, DENSE_PIECES * self._piece_length)
        dense = (address_of(self._pieces), FLOAT_BYTES * batch.piece_floats, DENSE_PIECES)
        arrays = (address_of(dense_gradients), address_of(self.dense))
        step_pieces(rules + rule_bytes * len(self._tables), *dense, *arrays)

    def changes(self) -> LocalChanges:
        """Returns the sum of the changes by the steps of this round so far.

        Raises NonFiniteGradientError for a step beyond float32, which the servers would refuse.
        """
        changes = LocalChanges(self._plan, self.rows - self._pulled_rows, self._pieces - self._pulled_pieces)
        require_finite(changes.rows, "changes of the rows of a round")
        require_finite(changes.dense, "changes of the dense parameters of a round")
        return changes

    def _make_room(self, batch: KeyPlan) -> None:
        most = max([len(batch.offsets), *(len(column.rows) for column in batch.lists)])
        if len(self._owners) < most:
            self._owners = np.empty(most, np.uint32)
            self._sums = np.empty(most * max((spec.dimension for spec in self._tables), default=0), np.float32)


def _check(array: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"this is contiguous float32{list(shape)}, not {array.dtype}{list(array.shape)}")


@dataclass(frozen=True)
class _PartPlaces:
    """Where a plan has each server's part of each table: all int64 [servers, tables + 1], the pieces being last."""

    counts: NDArray[np.int64]
    first_keys: NDArray[np.int64]
    first_values: NDArray[np.int64]

    @classmethod
    def of(cls, plan: KeyPlan) -> "_PartPlaces":
        counts = np.array(plan.counts, np.int64).reshape(len(plan.counts), len(plan.floats) + 1)
        return cls(counts, _starts(counts), _starts(counts * [*plan.floats, 0]))


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
    return starts


def _add_common(plan: KeyPlan, rows: NDArray[np.float32], added: LocalChanges) -> None:
    """Adds changes to `rows`, those of `plan`, where both have the row."""
    here, there = _PartPlaces.of(plan), _PartPlaces.of(added.plan)
    most = int(here.counts[:, :-1].sum(axis=0).max(initial=0))
    slots = np.empty((_room(most), 2), np.int64)
    _join(
        np.concatenate(plan.keys),
        here.counts,
        here.first_keys,
        here.first_values,
        rows,
        np.concatenate(added.plan.keys),
        there.counts,
        there.first_keys,
        there.first_values,
        added.rows,
        plan.floats,
        slots,
    )


@typed_kernel("i8(i8)")
def _room(keys):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. Slots for so many keys, a power of two.
    room = 16
    while room < 2 * keys:
        room *= 2
    return room


@typed_kernel(
    "void(i8[::1], i8[:, ::1], i8[:, ::1], i8[:, ::1], f4[::1], "
    "i8[::1], i8[:, ::1], i8[:, ::1], i8[:, ::1], f4[::1], i8[::1], i8[:, ::1])"
)
def _join(  # type: ignore[no-untyped-def]  # Numba infers the types
    keys,
    counts,
    first_keys,
    first_values,
    rows,
    other_keys,
    other_counts,
    other_first_keys,
    other_first_values,
    changes,
    floats,
    slots,
):
    # Numba types this from the signature above. `slots` is a hash table of (key, where its row begins or -1).
    for table in range(len(floats)):
        size = floats[table]
        mask = _room(counts[:, table].sum()) - 1
        for slot in range(mask + 1):
            slots[slot, 1] = -1
        for server in range(len(counts)):
            value = first_values[server, table]
            first = first_keys[server, table]
            for place in range(first, first + counts[server, table]):
                slot = shift_right(mix64(keys[place]), BUCKET_BITS) & mask
                while slots[slot, 1] >= 0:  # the keys of a table are distinct
                    slot = (slot + 1) & mask
                slots[slot, 0] = keys[place]
                slots[slot, 1] = value
                value += size
        for server in range(len(other_counts)):
            change = other_first_values[server, table]
            first = other_first_keys[server, table]
            for place in range(first, first + other_counts[server, table]):
                slot = shift_right(mix64(other_keys[place]), BUCKET_BITS) & mask
                while slots[slot, 1] >= 0 and slots[slot, 0] != other_keys[place]:
                    slot = (slot + 1) & mask
                value = slots[slot, 1]
                if value >= 0:
                    for element in range(size):
                        rows[value + element] += changes[change + element]
                change += size
