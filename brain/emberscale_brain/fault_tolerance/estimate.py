"""From what was seen of a job and of its like to what its failures cost."""

from dataclasses import dataclass

from emberscale_api.shape import JobShape
from emberscale_brain.fault_tolerance.advice import FailureCosts
from emberscale_brain.planner.types import ScalingOverheads

_BELIEVED_PER_SECOND = 0.015 / 86_400  # DLRover-RM section 2.2: 1.5% of the pods fail on a day
_BELIEF = 0.5  # failures' worth of trust in that, and in the fleet's rate against a job's own
_FIRST_COST = 1.0  # seconds of training that a checkpoint costs, before one was taken


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Parameter servers that were lost, and the seconds that servers ran in all."""

    failures: int = 0
    server_seconds: float = 0.0

    def __add__(self, other: "FailureRecord") -> "FailureRecord":
        return FailureRecord(self.failures + other.failures, self.server_seconds + other.server_seconds)


def failure_rate(own: FailureRecord, fleet: FailureRecord) -> float:
    """Failures of a PS of the job, a second.

    All jobs together correct what is believed of any; the job corrects that, and what its own failures say stands
    where it is more: of a job that was lucky so far little is known, of one that fails again and again much.
    """
    of_all = (_BELIEF + fleet.failures) / (_BELIEF / _BELIEVED_PER_SECOND + fleet.server_seconds)
    mixed = (_BELIEF + own.failures) / (_BELIEF / of_all + own.server_seconds)
    seen = max(0, own.failures - 1) / own.server_seconds if own.server_seconds > 0 else 0.0
    return max(mixed, seen)


def failure_costs(
    shape: JobShape,
    total_seconds: float,
    own: FailureRecord,
    fleet: FailureRecord,
    checkpoint_cost: float,
    overheads: ScalingOverheads,
) -> FailureCosts:
    """What failures of the PS cost a job that takes `total_seconds` in all.

    `checkpoint_cost` is what checkpoints were seen to cost, in seconds of training; 0 before the first. Loading is
    taken to stop training for as long as another number of PS does, which is a cut and a load.
    """
    return FailureCosts(
        total_seconds=max(1.0, total_seconds),
        ps=shape.ps,
        between_failures=1 / (failure_rate(own, fleet) * shape.ps),
        save=checkpoint_cost or _FIRST_COST,
        load=overheads.ps_pause_seconds,
        reschedule=overheads.ps_start_seconds,
    )
