"""Redis: the durable state, which may lose its last second."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation.world import Process, Task, World

from emberscale_jobmaster.state import JobState

if TYPE_CHECKING:
    from tests.simulation.master_rules import MasterRules

LOST_TAIL_SECONDS = 1.0
"""An append-only file that is synced every second loses at most this much."""


class DeposedError(Exception):
    """Another master has started."""


@dataclass(frozen=True)
class Kept:
    """The content of Redis: who writes, and the state."""

    term: int = 0
    holder: str = ""
    state: JobState | None = None


class Disk:
    """What outlives a Redis process: its writes with their times."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._written: list[tuple[float, Kept]] = [(0.0, Kept())]

    @property
    def newest(self) -> Kept:
        """The last write."""
        return self._written[-1][1]

    def write(self, kept: Kept) -> None:
        """Appends a write; drops writes older than the tail that can be lost."""
        written, now = self._written, self._world.now
        while len(written) > 1 and written[1][0] <= now - LOST_TAIL_SECONDS:
            del written[0]
        written.append((now, kept))

    def lose_tail(self, seconds: float) -> None:
        """Forgets the writes of the last `seconds`."""
        left = [entry for entry in self._written if entry[0] <= self._world.now - seconds]
        self._written = left or [(0.0, Kept())]

    def lose_everything(self) -> None:
        """Forgets all writes."""
        self._written = [(0.0, Kept())]


class Redis(Process):
    """One Redis process; each of its handlers runs as one step."""

    def __init__(self, world: World, name: str, disk: Disk, masters: "MasterRules") -> None:
        super().__init__(world, name)
        self._disk = disk
        self._masters = masters

    def open(self, holder: str) -> Task[tuple[int, JobState | None]]:
        """Deposes the previous master. Returns the new term, and the state that the previous master left."""
        yield from ()
        kept = replace(self._disk.newest, term=self._disk.newest.term + 1, holder=holder)
        self._disk.write(kept)
        self._masters.opened(holder)
        return kept.term, kept.state

    def save(self, term: int, holder: str, state: JobState) -> Task[None]:
        """Replaces the state. Raises DeposedError."""
        yield from ()
        kept = self._disk.newest
        if kept.term == 0:
            kept = Kept(term, holder)
        if (kept.term, kept.holder) != (term, holder):
            raise DeposedError(f"term {kept.term} writes")
        self._disk.write(Kept(kept.term, kept.holder, state))
        self._masters.wrote(holder)

    def ping(self) -> Task[None]:
        """Answers."""
        yield from ()
