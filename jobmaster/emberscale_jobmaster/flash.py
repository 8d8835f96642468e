"""Flash checkpoints of a job: when the next one is due, and what the last ones cost.

A flash checkpoint goes to Redis every few seconds (DLRover-RM, section 5.3). It bounds what a lost parameter server
costs; persistent checkpoints go on at their own interval, and everything that lasts is in them alone.
"""

from dataclasses import dataclass

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS
from emberscale_api.job import FlashMode, TrainingJobSpec

LEAST_INTERVAL_SECONDS = 15.0
LONGEST_INTERVAL_SECONDS = 300.0
_MOST_INTERVAL_SECONDS = FLASH_KEPT_SECONDS / 2
"""Whatever the manifest says: later, Redis would have forgotten what the next one builds on."""
_COST_SHARE = 0.01
"""Of the training time: what flash checkpoints may cost where the manifest names no interval."""
_LONGEST_PAUSE_SECONDS = 600.0


@dataclass(frozen=True)
class Flash:
    """What is known of a job's flash checkpoints. Times are on the job's clock, in seconds.

    * `available`: whether there is a Redis for them.
    * `checkpoint`: the id of the newest complete one whose rows belong to this history; empty if there is none.
    * `taken_at`: when its barrier began. `counted_from`: when the interval to the next one began.
    * `seconds`: how long it took. `held_seconds`: for how long it held pushes. `cost_seconds`: of training.
    * `written_bytes`: that it added. `bytes`: of it and of what it builds on.
    """

    available: bool = False
    checkpoint: str = ""
    taken_at: float = 0.0
    counted_from: float = 0.0
    seconds: float = 0.0
    held_seconds: float = 0.0
    cost_seconds: float = 0.0
    written_bytes: int = 0
    bytes: int = 0


def is_wanted(flash: Flash, spec: TrainingJobSpec) -> bool:
    """Whether the job takes flash checkpoints."""
    return flash.available and spec.checkpoint.flash.mode is not FlashMode.DISABLED


def interval(flash: Flash, spec: TrainingJobSpec) -> float:
    """Seconds between flash checkpoints: the manifest's, else as many as keep their cost low."""
    if spec.checkpoint.flash.interval is not None:
        return min(spec.checkpoint.flash.interval, _MOST_INTERVAL_SECONDS)
    return min(max(LEAST_INTERVAL_SECONDS, flash.cost_seconds / _COST_SHARE), LONGEST_INTERVAL_SECONDS)


def is_due(flash: Flash, spec: TrainingJobSpec, now: float) -> bool:
    """Whether the next flash checkpoint should begin."""
    return is_wanted(flash, spec) and now - flash.counted_from >= interval(flash, spec)


def pause(flash: Flash, spec: TrainingJobSpec, attempts: int) -> float:
    """Seconds to the next attempt after this number of failed ones: each holds pushes for a moment."""
    return min(interval(flash, spec) * 2.0 ** min(attempts, 6), _LONGEST_PAUSE_SECONDS)


def missing_store(flash: Flash, spec: TrainingJobSpec) -> str:
    """Says that the manifest asks for flash checkpoints and there is no Redis for them; else empty."""
    if flash.available or spec.checkpoint.flash.mode is not FlashMode.ENABLED:
        return ""
    return (
        "spec.checkpoint.flash.mode is Enabled, and there is no Redis for flash checkpoints: set redis.flash in the "
        "values of the chart, or mode: Auto"
    )
