"""From the ids of a batch to the keys asked of each parameter server: each key once."""

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import BUCKETS, RoutingTable
from emberscale_trainer.table.hashing import BUCKET_MASK, mix64
from emberscale_trainer.table.memory import shift_right

BUCKET_BITS = BUCKETS.bit_length() - 1


@dataclass(frozen=True)
class KeyPlan:
    """What to ask of each server, and where each id's row will lie in the answers.

    `counts[s]` uint32 [tables] and `keys[s]` int64 [sum of counts] are the request to server s. The answers, laid end
    to end in the order of servers, are one float32 vector of `values` floats; that of server s begins at
    `value_edges[s]`.
    `offsets` int32 [batch, tables] is where in that vector the row of each id begins.
    """

    counts: tuple[NDArray[np.uint32], ...]
    keys: tuple[NDArray[np.int64], ...]
    value_edges: tuple[int, ...]
    offsets: NDArray[np.int32]

    @property
    def values(self) -> int:
        """Floats in all the answers together."""
        return self.value_edges[-1]


class KeyPlanner:
    """Makes plans for one routing table; keeps scratch memory, so each thread needs its own."""

    def __init__(self, routing: RoutingTable, dimensions: NDArray[np.int64]) -> None:
        self._servers = len(routing.servers)
        self._owners = np.array(routing.owners, dtype=np.int64)
        self._dimensions = dimensions
        self._slots = np.empty(0, dtype=np.int64)

    def plan(self, ids: NDArray[np.int64]) -> KeyPlan:
        """The plan for `ids`, int64 [batch, tables]."""
        batch, tables = ids.shape
        slots = 1 << max(4, int(2 * batch - 1).bit_length())
        if len(self._slots) != slots:
            self._slots = np.empty(slots, dtype=np.int64)
        counts = np.zeros((self._servers, tables), dtype=np.uint32)
        keys = np.empty(ids.size, dtype=np.int64)
        offsets = np.empty((batch, tables), dtype=np.int32)
        edges = np.zeros((2, self._servers + 1), dtype=np.int64)
        _plan(ids, self._owners, self._dimensions, self._slots, counts, keys, offsets, edges)
        return KeyPlan(
            counts=tuple(counts),
            keys=tuple(keys[edges[0, server] : edges[0, server + 1]] for server in range(self._servers)),
            value_edges=tuple(edges[1].tolist()),
            offsets=offsets,
        )


@numba.njit(
    "void(i8[:, ::1], i8[::1], i8[::1], i8[::1], u4[:, ::1], i8[::1], i4[:, ::1], i8[:, ::1])", nogil=True, cache=True
)
def _plan(ids, owners, dimensions, slots, counts, keys, offsets, edges):  # type: ignore[no-untyped-def]
    # Numba types this from the signature above.
    batch, tables = ids.shape
    servers = counts.shape[0]
    mask = len(slots) - 1
    unique = np.empty(ids.size, dtype=np.int64)
    owner_of = np.empty(ids.size, dtype=np.int32)
    table_edges = np.zeros(tables + 1, dtype=np.int64)
    total = 0
    for table in range(tables):
        slots[:] = -1
        for row in range(batch):
            key = ids[row, table]
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
            offsets[row, table] = number
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
        for table in range(tables):
            offsets[row, table] = value_of[offsets[row, table]]
