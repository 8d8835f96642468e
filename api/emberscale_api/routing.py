"""Routing: which parameter server owns which key and which part of the dense parameters, and since when.

A hash that never changes puts a key into one of 1024 buckets; the flat dense vector is cut into 64 pieces of equal
length. A routing table names the owner of each bucket and piece. Two numbers tell tables apart:

* `version` identifies the owners. Under a new version, workers plan their requests again; leases and applied batches
  stay.
* `generation` identifies the history of the rows. A new generation is a roll-back: it voids all leases and everything
  in flight.

Both only grow.
"""

from dataclasses import dataclass
from functools import cached_property

BUCKETS = 1024
"""Number of buckets; a power of two."""

DENSE_PIECES = 64
"""Number of pieces of the flat dense vector."""

_PIECE_ALIGNMENT = 8
"""Floats; a piece is a whole number of vector registers."""

MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def mix64(key: int) -> int:
    """The finaliser of splitmix64 over the key as an unsigned number; the reference for the compiled kernels."""
    value = key & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class PsAddress:
    """The address of one parameter server, and its incarnation."""

    index: int
    incarnation: str
    data: str
    control: str


@dataclass(frozen=True)
class RoutingTable:
    """`bucket_owners[b]` and `piece_owners[p]` are indexes into `servers`, and `servers[i].index == i`.

    A table without servers has no owners: nothing is assigned.
    """

    generation: int
    version: int
    servers: tuple[PsAddress, ...]
    bucket_owners: tuple[int, ...]
    piece_owners: tuple[int, ...]

    @cached_property
    def owners(self) -> tuple[PsAddress, ...]:
        """The servers that own anything, by index. The first one orders the staleness of all.

        A server that owns nothing, because it is being drained or replaced, does not take part.
        """
        owning = {*self.bucket_owners, *self.piece_owners}
        return tuple(server for server in self.servers if server.index in owning)

    def pieces_of(self, ps: int) -> tuple[int, ...]:
        """The dense pieces that a server owns, ascending."""
        return tuple(piece for piece, owner in enumerate(self.piece_owners) if owner == ps)


@dataclass(frozen=True)
class ParityTrouble:
    """What keeps rows of a parameter server of a routing table from being protected.

    * `version`: of the routing table. `message`: for people, about the server.
    * `seconds`: for how long the servers have parted, or one that holds parity has acknowledged nothing while pushes
      wait for it; 0 where no push waits.
    * `broken`: they have parted for good; pushes wait until they get another table.
    """

    version: int
    message: str
    seconds: float = 0.0
    broken: bool = False


def piece_length(parameters: int) -> int:
    """Floats in one dense piece of a model of `parameters` floats; the last pieces are padded with zeros."""
    return -(-parameters // (DENSE_PIECES * _PIECE_ALIGNMENT)) * _PIECE_ALIGNMENT
