"""How the records are consumed."""

from typing import Self

from pydantic import Field, model_validator

from emberscale_api.job.duration import Seconds
from emberscale_api.job.schema import ManifestPart


class TrainingSpec(ManifestPart):
    """Asynchronous by default, with a bound on the drift between workers.

    `max_staleness` is how many batches of other workers may be applied between a batch's pull and its push. At 0 a
    worker pulls a batch only when its previous push is applied, and no other worker's push comes between.
    """

    batch_size: int = Field(default=2048, ge=1, le=1 << 20)
    epochs: int = Field(default=1, ge=1, le=10_000)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_staleness: int = Field(default=64, ge=0, le=1 << 20)
    staleness_warmup: int = Field(
        default=96,
        ge=0,
        le=1 << 20,
        description="The bound grows from 0: it is the square root of the batches applied so far over this number",
    )
    prefetch_batches: int = Field(default=2, ge=1, le=64, description="Batches that a worker has read ahead")
    pull_ahead: int = Field(
        default=1, ge=0, le=64, description="Batches whose rows a worker pulls before its earlier ones are pushed"
    )


class ShardingSpec(ManifestPart):
    """Shards are leased to workers; their size, in batches, follows the worker's speed (DLRover-RM section 5.1)."""

    min_batches: int = Field(default=8, ge=1)
    max_batches: int = Field(default=64, ge=1)
    lease_timeout: Seconds = Field(
        default=15.0, gt=0, description="A worker or PS that is silent for this long is given up and replaced"
    )
    heartbeat_interval: Seconds = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_batches > self.max_batches:
            raise ValueError(f"minBatches ({self.min_batches}) must not be above maxBatches ({self.max_batches})")
        if self.heartbeat_interval * 2 > self.lease_timeout:
            raise ValueError(
                f"leaseTimeout ({self.lease_timeout:g}s) must be at least twice "
                f"heartbeatInterval ({self.heartbeat_interval:g}s)"
            )
        return self
