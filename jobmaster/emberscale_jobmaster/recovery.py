"""What a job does about lost rows: a choice that depends on nothing but its arguments."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Parameter servers whose rows are gone, by index, or whose history the books do not know."""

    servers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Protection:
    """What there is to recover from; `checkpoint` is the id of the newest complete one, empty if there is none."""

    checkpoint: str


@dataclass(frozen=True)
class Estimates:
    """What each way costs; `lost_seconds` is the training since the newest checkpoint, which a roll-back repeats."""

    lost_seconds: float


@dataclass(frozen=True)
class RollBack:
    """All servers go back to the newest sound checkpoint, or to nothing, and the books with them: a new generation."""

    checkpoint: str


Recovery = RollBack
"""One of the ways; what is kept of each decides what follows."""


def choose(failure: Failure, protection: Protection, estimates: Estimates) -> Recovery:
    """The way back after a failure. Without anything but checkpoints, that is to roll back."""
    return RollBack(protection.checkpoint)
