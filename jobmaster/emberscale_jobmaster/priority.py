"""Saves of priority rows between checkpoints (CPR, section 4.2): when the next is due, and which ones count.

A save has some rows of all servers, as of a barrier. A partial recovery loads the newest checkpoint, and the saves
since then over it. Other kinds of recovery ignore the saves.
"""

from dataclasses import dataclass, field

from emberscale_api.checkpoint import PRIORITY_SHARE
from emberscale_api.frozen import replace
from emberscale_api.job import RecoveryPriority, TrainingJobSpec
from emberscale_jobmaster.ranges import Applied


@dataclass(frozen=True)
class PriorityRows:
    """The saves since a checkpoint.

    * `checkpoint`: its id. `generation`: of the history that the saves belong to.
    * `saves`: their ids, oldest first.
    * `applied`: the batches that the rows of the newest have seen.
    * `began_at`: when the last attempt began, or would have had nothing to save, on the job's clock.
    """

    checkpoint: str = ""
    generation: int = 0
    saves: tuple[str, ...] = ()
    applied: Applied = field(default_factory=dict)
    began_at: float = 0.0

    def followed_by(self, save: str, checkpoint: str, generation: int, applied: Applied) -> "PriorityRows":
        """Returns these rows with one more save."""
        return replace(
            self,
            checkpoint=checkpoint,
            generation=generation,
            saves=(*self.over(checkpoint, generation), save),
            applied=applied,
        )

    def over(self, checkpoint: str, generation: int) -> tuple[str, ...]:
        """The saves to load over a checkpoint, oldest first."""
        return self.saves if (self.checkpoint, self.generation) == (checkpoint, generation) else ()


def is_due(rows: PriorityRows, spec: TrainingJobSpec, checkpointed_at: float, interval: float, now: float) -> bool:
    """Whether the next save should begin, in a job that may recover partially; `interval` is that of checkpoints."""
    wanted = spec.fault_tolerance.priority is not RecoveryPriority.NONE
    return wanted and now - max(checkpointed_at, rows.began_at) >= PRIORITY_SHARE * interval
