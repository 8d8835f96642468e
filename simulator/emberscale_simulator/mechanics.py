"""The abilities of the system under a scheduler, apart from the scheduler's decisions, and the failures of its pods.

A scenario names one or more sets of mechanics, and each scheduler runs on one of them: schedulers on the same set
differ only in their decisions. Numbers that describe Emberscale are those of Emberscale today, and the scenario names
their source under `sources`; a feature that changes a mechanism changes its number.

Pods fail by a gamma law fitted to the report of CPR, section 3.1, on 20,000 production training jobs. The paper gives
no table, but two ranges over job sizes: a median time to failure of 8-17 hours and a mean of 14-30. Their quotients,
8/14 and 17/30, agree (0.571 and 0.567), and the median of a gamma law over its mean depends only on its shape: 0.569
means a shape of 0.675. A shape below 1 is the paper's pattern: failures crowd at the beginning and are nearly uniform
after it. The mean falls linearly with the number of nodes, so the law is drawn in pod-hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel
from scipy.optimize import brentq
from scipy.special import gammaincinv

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds


def gamma_shape(median_over_mean: float) -> float:
    """Returns the shape of the gamma law whose median is this fraction (above 0 and below 1) of its mean."""
    if not 0.05 < median_over_mean < 0.98:
        raise ValueError(f"no usable gamma law has a median of {median_over_mean:g} times its mean: give 0.05 to 0.98")
    return float(brentq(lambda shape: gammaincinv(shape, 0.5) / shape - median_over_mean, 0.1, 20.0))


@dataclass(frozen=True, slots=True)
class FailureLaw:
    """Time to the next failure of a job, in pod-seconds: a job of n pods ages n pod-seconds a second."""

    mean_pod_seconds: float
    shape: float

    def draw(self, random: np.random.Generator) -> float:
        """Draws the pod-seconds until the next failure."""
        return float(random.gamma(self.shape, self.mean_pod_seconds / self.shape))

    @classmethod
    def of(cls, daily_pod_failures: float, median_over_mean: float) -> "FailureLaw | None":
        """Returns the law by which a pod fails with this probability a day in the long run; None for 0: never."""
        return cls(86_400 / daily_pod_failures, gamma_shape(median_over_mean)) if daily_pod_failures > 0 else None


class ChangeMethod(StrEnum):
    """The way in which a running job changes its shape."""

    STOP_AND_RESTART = "StopAndRestart"
    """Save, stop, restart every pod, load."""
    LIVE = "Live"
    """New pods start while the old ones train; the job pauses only to switch."""


class Mechanics(ManifestPart):
    """One set of mechanics. Bandwidths are bytes/s of one parameter server (PS), times are seconds.

    The largest PS determines how long all wait. Its tables leave at `save_bandwidth` for a restart, for other pods or,
    without `move_bandwidth`, for another number of PS; they come back at `load_bandwidth`.
    """

    change: ChangeMethod
    worker_pause: Seconds = Field(default=0.0, ge=0, description="Standstill of a live change of the workers")
    reshape: Seconds = Field(
        default=0.0, ge=0, description="Standstill of a live change of the PS besides saving and loading"
    )
    move_bandwidth: Quantity | None = Field(
        default=None,
        description="Rows that the busiest PS gives or takes while training goes on; absent: rows are saved and loaded",
    )
    move_slowdown: float = Field(default=0.0, ge=0, le=1, description="Share of training that is lost while rows move")
    save_bandwidth: Quantity = "600M"
    load_bandwidth: Quantity = "150M"
    resize: Seconds | None = Field(
        default=None, ge=0, description="Time to resize running pods in place; absent: new pods replace them"
    )
    checkpoint_interval: Seconds | None = Field(
        default=None,
        gt=0,
        description="Time between checkpoints; absent: as the brain advises, and five minutes until it does",
    )
    checkpoint_pause: Seconds = Field(default=0.0, ge=0, description="Standstill of a checkpoint")
    checkpoint_slowdown: float = Field(
        default=0.0, ge=0, le=1, description="Share of training that is lost while a checkpoint is written beside it"
    )
    detection: Seconds = Field(default=0.0, ge=0, description="Time from a pod's silence to its replacement")
    end_detection: Seconds = Field(
        default=0.0, ge=0, description="Time from the end of a pod's process to the reaction"
    )
    rollback: bool = Field(
        default=True, description="Whether the loss of a PS takes the job back to its last checkpoint"
    )
    dynamic_sharding: bool = Field(
        default=False, description="Whether a slow worker only does less; if not, all workers wait for it"
    )
    straggler_seconds: Seconds | None = Field(
        default=None, ge=0, description="Time until the job works around slow pods; absent: never"
    )
    elastic: bool = Field(
        default=False,
        description="Whether a job trains on without workers that fail or that the cluster takes; else it restarts",
    )
    sees_capacity: bool = Field(
        default=False, description="Whether schedulers hear that capacity changes; else they plan for the whole cluster"
    )
    memory_growth: float = Field(
        default=1.0, ge=1, le=4, description="Factor on the memory of PS that ran out of it, within the job's bounds"
    )
    max_memory_growth: float = Field(
        default=4.0, ge=1, description="The limit of that growth, as a multiple of the first memory"
    )
    restart_backoff: Seconds = Field(
        default=0.0, ge=0, description="Delay before the second restart in a row; doubled for each later one"
    )
    restart_backoff_limit: Seconds = Field(default=300.0, ge=0, description="Maximum delay between restarts")
    restart_backoff_reset: Seconds = Field(
        default=60.0, ge=0, description="Life of a PS after which its restarts count from zero"
    )
    backoff_limit: int = Field(default=6, ge=0, description="Restarts after running out of memory before the job fails")
    sources: Mapping[str, str] = Field(default={}, description="Source of each number, by field")

    @model_validator(mode="after")
    def _sources_name_fields(self) -> Self:
        fields = {to_camel(name) for name in type(self).model_fields} - {"sources"}
        for name in self.sources:
            if name not in fields:
                raise ValueError(f"sources.{name}: there is no such field; there are {', '.join(sorted(fields))}")
        return self
