"""Saving the state of a job, and using it after a failure."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.duration import Seconds
from emberscale_api.job.schema import ManifestPart

DEFAULT_INTERVAL = 300.0
"""Seconds between checkpoints where nobody says otherwise."""


class CheckpointSpec(ManifestPart):
    """Checkpoints go to any fsspec URI, at an interval and at the end.

    Without a `uri`, `emberscale run` uses a folder of its run. Without an `interval`, it is the one that the brain
    advises where `faultTolerance.strategy` is `Auto`; five minutes until it does, and where there is no brain.
    """

    uri: str | None = None
    interval: Seconds | None = Field(default=None, gt=0)
    keep: int = Field(default=2, ge=1, le=1000, description="Complete checkpoints that are kept")


class FaultToleranceStrategy(StrEnum):
    """`FullRecovery`: when a parameter server dies, all go back to the last checkpoint, and the ledger with them."""

    AUTO = "Auto"
    FULL_RECOVERY = "FullRecovery"


class FaultToleranceSpec(ManifestPart):
    """`Auto` picks the strategy that is expected to cost least."""

    strategy: FaultToleranceStrategy = FaultToleranceStrategy.AUTO
