"""When a job gives up, and who sizes it."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.duration import Seconds
from emberscale_api.job.schema import ManifestPart


class RunPolicy(ManifestPart):
    """Limits after which the job is Failed."""

    backoff_limit: int = Field(
        default=6, ge=0, le=10_000, description="Restarts after errors of the job's own; more fail it"
    )
    active_deadline: Seconds | None = Field(default=None, gt=0)


class ScalingMode(StrEnum):
    """`Manual`: the sizes in the manifest stand. `Auto`: plans within the roles' bounds are followed."""

    AUTO = "Auto"
    MANUAL = "Manual"


class ScalingSpec(ManifestPart):
    """Who decides on the number of processes and their resources."""

    mode: ScalingMode = ScalingMode.AUTO
