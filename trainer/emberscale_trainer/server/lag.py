"""How far the parity of a server's rows lags behind its pushes, and when a push must wait for that, as pure state.

With `durability: Sync`, each push is an item of its own, and is answered once all holders have stored it. With `Async`,
the changes of several pushes become one item, and a push is answered while no more is left to store than a bound
allows. A lost server's rows lack no more answered pushes than that, and its deltas take no more memory than that and
one push of each connection.
"""

from collections import deque
from dataclasses import dataclass

from emberscale_trainer.parity.holding import Batch


@dataclass(frozen=True)
class LagBound:
    """How far parity may lag behind answered pushes, in pushes and in bytes of deltas.

    `item_pushes`, `item_bytes`: as soon as so much has gathered, it becomes an item. That is a quarter of the bound:
    while one item is on its way, others gather.
    """

    pushes: int = 64
    nbytes: int = 64 << 20
    item_pushes: int = 16
    item_bytes: int = 16 << 20


class ParityLag:
    """The pushes of a server that are not stored by all holders of its parity. Not thread-safe."""

    def __init__(self, bound: LagBound | None) -> None:
        """Without a bound, `durability` is `Sync`."""
        self._bound = bound
        self._gathered: list[Batch] = []
        self._gathered_bytes = 0
        self._sent: deque[tuple[int, int, int]] = deque()
        self._sent_pushes = self._sent_bytes = 0

    @property
    def is_async(self) -> bool:
        """Whether pushes may be answered before all holders have stored them."""
        return self._bound is not None

    def pushed(self, batch: Batch, pending_bytes: int) -> bool:
        """Notes a push; returns whether the changes gathered so far, of this number of bytes, become an item now."""
        self._gathered.append(batch)
        self._gathered_bytes, bound = pending_bytes, self._bound
        return bound is None or len(self._gathered) >= bound.item_pushes or pending_bytes >= bound.item_bytes

    @property
    def has_gathered(self) -> bool:
        """Whether there are pushes whose changes are not part of an item."""
        return bool(self._gathered)

    @property
    def gathers_too_much(self) -> bool:
        """Whether the gathered pushes alone exceed the bound, since there was no memory to make an item of them."""
        bound = self._bound
        return bound is not None and (len(self._gathered) > bound.pushes or self._gathered_bytes > bound.nbytes)

    def send(self, number: int, size: int) -> tuple[Batch, ...]:
        """Makes the gathered changes item `number`, of `size` bytes; returns the pushes that they are of."""
        batches = self.drop()
        self._sent.append((number, len(batches), size))
        self._sent_pushes += len(batches)
        self._sent_bytes += size
        return batches

    def drop(self) -> tuple[Batch, ...]:
        """Returns the gathered pushes, which nobody will store."""
        dropped = tuple(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        return dropped

    def stored(self, number: int) -> None:
        """Notes that all holders have stored the items up to this number."""
        while self._sent and self._sent[0][0] <= number:
            _, pushes, size = self._sent.popleft()
            self._sent_pushes -= pushes
            self._sent_bytes -= size

    @property
    def pushes(self) -> int:
        """The number of pushes that not all holders have stored."""
        return self._sent_pushes + len(self._gathered)

    @property
    def nbytes(self) -> int:
        """The bytes of deltas that not all holders have stored."""
        return self._sent_bytes + self._gathered_bytes

    def must_store(self, last: int) -> int:
        """Returns the item up to which all must be stored before a push is answered; 0: none. `last` is the newest."""
        if self._bound is None:
            return last
        pushes, size, number = self.pushes, self.nbytes, 0
        for item, its_pushes, its_bytes in self._sent:
            if pushes <= self._bound.pushes and size <= self._bound.nbytes:
                break
            pushes, size, number = pushes - its_pushes, size - its_bytes, item
        return number
