"""Which parameter server owns which key.

A key falls into one of 1024 buckets by a hash that never changes; a routing table, versioned by an epoch, says which
parameter server owns each bucket. Dense parameters are one flat vector, cut into as many slices as there are servers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKETS = 1024
"""Number of buckets; a power of two."""

MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def mix64(key: int) -> int:
    """The finaliser of splitmix64 over the key as an unsigned number; the reference for the compiled kernels."""
    value = key & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def buckets_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """`bucket_of` each key, int64 [n]."""
    values = keys.view(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return ((values ^ (values >> np.uint64(31))) & np.uint64(BUCKETS - 1)).view(np.int64)


def bucket_of(key: int) -> int:
    """The bucket of a key: the lowest 10 bits of its hash."""
    return mix64(key) & (BUCKETS - 1)


@dataclass(frozen=True)
class PsAddress:
    """Where one parameter server is reached, and which incarnation of it is meant."""

    index: int
    incarnation: str
    data: str
    control: str


@dataclass(frozen=True)
class RoutingTable:
    """`owners[bucket]` is the index of the parameter server that serves the bucket; `servers[i].index == i`."""

    epoch: int
    servers: tuple[PsAddress, ...]
    owners: tuple[int, ...]

    def dense_slice(self, ps: int, parameters: int) -> tuple[int, int]:
        """The [start, stop) of the flat dense vector of `parameters` floats that a server holds."""
        return dense_slice(ps, len(self.servers), parameters)


def dense_slice(ps: int, servers: int, parameters: int) -> tuple[int, int]:
    """An even cut of a flat vector: slices differ in length by at most one."""
    return parameters * ps // servers, parameters * (ps + 1) // servers


def spread_evenly(servers: int) -> tuple[int, ...]:
    """Owners of all buckets such that the servers' shares differ by at most one bucket."""
    return tuple(bucket * servers // BUCKETS for bucket in range(BUCKETS))
