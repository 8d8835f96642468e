"""Bytes of rows on the wire for a batch, without hot rows and with them.

Each distinct row of a batch is pulled and pushed once (see `emberscale_api.wire`): its key goes both ways, its weights
one way and their gradients the other. Headers and dense parameters are left out. A hot batch asks no parameter server
for rows. Workers on separate machines send each other their steps, so that their copies stay equal (in FAE an
all-reduce, section 3); workers that share one copy send nothing. At a swap, each copy fetches the hot rows, and one
copy writes them back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_api.job.resolved import TableSpec
from emberscale_trainer.hot.access import IdRecords
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES, RowLayout

_MEASURED_BATCHES = 32


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The costs of the rows of one id of a column, in all tables of the column.

    `memory` is bytes in a table, as a PS holds them. `step` is bytes of a key and its weights or gradients, per table.
    """

    memory: int
    step: int

    @classmethod
    def of(cls, tables: Sequence[TableSpec], columns: int) -> tuple["RowCosts", ...]:
        """Returns the costs of each column of ids."""
        memory, step = [0] * columns, [0] * columns
        for table in tables:
            memory[table.column] += RowLayout.of(table).stride
            step[table.column] += KEY_BYTES + FLOAT_BYTES * table.dimension
        return tuple(cls(*one) for one in zip(memory, step, strict=True))


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Bytes of rows on the wire for a sample, on average over an epoch, of a job with hot rows.

    `cold` is pulled and pushed by cold batches. `exchanged` is sent between workers in hot batches if each has its own
    copy. `swapped` is hot rows at swaps: with one copy, and with one per worker.
    """

    cold: float
    exchanged: float
    swapped_shared: float
    swapped_copies: float

    @property
    def shared(self) -> float:
        """The traffic with one copy for all workers."""
        return self.cold + self.swapped_shared

    @property
    def copies(self) -> float:
        """The traffic with one copy per worker."""
        return self.cold + self.exchanged + self.swapped_copies


def bytes_of_batch(records: IdRecords, costs: Sequence[RowCosts]) -> int:
    """Bytes of the keys of a batch and one float vector for each: half of what it pulls and pushes."""
    ordered = np.sort(records.ids, axis=0)
    distinct = (np.diff(ordered, axis=0) != 0).sum(axis=0) + bool(len(records))
    keys = [*distinct.tolist(), *(np.unique(lists.values).size for lists in records.lists)]
    return sum(count * cost.step for count, cost in zip(keys, costs, strict=True))


def step_bytes(
    records: IdRecords, chosen: npt.NDArray[np.bool_], batch_size: int, costs: Sequence[RowCosts], seed: int
) -> float:
    """Bytes for a sample of batches of the chosen records (bool[n]), as `bytes_of_batch`; 0 if there are none.

    Fewer records than a batch make one small batch, whose rows are shared by fewer records: an upper bound.
    """
    places = np.flatnonzero(chosen)
    if not places.size:
        return 0.0
    shuffled = np.random.default_rng(seed).permutation(places)
    batches = min(_MEASURED_BATCHES, max(1, places.size // batch_size))
    size = min(batch_size, places.size)
    total = sum(
        bytes_of_batch(records.take(shuffled[number * size : (number + 1) * size]), costs) for number in range(batches)
    )
    return total / (batches * size)


def traffic_with(
    hot_share: float,
    hot_steps: float,
    cold_steps: float,
    hot_bytes: int,
    workers: int,
    records: int,
    rate: int,
) -> RowTraffic:
    """The traffic of an epoch of `records` with all-hot and all-cold batches.

    `hot_share` is the ratio of records that are all hot. `hot_steps` and `cold_steps` are what `step_bytes` says of
    either. `rate` (R of FAE's equation 5) is the ratio of the batches, in percent, after which hot and cold change.
    """
    rounds = math.ceil(100 / rate) if hot_share else 0
    swap = rounds * hot_bytes / records
    return RowTraffic(
        cold=2 * cold_steps * (1 - hot_share),
        exchanged=hot_steps * (workers - 1) * hot_share,
        swapped_shared=2 * swap,
        swapped_copies=(workers + 1) * swap,
    )
