"""When a job gives up, who sizes it, how its state is saved, and how it recovers from a failure."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, memory_bytes

DEFAULT_INTERVAL = 300.0
"""Seconds between checkpoints, unless the manifest or the brain sets another interval."""


class FlashMode(StrEnum):
    """`Auto` and `Enabled` need a Redis for rows; only `Enabled` reports a missing one."""

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


class Quantization(StrEnum):
    """How the weights of embedding rows are stored in checkpoints: `None` as float32, else in so many bits each.

    `Auto` takes the fewest bits that are expected to cost the job no more than 0.01% of its accuracy, by the number of
    its restores (Check-N-Run section 5.2.1).
    """

    NONE = "None"
    BITS_8 = "8"
    BITS_4 = "4"
    BITS_3 = "3"
    BITS_2 = "2"
    AUTO = "Auto"


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class IncrementalMode(StrEnum):
    """What a checkpoint writes (Check-N-Run section 4.1): all rows, or what changed since an earlier checkpoint.

    `OneShot`: since the first one. `Consecutive`: since the one before. `Intermittent`: as OneShot, but all rows again
    once that is expected to write less. `Auto` is `Intermittent`. The last checkpoint of a job has all rows.
    """

    FULL = "Full"
    ONE_SHOT = "OneShot"
    CONSECUTIVE = "Consecutive"
    INTERMITTENT = "Intermittent"
    AUTO = "Auto"


def _quoted(value: object) -> object:
    if isinstance(value, int):
        raise ValueError("must be text in quotes: YAML reads 00000010 as the number 8")
    return value


class InitialCheckpointSpec(ManifestPart):
    """A checkpoint of another job: the new one starts with its model and optimizer state.

    Without an `id`, it is the newest that can be restored. `data.continuation` says what is trained then.
    """

    uri: str = Field(min_length=1, description="Folder of the other job's checkpoints: a path or an fsspec URI")
    id: Annotated[str, Field(pattern=r"^\d{8,}$"), BeforeValidator(_quoted)] | None = Field(
        default=None, description="One of them, such as '00000007'; the newest if absent"
    )


class CheckpointSpec(ManifestPart):
    """Checkpoints go to any fsspec URI, at an interval and at the end; `flash` adds a faster tier in Redis.

    Without a `uri`, `emberscale run` uses a folder of its run. Without an `interval`, the brain advises one if
    `faultTolerance.strategy` is `Auto`; until then, and without a brain, it is five minutes. `quantization` is for the
    checkpoints taken at the interval; the one at the end of a job, or of a suspended one, is exact. `keep` counts
    checkpoints that can be restored; those that they build on stay, too. A job that has checkpoints of its own
    continues from these; it starts from `initialFrom` while it has none.
    """

    uri: str | None = Field(default=None, description="Folder of the checkpoints: a path or an fsspec URI")
    interval: Seconds | None = Field(default=None, gt=0, description="Interval between checkpoints")
    incremental: IncrementalMode = Field(
        default=IncrementalMode.FULL, description="Whether checkpoints have all rows, or build on earlier ones"
    )
    quantization: Annotated[Quantization, BeforeValidator(_as_text)] = Field(
        default=Quantization.NONE, description="Bits of a weight in checkpoints taken at the interval"
    )
    keep: int = Field(default=2, ge=1, le=1000, description="Number of complete checkpoints to keep")
    flash: FlashSpec = FlashSpec()
    initial_from: InitialCheckpointSpec | None = Field(
        default=None, description="Checkpoint of another job to start from; from nothing if absent"
    )

    @model_validator(mode="after")
    def _two_folders(self) -> Self:
        initial = self.initial_from
        if initial is not None and self.uri is not None and self.uri.rstrip("/") == initial.uri.rstrip("/"):
            raise ValueError(
                f"initialFrom.uri is uri ({self.uri}): a job continues from its own checkpoints by itself; leave it "
                "out, or give a new job another uri"
            )
        return self


class FaultToleranceStrategy(StrEnum):
    """`FullRecovery`: when a parameter server dies, all servers and the ledger go back to the last checkpoint.

    `PartialRecovery`: only the rows of the server that died go back; training does not repeat anything.
    `ErasureCoding`: the servers hold parity of each other's rows. When as many as `parity` die, the others rebuild
    their rows for their successors and nothing goes back; with more at a time, it is as with `FullRecovery`.
    """

    AUTO = "Auto"
    FULL_RECOVERY = "FullRecovery"
    PARTIAL_RECOVERY = "PartialRecovery"
    ERASURE_CODING = "ErasureCoding"


class RecoveryPriority(StrEnum):
    """Which rows are saved between checkpoints, so that a partial recovery forgets less of them (CPR section 4.2).

    Every eighth of the interval between checkpoints, up to an eighth of the rows of each table is saved. `MFU`: those
    pushed most often since they were saved. `SSU`: some of those that every second push had. `SCAR`: those that changed
    most since they were saved, for which a server keeps a copy of all weights.
    """

    NONE = "None"
    MFU = "MFU"
    SSU = "SSU"
    SCAR = "SCAR"


DEFAULT_TARGET_PLS = 0.1
"""The portion of lost samples that CPR section 4.2 calls a rough, conservative choice."""

MOST_PARITY = 2
"""The largest `parity`."""

MOST_CODED_SERVERS = 257
"""With `parity: 2`: 255 rows of a stripe, which the code tells apart, and its two parity blocks."""


def takes_parity(servers: int, parity: int) -> bool:
    """Whether the rows of so many parameter servers can have parity that covers any `parity` of them."""
    return servers > parity and (parity < MOST_PARITY or servers <= MOST_CODED_SERVERS)


_LOSE_NOTHING = frozenset({FaultToleranceStrategy.FULL_RECOVERY, FaultToleranceStrategy.ERASURE_CODING})


class FaultToleranceSpec(ManifestPart):
    """`Auto` picks the strategy that is expected to cost least, and none that loses updates unless `targetPLS` is set.

    `ErasureCoding` takes `parity`: a push is answered once the servers that hold its parity have stored its changes.
    `Auto` takes parity up, or gives it up, when all servers load rows: at the start, at a resume, and at a roll-back.

    `targetPLS` bounds the portion of lost samples of the whole job (PLS, CPR equation 3). `priority` saves some rows
    more often where partial recovery is chosen; PLS counts them as all others.
    """

    strategy: FaultToleranceStrategy = FaultToleranceStrategy.AUTO
    target_pls: float | None = Field(
        default=None,
        gt=0,
        le=1,
        alias="targetPLS",
        description="Portion of samples whose effect partial recoveries may lose; 0.1 if PartialRecovery is chosen",
    )

    priority: RecoveryPriority = Field(
        default=RecoveryPriority.NONE, description="With partial recovery: rows that are saved between checkpoints"
    )
    parity: int = Field(
        default=1, ge=1, le=MOST_PARITY, description="With ErasureCoding, or Auto: servers that may be lost at a time"
    )

    @property
    def allowed_pls(self) -> float:
        """The portion of lost samples that the job may reach: 0 where nothing allows partial recovery."""
        if self.strategy in _LOSE_NOTHING:
            return 0.0
        by_strategy = DEFAULT_TARGET_PLS if self.strategy is FaultToleranceStrategy.PARTIAL_RECOVERY else 0.0
        return by_strategy if self.target_pls is None else self.target_pls

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strategy in _LOSE_NOTHING and self.target_pls is not None:
            raise ValueError(f"targetPLS: {self.strategy} loses no sample; leave it out, or choose PartialRecovery")
        if self.priority is not RecoveryPriority.NONE and not self.allowed_pls:
            raise ValueError(
                f"priority: {self.strategy} loses no sample; leave it out, or choose PartialRecovery or a targetPLS"
                if self.strategy is FaultToleranceStrategy.AUTO
                else f"priority: {self.strategy} loses no sample; leave it out, or choose PartialRecovery"
            )
        return self


class CleanPodPolicy(StrEnum):
    """Pods to remove when the job has ended: running ones, all, or only those that would never end."""

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
