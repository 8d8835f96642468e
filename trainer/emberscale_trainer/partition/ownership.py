"""What one parameter server owns under one version of the routing table."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import BUCKETS, DENSE_PIECES, RoutingTable, buckets_of


@dataclass(frozen=True, eq=False)
class Ownership:
    """The server's own buckets and dense pieces.

    * `buckets`: bool [BUCKETS], true where the server owns the bucket.
    * `pieces`: bool [DENSE_PIECES], the same for dense pieces.
    """

    buckets: NDArray[np.bool_]
    pieces: NDArray[np.bool_]

    @classmethod
    def of(cls, routing: RoutingTable, index: int) -> "Ownership":
        """What `routing` gives to the server with this index."""
        return cls(
            np.array([owner == index for owner in routing.bucket_owners], dtype=np.bool_).reshape(-1),
            np.array([owner == index for owner in routing.piece_owners], dtype=np.bool_).reshape(-1),
        )

    @classmethod
    def of_nothing(cls) -> "Ownership":
        """What a server owns that is no part of a routing table."""
        return cls(np.zeros(BUCKETS, dtype=np.bool_), np.zeros(DENSE_PIECES, dtype=np.bool_))

    @classmethod
    def of_everything(cls) -> "Ownership":
        """What the only server of a job owns."""
        return cls(np.ones(BUCKETS, dtype=np.bool_), np.ones(DENSE_PIECES, dtype=np.bool_))

    def __bool__(self) -> bool:
        """Whether anything is owned."""
        return bool(self.buckets.any() or self.pieces.any())

    def without(self, other: "Ownership") -> "Ownership":
        """What is owned here and not there."""
        return Ownership(self.buckets & ~other.buckets, self.pieces & ~other.pieces)

    def among(self, keys: NDArray[np.int64], dense: bool) -> NDArray[np.bool_]:
        """Which of `keys`, int64 [n], are owned: bool [n]. With `dense` they are numbers of dense pieces."""
        return self.pieces[keys] if dense else self.buckets[buckets_of(keys)]

    def owns(self, counts: NDArray[np.uint32], keys: NDArray[np.int64]) -> bool:
        """Whether every key of a request is owned: `counts` uint32 [tables], the dense table last, `keys` int64 [n]."""
        rows = len(keys) - int(counts[-1]) if len(counts) else 0
        return self.owns_pieces(keys[rows:]) and bool(self.buckets[buckets_of(keys[:rows])].all())

    def owns_pieces(self, pieces: NDArray[np.int64]) -> bool:
        """Whether every piece, int64 [n], exists and is owned."""
        if not len(pieces) or pieces.tobytes() == self._all_pieces:
            return True
        if int(pieces.min()) < 0 or int(pieces.max()) >= len(self.pieces):
            return False
        return bool(self.pieces[pieces].all())

    @cached_property
    def _all_pieces(self) -> bytes:
        """All own pieces as a request names them: nearly every one does."""
        return np.flatnonzero(self.pieces).astype(np.int64).tobytes()
