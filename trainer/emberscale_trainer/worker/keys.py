"""Maps the ids of a batch to the keys to request from each parameter server, each key once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emberscale_api.errors import InvalidError
from emberscale_api.job import OptimizerType, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES, RoutingTable, piece_length
from emberscale_api.wire import MAX_PAYLOAD_BYTES, counts_bytes
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.jit import routine, typed_kernel
from emberscale_trainer.jit.memory import shift_right
from emberscale_trainer.table.index import BUCKET_MASK, mix64
from emberscale_trainer.table.layout import state_floats

BUCKET_BITS = BUCKETS.bit_length() - 1
_MAX_VALUES = 2**31 - 1


class RequestTooLargeError(InvalidError):
    """A batch exceeds a frame or an offset; the text names what to make smaller."""


def exchange_bytes(keys: int, values: int) -> int:
    """Bytes on the wire of a pull and a push of so many keys and floats, without headers."""
    return 2 * (8 * keys + 4 * values)


@dataclass(frozen=True)
class ListPlan:
    """The layout of the rows of a table of lists: `rows` int32 [ids] is the offset of each id's row.

    Record i has the ids `edges[i]` to `edges[i + 1]`, int64 [batch + 1].
    """

    rows: NDArray[np.int32]
    edges: NDArray[np.int64]

    def of_records(self, first: int, stop: int) -> "ListPlan":
        """The lists of the records from `first` to `stop`."""
        edges = self.edges[first : stop + 1]
        return ListPlan(self.rows[edges[0] : edges[-1]], edges - edges[0])


@dataclass(frozen=True)
class KeyPlan:
    """The requests to each server of the table `routing`, and the place of each id's row in the answers.

    `counts[s]` uint32 [tables + 1] and `keys[s]` int64 [sum of counts] are the request to server s; the last count and
    the last keys are those of its dense pieces, ascending. The rows of the answers, laid end to end in the order of
    servers, are one float32 vector of `values` floats; those of server s begin at `value_edges[s]`. After its rows,
    server s answers its pieces, which fill the ranges `dense_runs[s]` (start, stop) of the flat dense vector.
    `offsets` int32 [batch, tables of one id] is where in the vector of rows the row of each id begins; `lists` says it
    for each table of lists.

    In a plan of rows with state, the optimizer's state follows the weights of each row and of each piece. The flat
    dense vector is then one of pieces with state, and `dense_runs` are ranges of it. `floats` int64 [tables] is how
    many a row takes, and `piece_floats` how many a piece.
    """

    routing: RoutingTable
    floats: NDArray[np.int64]
    piece_floats: int
    counts: tuple[NDArray[np.uint32], ...]
    keys: tuple[NDArray[np.int64], ...]
    value_edges: tuple[int, ...]
    dense_runs: tuple[tuple[tuple[int, int], ...], ...]
    offsets: NDArray[np.int32]
    lists: tuple[ListPlan, ...]

    @property
    def lookups(self) -> int:
        """Rows that the batch looks up, with repetitions."""
        return self.offsets.size + sum(len(column.rows) for column in self.lists)

    @property
    def distinct(self) -> int:
        """Embedding rows in the requests to all servers."""
        return sum(len(keys) for keys in self.keys) - DENSE_PIECES

    @property
    def values(self) -> int:
        """Floats of the embedding rows in all answers."""
        return self.value_edges[-1]

    def values_of(self, server: int) -> slice:
        """The slice of a server's rows in the vector of rows."""
        return slice(self.value_edges[server], self.value_edges[server + 1])

    @property
    def dense_values(self) -> int:
        """Floats of the dense pieces in all answers."""
        return DENSE_PIECES * self.piece_floats

    @property
    def exchange_bytes(self) -> int:
        """Bytes on the wire of the pull and the push, without headers."""
        return exchange_bytes(sum(len(keys) for keys in self.keys), self.values + self.dense_values)

    def of_records(self, first: int, stop: int) -> "KeyPlan":
        """The places of the ids of the records from `first` to `stop`, in the same answers."""
        lists = tuple(column.of_records(first, stop) for column in self.lists)
        return replace(self, offsets=self.offsets[first:stop], lists=lists)


