"""Chooses how a job recovers lost rows: a pure function of its arguments."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Parameter servers, by index, whose rows are lost or whose history the master does not know."""

    servers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Protection:
    """The sources of recovery; `checkpoint` is the id of the newest complete checkpoint, empty if there is none."""

    checkpoint: str


@dataclass(frozen=True)
class Estimates:
    """The cost of each recovery; `lost_seconds` is the training that a roll-back to the newest checkpoint repeats."""

    lost_seconds: float


@dataclass(frozen=True)
class RollBack:
    """All servers, and the ledger with them, go back to the newest sound checkpoint or to nothing: a new generation."""

    checkpoint: str


Recovery = RollBack
"""One of the ways; what is kept of each decides what follows."""


def choose(failure: Failure, protection: Protection, estimates: Estimates) -> Recovery:
    """Returns the recovery from a failure. With checkpoints as the only protection, it is a roll-back."""
    return RollBack(protection.checkpoint)
