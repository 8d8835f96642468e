"""Reads the batches at positions of an epoch.

The last blocks stay in memory, and a thread reads one block ahead while batches are made from the one before.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile, Dataset, Split
from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.order import EpochOrder
from emberscale_trainer.data.records import IdLists, RecordBlock, RecordFormat, empty_columns

KEPT_BLOCKS = 2

K = TypeVar("K", bound=Hashable)


class BlockCache(Generic[K]):
    """At most `KEPT_BLOCKS` blocks and one more that is read ahead. For one thread at a time.

    A single thread reads, so blocks are read in the order of requests.
    """

    def __init__(self, load: Callable[[K], RecordBlock]) -> None:
        self._load = load
        self._reader = ThreadPoolExecutor(1, "read-ahead")
        self._blocks: OrderedDict[K, Future[RecordBlock]] = OrderedDict()

    def expect(self, key: K) -> None:
        """Begins to read the block that will be requested next."""
        if key not in self._blocks:
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[key] = self._reader.submit(self._load, key)

    def get(self, key: K) -> RecordBlock:
        """Waits for the block and returns it. Raises what `load` raises; the next call reads again."""
        self.expect(key)
        self._blocks.move_to_end(key)
        try:
            return self._blocks[key].result()
        except BaseException:
            del self._blocks[key]
            raise


@dataclass(frozen=True, slots=True)
class Batch:
    """The records at positions [start, stop) of an epoch, without the malformed ones.

    `number` is start // batch_size. labels float32[n], dense float32[n, d], ids int64[n, c], C-contiguous and the
    batch's own, and n lists of ids for each list column; n + len(bad_records) == stop - start. `truncated_records` is
    the number of records with a list that is longer in the file than the manifest allows.
    """

    number: int
    start: int
    stop: int
    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    lists: tuple[IdLists, ...]
    bad_records: tuple[BadRecord, ...]
    truncated_records: int

    @property
    def memory_bytes(self) -> int:
        """The memory that the records take."""
        lists = sum(column.values.nbytes + column.offsets.nbytes for column in self.lists)
        return self.labels.nbytes + self.dense.nbytes + self.ids.nbytes + lists


class BatchSource:
    """Reads batches of an indexed data set: training data shuffled if `shuffle`, evaluation data in file order.

    The last blocks stay in memory, so that consecutive ranges do not read them again, and a thread reads the next block
    of a range ahead: three blocks at most. Reading and parsing release the GIL: iterate in a background thread to read
    ahead. For one thread at a time.
    """

    def __init__(
        self, dataset: Dataset, record_format: RecordFormat, batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        self._splits = {
            Split.TRAINING: _SplitBlocks.of(dataset.training_files, dataset.training_blocks, record_format),
            Split.EVALUATION: _SplitBlocks.of(dataset.evaluation_files, dataset.evaluation_blocks, record_format),
        }
        self._format = record_format
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._blocks = BlockCache(self._load_block)
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._permutation = lru_cache(maxsize=KEPT_BLOCKS)(
            lambda split, epoch, block: self._order(split, epoch).permutation(block)
        )

    def records(self, split: Split) -> int:
        """The number of positions in an epoch of a split."""
        return sum(block.records for block in self._splits[split].blocks)

    def batches_in(self, start: int, stop: int) -> int:
        """The number of batches at positions [start, stop); the last one may be short."""
        return -(-(stop - start) // self._batch_size)

    def batches(self, split: Split, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """Yields the batches at positions [start, stop) of an epoch.

        Raises ValueError if the range does not begin and end with a batch, and DataUnavailableError.
        """
        order = self._order(split, epoch)
        records = order.records
        if start % self._batch_size or not (stop % self._batch_size == 0 or stop == records):
            raise ValueError(f"positions [{start}, {stop}) are no whole batches of {self._batch_size}")
        following = {one.block: other.block for one, other in pairwise(order.spans(start, stop))}
        for first in range(start, stop, self._batch_size):
            yield self._batch(split, epoch, first, min(first + self._batch_size, stop), following)

    def _batch(self, split: Split, epoch: int, start: int, stop: int, following: Mapping[int, int]) -> Batch:
        columns = empty_columns(stop - start, self._format.columns)
        bad_records: list[BadRecord] = []
        filled = 0
        for span in self._order(split, epoch).spans(start, stop):
            wanted = self._permutation(split, epoch, span.block)[span.start : span.stop]
            block = self._blocks.get((split, span.block))
            if span.block in following:
                self._blocks.expect((split, following[span.block]))
            written, bad = block.read(wanted, columns.rows(filled, filled + wanted.size))
            filled += written
            bad_records += bad
        good = columns.rows(0, filled)
        return Batch(
            number=start // self._batch_size,
            start=start,
            stop=stop,
            labels=good.labels,
            dense=good.dense,
            ids=good.ids,
            lists=tuple(room.lists() for room in columns.lists),
            bad_records=tuple(bad_records),
            truncated_records=columns.truncated_records,
        )

    def _load_block(self, place: tuple[Split, int]) -> RecordBlock:
        split, number = place
        blocks = self._splits[split]
        block = blocks.blocks[number]
        return self._format.read_block(blocks.files[block.file_number], block)

    def _make_order(self, split: Split, epoch: int) -> EpochOrder:
        sizes = [block.records for block in self._splits[split].blocks]
        enabled = self._shuffle and split is Split.TRAINING
        return EpochOrder(sizes, self._seed, epoch, enabled, self._splits[split].chains)


@dataclass(frozen=True, slots=True)
class _SplitBlocks:
    """`chains[i]` is the number of the chain (see EpochOrder) of block i."""

    files: tuple[DataFile, ...]
    blocks: tuple[Block, ...]
    chains: tuple[int, ...]

    @classmethod
    def of(cls, files: Sequence[DataFile], blocks: Sequence[Block], record_format: RecordFormat) -> "_SplitBlocks":
        """Sorts blocks into the order of the files, since the order of an epoch depends on the order of blocks."""
        ordered = sorted(blocks, key=lambda block: (block.file_number, block.first_record))
        entries = [(block.file_number, record_format.entry_point(files[block.file_number], block)) for block in ordered]
        chains = accumulate((one != other for one, other in pairwise(entries)), initial=0)
        return cls(tuple(files), tuple(ordered), tuple(chains) if entries else ())
