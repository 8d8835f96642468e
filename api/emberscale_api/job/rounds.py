"""Whether workers train rounds of batches, why, and what that saves, as people see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class RoundsReason(StrEnum):
    """Why a worker trains rounds or batches one by one."""

    ENABLED = "Enabled"
    OBSTACLE = "Obstacle"
    ESTIMATE_PENDING = "EstimatePending"
    ESTIMATE_PAYS = "EstimatePays"
    ESTIMATE_DOES_NOT_PAY = "EstimateDoesNotPay"
    SPEED_PENDING = "SpeedPending"
    SPEED_PAYS = "SpeedPays"
    SPEED_DOES_NOT_PAY = "SpeedDoesNotPay"
    SAVES_TOO_LITTLE = "SavesTooLittle"
    BUDGET_TOO_SMALL = "BudgetTooSmall"
    BUDGET_ABOVE_MEMORY = "BudgetAboveMemory"
    NOT_ADMITTED = "NotAdmitted"
    TOO_SLOW = "TooSlow"


BUDGET_PROBLEMS = frozenset({RoundsReason.BUDGET_TOO_SMALL, RoundsReason.BUDGET_ABOVE_MEMORY})
"""What a person can mend by another `hotEmbeddings.budget`."""


@dataclass(frozen=True, slots=True)
class RoundsDecision:
    """Whether a worker trains rounds now.

    * `reason`: one of RoundsReason, or of a later version. `message`: why, with the numbers, as the end of a sentence.
    * `batches`, `round_bytes`, `single_bytes`: the round behind the decision, its bytes on the wire, and those of its
      batches one by one; `rows`: its distinct rows; `memory_bytes`: what it takes in the worker. 0 where none was
      estimated or measured.
    """

    active: bool
    reason: str
    message: str
    batches: int = 0
    round_bytes: int = 0
    single_bytes: int = 0
    rows: int = 0
    memory_bytes: int = 0


def decisions_in_words(decisions: Sequence[RoundsDecision]) -> str:
    """The decisions of all workers in one line, empty without any: the numbers are those of the first of each kind."""
    kinds: dict[tuple[bool, str], list[RoundsDecision]] = {}
    for one in decisions:
        kinds.setdefault((one.active, one.reason), []).append(one)
    told = []
    for (active, _), alike in kinds.items():
        among = f" in {len(alike)} of {len(decisions)} workers" if len(kinds) > 1 else ""
        told.append(f"{'on' if active else 'off'}{among}: {alike[0].message}")
    return "; ".join(told)
