"""The adoption of a lost server's rows by the servers that are left: its memory, and batches that only some rows have.

Rows that are rebuilt from parity may lack batches that their new server has applied to its own rows, and have others
that it has yet to apply. Nobody has acknowledged these batches on all servers, so their workers push them again. The
server then applies each to the part that lacks it. Until that is done it holds no barrier, so that a checkpoint or a
move never sees rows with different batches.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from emberscale_api.job import stripe_width
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import Batch


class PartlyApplied:
    """By batch, the part of the rows that has it."""

    def __init__(self, parts: Mapping[Batch, Ownership] | None = None) -> None:
        self._parts = dict(parts or {})

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, batch: Batch) -> bool:
        return batch in self._parts

    def lacking(self, batch: Batch, owned: Ownership) -> Ownership:
        """Returns the part of what is `owned` to which a batch is yet to be applied."""
        part = self._parts.get(batch)
        return owned if part is None else owned.without(part)

    def complete(self, batch: Batch) -> None:
        """Notes that a batch is applied to the rest of the rows."""
        self._parts.pop(batch, None)


def combined(records: Sequence[tuple[Ownership, AppliedBatches]]) -> tuple[AppliedBatches, PartlyApplied]:
    """Returns the batches that all of these rows have, and those that only a part of them has.

    Each record has the batches of the rows that are owned with it.
    """
    common = AppliedBatches.merged([applied for _, applied in records])
    parts: dict[Batch, Ownership] = {}
    for owned, applied in records:
        for batch in applied.beyond(common):
            parts[batch] = parts[batch].with_all(owned) if batch in parts else owned
    return common, PartlyApplied(parts)


def bytes_to_adopt(rows: int, owned: Ownership, gained: Ownership, servers: int, parity: int, blocks: int) -> int:
    """Estimates the bytes by which a server grows that adopts the buckets in `gained`.

    * `rows`: the bytes of its rows now. The adopted buckets are taken to be as large as those that it has `owned`.
    * `servers`: how many servers are left; `parity`: how many of them may be lost, if there are enough of them.
    * `blocks`: the bytes of parity that it holds now, and that those of the new servers replace.
    """
    before, more = np.count_nonzero(owned.buckets), np.count_nonzero(gained.buckets)
    adopted = int(rows * more / before) if before else 0
    width = stripe_width(servers, parity)
    after = (rows + adopted) * parity // width if width > 0 else 0
    return adopted + max(0, after - blocks)
