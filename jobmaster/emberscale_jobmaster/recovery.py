"""Chooses how a job recovers lost rows: a pure function of its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOBODY_LOST = "no parameter server is lost, but pushes wait until all begin anew"
NO_SURVIVOR = "no parameter server has kept its rows"


@dataclass(frozen=True)
class Failure:
    """Parameter servers, by index, whose rows are lost or whose history the master does not know.

    * `servers`: empty if all have their rows, but cannot continue with them.
    * `is_loss`: those servers are gone, and all others serve the table that the ledger knows.
    """

    servers: tuple[int, ...]
    reason: str
    is_loss: bool = False


@dataclass(frozen=True)
class Protection:
    """The sources of recovery.

    * `checkpoint`: the id of the newest complete checkpoint, empty if there is none.
    * `survivors`: how many parameter servers keep their rows.
    * `allowed_pls`: the portion of lost samples that the job may reach; 0: it may lose nothing.
    * `parity`: servers of which the others can rebuild any `covered`.
    """

    checkpoint: str
    survivors: int = 0
    allowed_pls: float = 0.0
    parity: frozenset[int] = frozenset()
    covered: int = 1


@dataclass(frozen=True)
class Estimates:
    """The cost of each recovery.

    * `lost_seconds`: the training that a roll-back to the newest checkpoint repeats.
    * `pls`: the portion of lost samples after a partial recovery, those of earlier ones included.
    """

    lost_seconds: float
    pls: float = 0.0


@dataclass(frozen=True)
class RollBack:
    """All servers, and the ledger with them, go back to the newest sound checkpoint or to nothing: a new generation.

    `why` says why a job that may recover partially does not; empty for all others.
    """

    checkpoint: str
    why: str = ""


@dataclass(frozen=True)
class Partial:
    """The lost servers alone go back to the newest sound checkpoint; the others keep their rows (CPR section 2.3)."""

    checkpoint: str


@dataclass(frozen=True)
class Decode:
    """The others rebuild the rows of these servers from parity, for their successors: nothing rolls back."""

    servers: tuple[int, ...]


Recovery = RollBack | Partial | Decode
"""How a job recovers lost rows."""


@dataclass(frozen=True)
class Parity:
    """The servers, by index, that have parity of all their rows on others, under a routing table of this version.

    * `troubles`: by the index of a server, what keeps its rows from being protected now; for people.
    """

    generation: int = 0
    version: int = 0
    servers: frozenset[int] = frozenset()
    troubles: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rebuilding:
    """Lost servers whose rows are being rebuilt.

    * `lost`: by the index of each server, the incarnation of the process that is lost.
    * `reason`: why they count as lost, for people. `told`: whether the Event `Degraded` has said so.
    * `began_at`: when the last one was lost. `next_at`: the earliest time of the next attempt. Both on the job's clock.
    * `attempts`: moves that were begun for them.
    * `withdraws`: the others may have begun to take their own rows out of the parity. None of them can be rebuilt.
    """

    lost: Mapping[int, str]
    reason: str
    began_at: float
    told: bool = False
    attempts: int = 0
    next_at: float = 0.0
    withdraws: bool = False

    @property
    def servers(self) -> tuple[int, ...]:
        """The indexes of the lost servers, ascending."""
        return tuple(sorted(self.lost))

    @property
    def names(self) -> str:
        """The names of the lost servers, for people."""
        return " and ".join(f"ps-{server}" for server in self.servers)


@dataclass(frozen=True)
class Rebuilt:
    """How many servers were rebuilt, the last of them, the seconds from the loss on, and the bytes of their rows."""

    count: int = 0
    server: str = ""
    seconds: float = 0.0
    bytes: int = 0


def choose(failure: Failure, protection: Protection, estimates: Estimates) -> Recovery:
    """Returns the recovery from a failure: from parity where that covers what is lost, else a partial one where the
    job allows it and can have it, else a roll-back.
    """
    is_covered = 0 < len(failure.servers) <= protection.covered and protection.parity.issuperset(failure.servers)
    if failure.is_loss and is_covered:
        return Decode(failure.servers)
    if not failure.servers:
        return RollBack(protection.checkpoint, NOBODY_LOST)
    if not protection.allowed_pls:
        return RollBack(protection.checkpoint)
    if not failure.is_loss:
        return RollBack(protection.checkpoint, failure.reason)
    if not protection.checkpoint:
        return RollBack(protection.checkpoint, "there is no checkpoint to reload from")
    if not protection.survivors:
        return RollBack(protection.checkpoint, NO_SURVIVOR)
    if estimates.pls > protection.allowed_pls:
        return RollBack(
            protection.checkpoint,
            f"the portion of lost samples would be {estimates.pls:.4f}, "
            f"and faultTolerance.targetPLS allows {protection.allowed_pls:g}",
        )
    return Partial(protection.checkpoint)