class KeyPlanner:
    """Makes plans for one routing table; keeps scratch memory, so each thread needs its own.

    Columns of one id come before columns of lists, and every column has a table before any has a second one.
    `parameters` is the length of the model's flat dense vector. With `dense_optimizer`, the rule that steps it, plans
    are of rows and pieces with state.
    """

    def __init__(
        self,
        routing: RoutingTable,
        tables: Sequence[TableSpec],
        parameters: int,
        dense_optimizer: OptimizerType | None = None,
    ) -> None:
        self._routing = routing
        self._servers = len(routing.servers)
        self._owners = np.array(routing.bucket_owners, dtype=np.int64)
        self._piece_length = piece_length(parameters)
        self._pieces = [np.array(routing.pieces_of(server), dtype=np.int64) for server in range(self._servers)]
        self._dimensions = np.array([table.dimension for table in tables], dtype=np.int64)
        if dense_optimizer is not None:
            self._piece_length += state_floats(dense_optimizer, self._piece_length)
            self._dimensions += [state_floats(table.optimizer.type, table.dimension) for table in tables]
        self._dense_runs = tuple(_runs(pieces, self._piece_length) for pieces in self._pieces)
        self._columns = np.array([table.column for table in tables], dtype=np.int64)
        single = [table.pooling is None for table in tables]
        self._single = sum(single)
        self._lists = tuple(table.column for table in tables if table.pooling is not None)
        # the number of a table among those of one id, or among those of lists
        self._places = np.array(
            [sum(one == single[number] for one in single[:number]) for number in range(len(single))], dtype=np.int64
        )
        self._slots = np.empty(0, dtype=np.int64)

    def plan(self, ids: NDArray[np.int64], lists: Sequence[IdLists] = ()) -> KeyPlan:
        """The plan for `ids`, int64 [batch, columns of one id], and the lists of each column of lists.

        Raises RequestTooLargeError for a batch whose request to one server does not fit into a frame.
        """
        batch, columns = ids.shape
        tables = len(self._dimensions)
        edges_of_lists = np.zeros(len(self._lists) + 1, dtype=np.int64)
        of_tables = [lists[column - columns] for column in self._lists]
        np.cumsum([len(column.values) for column in of_tables], out=edges_of_lists[1:])
        values = np.concatenate([column.values for column in of_tables]) if of_tables else _NO_IDS
        longest = max([batch, *(len(column.values) for column in lists)])
        slots = 1 << max(4, int(2 * longest - 1).bit_length())
        if len(self._slots) < slots:
            self._slots = np.empty(slots, dtype=np.int64)
        counts = np.zeros((self._servers, tables + 1), dtype=np.uint32)
        for server, pieces in enumerate(self._pieces):
            counts[server, tables] = len(pieces)
        keys = np.empty(batch * self._single + len(values) + DENSE_PIECES, dtype=np.int64)
        offsets = np.empty((batch, self._single), dtype=np.int32)
        rows = np.empty(len(values), dtype=np.int32)
        edges = np.zeros((2, self._servers + 1), dtype=np.int64)
        _plan(
            ids,
            values,
            edges_of_lists,
            self._owners,
            self._dimensions,
            self._columns,
            self._places,
            self._slots,
            counts,
            keys,
            offsets,
            rows,
            edges,
        )
        for server, pieces in enumerate(self._pieces):
            stop = edges[0, server + 1]
            keys[stop - len(pieces) : stop] = pieces
        self._check_size(edges)
        return KeyPlan(
            routing=self._routing,
            floats=self._dimensions,
            piece_floats=self._piece_length,
            counts=tuple(counts),
            keys=tuple(keys[edges[0, server] : edges[0, server + 1]] for server in range(self._servers)),
            value_edges=tuple(edges[1].tolist()),
            dense_runs=self._dense_runs,
            offsets=offsets,
            lists=tuple(
                ListPlan(rows[edges_of_lists[number] : edges_of_lists[number + 1]], column.offsets)
                for number, column in enumerate(of_tables)
            ),
        )

    def _check_size(self, edges: NDArray[np.int64]) -> None:
        keys, values = np.diff(edges)
        pieces = np.array([len(pieces) for pieces in self._pieces], dtype=np.int64)
        push_bytes = 8 * keys + 4 * (values + pieces * self._piece_length) + counts_bytes(len(self._dimensions) + 1)
        largest = int(push_bytes.max(initial=0))
        if largest > MAX_PAYLOAD_BYTES:
            raise RequestTooLargeError(
                f"a push of one batch to one parameter server takes {largest:,} bytes, more than the "
                f"{MAX_PAYLOAD_BYTES:,} of a frame: {_SMALLER}, or spec.ps.replicas larger"
            )
        if edges[1, -1] > _MAX_VALUES:
            raise RequestTooLargeError(
                f"the embedding rows of one batch take {edges[1, -1]:,} floats, more than 2**31: {_SMALLER}"
            )


_SMALLER = "make spec.training.batchSize, the tables' dimensions or maxLength of the list columns smaller"


