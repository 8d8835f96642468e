"""Blocks in memory: the ones read last, and one that a thread reads while batches are made of the one before."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from emberscale_trainer.data.records import RecordBlock

KEPT_BLOCKS = 2

K = TypeVar("K", bound=Hashable)


class BlockCache(Generic[K]):
    """At most `KEPT_BLOCKS` blocks and one more that is read ahead. For one thread at a time.

    One thread reads, so blocks are read in the order in which they are asked for.
    """

    def __init__(self, load: Callable[[K], RecordBlock]) -> None:
        self._load = load
        self._reader = ThreadPoolExecutor(1, "read-ahead")
        self._blocks: OrderedDict[K, Future[RecordBlock]] = OrderedDict()

    def expect(self, key: K) -> None:
        """Begins to read a block that will be asked for next."""
        if key not in self._blocks:
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[key] = self._reader.submit(self._load, key)

    def get(self, key: K) -> RecordBlock:
        """The block; waits for it. Raises what `load` raises, and reads anew when asked again."""
        self.expect(key)
        self._blocks.move_to_end(key)
        try:
            return self._blocks[key].result()
        except BaseException:
            del self._blocks[key]
            raise
