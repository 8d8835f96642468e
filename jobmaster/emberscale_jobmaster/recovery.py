"""Chooses how a job recovers lost rows: a pure function of its arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NOBODY_LOST = "no parameter server is lost, but pushes wait until all servers reload"
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
    """The sources of recovery, and the cost of a partial one.

    * `has_checkpoint`: there is a complete checkpoint.
    * `survivors`: how many parameter servers keep their rows.
    * `pls`: the portion of lost samples after a partial recovery, including earlier ones.
    * `allowed_pls`: the portion that the job may reach; 0: it may lose nothing.
    * `protected`: the protected servers, of which the others can rebuild any `parity`.
    * `uncovered`: why parity does not cover the failure if they cannot; empty for jobs without parity.
    """

    has_checkpoint: bool
    survivors: int = 0
    pls: float = 0.0
    allowed_pls: float = 0.0
    protected: frozenset[int] = frozenset()
    parity: int = 1
    uncovered: str = ""


@dataclass(frozen=True)
class RollBack:
    """All servers and the ledger go back to the newest sound checkpoint or to nothing, in a new generation.

    `why` says why a job that may recover partially, or keeps parity, does not recover so; empty for other jobs.
    """

    why: str = ""


@dataclass(frozen=True)
class Partial:
    """Only the lost servers go back to the newest sound checkpoint; the others keep their rows (CPR section 2.3)."""


@dataclass(frozen=True)
class Decode:
    """The others rebuild the rows of these servers from parity, for their new owners: nothing rolls back."""

    servers: tuple[int, ...]


Recovery = RollBack | Partial | Decode
"""How a job recovers lost rows."""


@dataclass(frozen=True)
class ParityGroup:
    """What the servers of a routing table of this version have reported of their parity group.

    * `protected`: the indexes of the servers of whose rows, all of them, others hold parity.
    * `troubles`: by the index of a server, what keeps its rows from being protected now; for people.
    * `missing`: the indexes of servers that serve rows which have yet to be rebuilt.
    """

    generation: int = 0
    version: int = 0
    protected: frozenset[int] = frozenset()
    troubles: Mapping[int, str] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Parting:
    """A roll-back because servers of a parity group lived, but did not reach each other again.

    * `at`: on the job's clock, in seconds. `checkpoint`: the id of the newest complete checkpoint then; empty: none.
    """

    at: float
    checkpoint: str


@dataclass(frozen=True)
class Rebuilding:
    """Lost servers whose rows are being rebuilt.

    * `lost`: by the index of each server, the incarnation of the process that is lost.
    * `reason`: why they count as lost, for people. `told`: whether the Event `Degraded` has said so.
    * `began_at`: when the last server was lost. `next_at`: the earliest time of the next attempt. Both on the job's
      clock.
    * `attempts`: the number of moves begun to rebuild the rows.
    * `withdraws`: survivors may have begun to take their own rows out of the parity, so none of them can be rebuilt.
    * `awaits_successors`: the survivors could not adopt the rows.
    """

    lost: Mapping[int, str]
    reason: str
    began_at: float
    told: bool = False
    attempts: int = 0
    next_at: float = 0.0
    withdraws: bool = False
    awaits_successors: bool = False

    @property
    def servers(self) -> tuple[int, ...]:
        """The indexes of the lost servers, ascending."""
        return tuple(sorted(self.lost))

    @property
    def names(self) -> str:
        """The names of the lost servers, for people."""
        return names_of(self.servers)

    @property
    def their(self) -> str:
        """The possessive of the names."""
        return "its" if len(self.lost) == 1 else "their"


def names_of(servers: Iterable[int]) -> str:
    """Returns the names of parameter servers, for people."""
    return " and ".join(f"ps-{server}" for server in servers)


def choose(failure: Failure, protection: Protection) -> Recovery:
    """Returns the recovery from a failure.

    Prefers parity if it covers the lost servers, then a partial recovery if the job allows it and has what it takes,
    then a roll-back.
    """
    can_rebuild = 0 < len(failure.servers) <= protection.parity and protection.protected.issuperset(failure.servers)
    if failure.is_loss and can_rebuild:
        return Decode(failure.servers)
    if not failure.servers:
        return RollBack(NOBODY_LOST)
    if not protection.allowed_pls:
        return RollBack(protection.uncovered)
    if not failure.is_loss:
        return RollBack(failure.reason)
    if not protection.has_checkpoint:
        return RollBack("there is no checkpoint to reload from")
    if not protection.survivors:
        return RollBack(NO_SURVIVOR)
    too_much = too_much_lost(protection.pls, protection.allowed_pls)
    return RollBack(too_much) if too_much else Partial()


def too_much_lost(pls: float, allowed: float) -> str:
    """Explains to people why a partial recovery would lose more than the job may lose; empty if it would not."""
    if pls <= allowed:
        return ""
    return f"the portion of lost samples would be {pls:.4f}, and faultTolerance.targetPLS allows {allowed:g}"