def _runs(pieces: NDArray[np.int64], length: int) -> tuple[tuple[int, int], ...]:
    """The ranges of the flat dense vector that ascending pieces fill, neighbours joined."""
    if not len(pieces):
        return ()
    breaks = np.flatnonzero(np.diff(pieces) != 1) + 1
    return tuple((int(run[0]) * length, (int(run[-1]) + 1) * length) for run in np.split(pieces, breaks))


_NO_IDS = np.empty(0, dtype=np.int64)


@routine
def _number_keys(
    ids: NDArray[np.int64],
    table: int,
    owners: NDArray[np.int64],
    slots: NDArray[np.int64],
    counts: NDArray[np.uint32],
    unique: NDArray[np.int64],
    owner_of: NDArray[np.int32],
    total: int,
    numbers: NDArray[np.int32],
) -> int:
    """Gives each distinct id a number, from `total` up; returns the next number."""
    room = 16
    while room < 2 * len(ids):
        room *= 2
    mask = room - 1
    slots[:room] = -1
    for place in range(len(ids)):
        key = ids[place]
        mixed = mix64(key)
        slot = shift_right(mixed, BUCKET_BITS) & mask
        while slots[slot] >= 0 and unique[slots[slot]] != key:
            slot = (slot + 1) & mask
        number = slots[slot]
        if number < 0:
            number = total
            slots[slot] = number
            unique[number] = key
            home = owners[mixed & BUCKET_MASK]
            owner_of[number] = home
            counts[home, table] += np.uint32(1)
            total += 1
        numbers[place] = number
    return total


@typed_kernel(
    "void(i8[:, ::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], u4[:, ::1], i8[::1], i4[:, ::1], "
    "i4[::1], i8[:, ::1])"
)
def _plan(  # type: ignore[no-untyped-def]  # Numba infers the types
    ids, values, list_edges, owners, dimensions, columns, places, slots, counts, keys, offsets, rows, edges
):
    # Numba types this from the signature above.
    batch, single_columns = ids.shape
    servers, tables = len(counts), len(dimensions)
    unique = np.empty(keys.size, dtype=np.int64)
    owner_of = np.empty(keys.size, dtype=np.int32)
    table_edges = np.zeros(tables + 1, dtype=np.int64)
    total = 0
    for table in range(tables):
        column, place = columns[table], places[table]
        if column < table:  # the column's first table has the same keys
            shift = total - table_edges[column]
            for number in range(table_edges[column], table_edges[column + 1]):
                unique[total] = unique[number]
                owner_of[total] = owner_of[number]
                total += 1
            for server in range(servers):
                counts[server, table] = counts[server, column]
            if column < single_columns:
                for row in range(batch):
                    offsets[row, place] = offsets[row, places[column]] + shift
            else:
                start, first = list_edges[place], list_edges[places[column]]
                for item in range(list_edges[place + 1] - start):
                    rows[start + item] = rows[first + item] + shift
        elif column < single_columns:
            total = _number_keys(
                ids[:, column], table, owners, slots, counts, unique, owner_of, total, offsets[:, place]
            )
        else:
            start, stop = list_edges[place], list_edges[place + 1]
            total = _number_keys(
                values[start:stop], table, owners, slots, counts, unique, owner_of, total, rows[start:stop]
            )
        table_edges[table + 1] = total

    # Where the next key, and the next row's values, of each server and table go.
    next_key = np.empty((servers, tables), dtype=np.int64)
    next_value = np.empty((servers, tables), dtype=np.int64)
    key_edge = np.int64(0)
    value_edge = np.int64(0)
    for server in range(servers):
        edges[0, server] = key_edge
        edges[1, server] = value_edge
        for table in range(tables):
            next_key[server, table] = key_edge
            next_value[server, table] = value_edge
            key_edge += np.int64(counts[server, table])
            value_edge += np.int64(counts[server, table]) * dimensions[table]
        key_edge += np.int64(counts[server, tables])  # its dense pieces follow
    edges[0, servers] = key_edge
    edges[1, servers] = value_edge

    value_of = np.empty(total, dtype=np.int32)
    for table in range(tables):
        for number in range(table_edges[table], table_edges[table + 1]):
            owner = owner_of[number]
            keys[next_key[owner, table]] = unique[number]
            next_key[owner, table] += 1
            value_of[number] = next_value[owner, table]
            next_value[owner, table] += dimensions[table]
    for row in range(batch):
        for table in range(offsets.shape[1]):
            offsets[row, table] = value_of[offsets[row, table]]
    for item in range(len(rows)):
        rows[item] = value_of[rows[item]]
