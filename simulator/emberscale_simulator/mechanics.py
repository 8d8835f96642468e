"""What the system under a scheduler can do, apart from what the scheduler decides.

A scenario names one or more sets of mechanics, and each scheduler runs on one of them: schedulers on the same set are
compared by their decisions alone. A number that describes Emberscale is one that Emberscale has today, and the scenario
says under `sources` where it comes from; a feature that changes a mechanism changes its number.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from emberscale_api.job.duration import Seconds
from emberscale_api.job.quantity import Quantity
from emberscale_api.job.schema import ManifestPart


class ChangeMethod(StrEnum):
    """How a running job gets another shape."""

    STOP_AND_RESTART = "StopAndRestart"
    """Save, stop, start every pod anew, load."""
    LIVE = "Live"
    """New pods start while the old ones train; the job stands still only to switch."""


class Mechanics(ManifestPart):
    """One set of mechanics. Bandwidths are bytes/s of one parameter server (PS), times are seconds.

    The largest PS decides how long all wait: its tables take `save_bandwidth` where rows leave for another number of PS
    or a restart, and `load_bandwidth` where they come back.
    """

    change: ChangeMethod
    worker_pause: Seconds = Field(default=0.0, ge=0, description="Standstill of a live change of the workers")
    reshape: Seconds = Field(
        default=0.0, ge=0, description="Standstill of a live change of the PS besides saving and loading"
    )
    save_bandwidth: Quantity = "600M"
    load_bandwidth: Quantity = "150M"
    resize: Seconds | None = Field(
        default=None, ge=0, description="Until running pods have other cores or memory; absent: others replace them"
    )
    checkpoint_interval: Seconds = Field(default=300.0, gt=0)
    checkpoint_pause: Seconds = Field(default=0.0, ge=0, description="Standstill of a checkpoint")
    detection: Seconds = Field(default=0.0, ge=0, description="From the loss of a PS until the job acts on it")
    rollback: bool = Field(
        default=True, description="Whether the loss of a PS takes the job back to its last checkpoint"
    )
    dynamic_sharding: bool = Field(
        default=False, description="Whether a slow worker only does less; else all wait for it"
    )
    straggler_seconds: Seconds | None = Field(
        default=None, ge=0, description="Until slow pods are worked around; absent: never"
    )
    elastic: bool = Field(
        default=False, description="Whether a job trains on without workers that the cluster takes; else it restarts"
    )
    sees_capacity: bool = Field(
        default=False, description="Whether schedulers hear that capacity changes; else they plan for the whole cluster"
    )
    memory_growth: float = Field(
        default=1.0, ge=1, le=4, description="Factor on the memory of PS that ran out of it, within the job's bounds"
    )
    backoff_limit: int = Field(default=6, ge=0, description="Restarts after running out of memory; more fail the job")
    sources: Mapping[str, str] = Field(default={}, description="Where each number comes from, by its field's name")

    @model_validator(mode="after")
    def _sources_name_fields(self) -> Self:
        fields = {to_camel(name) for name in type(self).model_fields} - {"sources"}
        for name in self.sources:
            if name not in fields:
                raise ValueError(f"sources.{name}: there is no such field; there are {', '.join(sorted(fields))}")
        return self
