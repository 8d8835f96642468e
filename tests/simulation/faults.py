"""What goes wrong in a simulated job, and when: at a time, or after a moment of a move or of a recovery."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    HANG = "hang"
    CUT = "cut"
    """All data-plane connections of a member break."""
    PART = "part"
    """A parameter server and the next one cannot reach each other for `seconds`; both still reach the master."""
    SPLIT = "split"
    """A second master starts while the first runs on, with late calls, and without Redis for `seconds`."""
    NO_MEMORY = "no memory"
    """The next push to a parameter server finds no room."""
    LOST_TAIL = "lost tail"
    """Redis dies with the master, and loses what it wrote within the last second."""
    LOST_WRITES = "lost writes"
    """Only Redis dies, and loses what it wrote within the last second."""
    LOST_STORE = "lost store"
    """Redis dies with all that it held."""
    STORAGE_FAILS = "storage fails"
    STORAGE_HANGS = "storage hangs"
    LATE_CALLS = "late calls"
    """Half of the master's calls within `seconds` are late, as if it got no CPU."""
    TEAR = "tear"
    """The next checkpoint file is silently damaged."""


FOR_EVER = 1e9

HORIZON = 12.0
"""Faults begin within this many seconds."""

SWITCHED = "Switched"
"""A moment after the phases of a move: every server has adopted the new table; the master has yet to hear so."""

RESTORED = "Restored"
"""Servers were assigned after a roll-back, and the master has just learned that all have loaded."""

RELOAD = "Reload "
"""Prefix of the moments at which a reload enters a phase."""

RELOADED = "Reloaded"
"""The successor of a lost server has adopted the table that replaces it."""

PROTECTED = "Protected"
"""The others hold parity of every server's rows."""

DEGRADED = "Degraded"
"""A server is lost, and its rows are to be rebuilt."""

LAGGED = "Lagged"
"""A server is rebuilt without some batches that its predecessor has acknowledged."""

REBUILD = "Rebuild "
"""Prefix of the moments at which the move that rebuilds a lost server enters a phase."""

REBUILT = "Rebuilt"
"""The successor of a lost server has adopted the table that replaces it."""

ADOPTED = "Adopted"
"""A server has adopted the table by which it owns rows of a lost one."""

FOUND = "Found"
"""A server has sent the keys of lost rows that follow on demand."""

MISSING = "Missing"
"""A server has adopted a table by which it owns rows that have yet to arrive."""

ARRIVED = "Arrived"
"""One of these rows has arrived."""

HALF_PUSHED = "Half pushed by "
"""Prefix of the moments at which the first server, whose rows can be rebuilt, has applied a worker's push, and others
have yet to; the worker's name follows."""

SAVED = "Saved"
"""A checkpoint is complete."""


@dataclass(frozen=True, order=True)
class Fault:
    """One fault, which begins after `at` seconds; some kinds last for `seconds`.

    `role` and `index` name the member that it strikes. With `during`, it strikes once, `at` seconds after that moment:
    a move or reload enters a phase, a restore reaches a point, a push is half applied, or a checkpoint is complete.
    """

    at: float
    kind: Kind
    role: str = ""
    index: int = 0
    seconds: float = 0.0
    during: str = ""

    def __str__(self) -> str:
        where = f" {self.role}-{self.index}" if self.role else ""
        lasts = " for ever" if self.seconds == FOR_EVER else f" for {self.seconds:.1f} s" if self.seconds else ""
        when = f" after {self.during}" if self.during else ""
        return f"{self.at:7.3f}{when}  {self.kind}{where}{lasts}"

    @property
    def over_at(self) -> float:
        """The latest time at which it has passed, though its effect may last for ever."""
        begins = self.at + (HORIZON if self.during else 0.0)
        return begins + (self.seconds if self.seconds < FOR_EVER else 0.0)


def torn_push(worker: int, seconds: float, lost_after: float = 0.005) -> tuple[Fault, Fault]:
    """Returns faults that lose the first server in the middle of a push, whose worker hangs for `seconds`."""
    moment = f"{HALF_PUSHED}worker-{worker}"
    return (
        Fault(0.0, Kind.HANG, "worker", worker, seconds, during=moment),
        Fault(lost_after, Kind.KILL, "ps", 0, during=moment),
    )
