"""When a job gives up, and who sizes it."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.duration import Seconds
from emberscale_api.job.schema import ManifestPart


class CleanPodPolicy(StrEnum):
    """Which pods go when the job has ended: those that still run, all, or none but those that would run for ever."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class RunPolicy(ManifestPart):
    """Limits after which the job is Failed, its rank among others, and what stays when it has ended.

    The last three concern clusters only.
    """

    backoff_limit: int = Field(
        default=6, ge=0, le=10_000, description="Restarts after errors of the job's own; more fail it"
    )
    active_deadline: Seconds | None = Field(default=None, gt=0)
    ttl_after_finished: Seconds | None = Field(
        default=None, ge=0, description="The TrainingJob is deleted so long after its end; absent keeps it"
    )
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    priority_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, description="Of pods that are created from now on"
    )


class ScalingMode(StrEnum):
    """`Manual`: the sizes in the manifest stand. `Auto`: plans within the roles' bounds are followed."""

    AUTO = "Auto"
    MANUAL = "Manual"


class ScalingSpec(ManifestPart):
    """Who decides on the number of processes and their resources."""

    mode: ScalingMode = ScalingMode.AUTO
    profile_interval: Seconds = Field(default=15.0, gt=0, description="How often the brain is told of the job")
    cooldown: Seconds = Field(default=60.0, ge=0, description="At least so long between two changes of a job's shape")
    max_memory_growth: float = Field(
        default=4.0,
        ge=1,
        le=1000,
        description="A role that runs out of memory gets half as much again, up to so many times what it began with",
    )
