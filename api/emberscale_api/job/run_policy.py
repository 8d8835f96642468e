"""When a job gives up, who sizes it, how its state is saved, and how it recovers from a failure."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, memory_bytes

DEFAULT_INTERVAL = 300.0
"""Seconds between checkpoints, unless the manifest or the brain sets another interval."""


class FlashMode(StrEnum):
    """`Auto` and `Enabled` need a Redis for rows; only `Enabled` reports that there is none."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class FlashSpec(ManifestPart):
    """Flash checkpoints go to Redis every few seconds, so that a lost parameter server costs seconds of training.

    Without an `interval`, it is 15 seconds, or as many more as keep the cost of a flash checkpoint below 1% of the
    training time. Together they take at most `maxBytes` in Redis, shared equally between the parameter servers.
    """

    mode: FlashMode = FlashMode.AUTO
    interval: Seconds | None = Field(default=None, gt=0, description="Interval between flash checkpoints")
    max_bytes: Quantity = Field(default="1Gi", description="Bytes of one job in Redis, over all servers")

    @property
    def bytes_limit(self) -> int:
        """`maxBytes` in bytes."""
        return memory_bytes(self.max_bytes)


class CheckpointSpec(ManifestPart):
    """Checkpoints go to any fsspec URI, at an interval and at the end; `flash` adds a faster tier in Redis.

    Without a `uri`, `emberscale run` uses a folder of its run. Without an `interval`, the brain advises one if
    `faultTolerance.strategy` is `Auto`; until then, and without a brain, it is five minutes.
    """

    uri: str | None = Field(default=None, description="Folder of the checkpoints: a path or an fsspec URI")
    interval: Seconds | None = Field(default=None, gt=0, description="Interval between checkpoints")
    keep: int = Field(default=2, ge=1, le=1000, description="Number of complete checkpoints to keep")
    flash: FlashSpec = FlashSpec()


class FaultToleranceStrategy(StrEnum):
    """`FullRecovery`: when a parameter server dies, all servers and the ledger go back to the last checkpoint."""

    AUTO = "Auto"
    FULL_RECOVERY = "FullRecovery"


class FaultToleranceSpec(ManifestPart):
    """`Auto` picks the strategy that is expected to cost least."""

    strategy: FaultToleranceStrategy = FaultToleranceStrategy.AUTO


class CleanPodPolicy(StrEnum):
    """Pods to remove when the job has ended: those that still run, all, or only those that would never end."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class RunPolicy(ManifestPart):
    """Limits beyond which the job fails, its priority, and what stays after its end.

    The last three apply only on clusters.
    """

    backoff_limit: int = Field(
        default=6, ge=0, le=10_000, description="Restarts after the job's own errors before it fails"
    )
    active_deadline: Seconds | None = Field(
        default=None, gt=0, description="Time that the job may run before it fails; no limit if absent"
    )
    ttl_after_finished: Seconds | None = Field(
        default=None, ge=0, description="Time from the job's end to the deletion of the TrainingJob; never if absent"
    )
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    priority_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, description="PriorityClass of new pods"
    )


class ScalingMode(StrEnum):
    """`Manual`: the sizes in the manifest are used. `Auto`: plans within the roles' bounds are followed."""

    AUTO = "Auto"
    MANUAL = "Manual"


class ScalingSpec(ManifestPart):
    """Who decides on the number of processes and their resources."""

    mode: ScalingMode = ScalingMode.AUTO
    profile_interval: Seconds = Field(default=15.0, gt=0, description="Interval between profiles sent to the brain")
    cooldown: Seconds = Field(default=60.0, ge=0, description="Minimum time between two changes of the job's shape")
    timeout: Seconds = Field(
        default=600.0,
        gt=0,
        description="Time that new parameter servers may take to start before the change of their number is given up",
    )
    max_memory_growth: float = Field(
        default=4.0,
        ge=1,
        le=1000,
        description="A role that runs out of memory gets 1.5 times as much, up to this multiple of its first limit",
    )
