"""Flash checkpoints of a job: when the next one is due, and what the last ones cost.

A flash checkpoint goes to Redis every few seconds (DLRover-RM, section 5.3). It bounds the cost of losing a parameter
server. Persistent checkpoints continue at their own interval; only they last.
"""

from dataclasses import dataclass

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS
from emberscale_api.job import FlashMode, TrainingJobSpec

LEAST_INTERVAL_SECONDS = 15.0
LONGEST_INTERVAL_SECONDS = 300.0
_MOST_INTERVAL_SECONDS = FLASH_KEPT_SECONDS / 2
"""Overrides the manifest: after a longer interval, Redis would have dropped what the next checkpoint builds on."""
_COST_SHARE = 0.01
"""The share of training time that flash checkpoints may cost if the manifest names no interval."""
_LONGEST_PAUSE_SECONDS = 600.0


@dataclass(frozen=True)
class Flash:
    """The state of a job's flash checkpoints. Times are on the job's clock, in seconds.

    * `available`: whether there is a Redis for them.
    * `checkpoint`: the id of the newest complete one whose rows belong to this history; empty if there is none.
    * `taken_at`: when its barrier began. `counted_from`: when the interval to the next one began.
    * `seconds`: how long it took. `held_seconds`: how long it held pushes. `cost_seconds`: the training time it cost.
    * `written_bytes`: the bytes that it added. `bytes`: its size, including the checkpoints on which it builds.
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
    """Returns the seconds between flash checkpoints: the manifest's, else the interval that keeps their cost low."""
    if spec.checkpoint.flash.interval is not None:
        return min(spec.checkpoint.flash.interval, _MOST_INTERVAL_SECONDS)
    return min(max(LEAST_INTERVAL_SECONDS, flash.cost_seconds / _COST_SHARE), LONGEST_INTERVAL_SECONDS)


def is_due(flash: Flash, spec: TrainingJobSpec, now: float) -> bool:
    """Whether the next flash checkpoint should begin."""
    return is_wanted(flash, spec) and now - flash.counted_from >= interval(flash, spec)


def pause(flash: Flash, spec: TrainingJobSpec, attempts: int) -> float:
    """Returns the seconds to wait after this number of failed attempts, as each attempt holds pushes briefly."""
    return min(interval(flash, spec) * 2.0 ** min(attempts, 6), _LONGEST_PAUSE_SECONDS)


def missing_store(flash: Flash, spec: TrainingJobSpec) -> str:
    """Returns a warning if the manifest asks for flash checkpoints and there is no Redis for them; else empty."""
    if flash.available or spec.checkpoint.flash.mode is not FlashMode.ENABLED:
        return ""
    return (
        "spec.checkpoint.flash.mode is Enabled, and there is no Redis for flash checkpoints: set redis.flash in the "
        "values of the chart, or mode: Auto"
    )
