"""When a job fails, who sizes it, how it saves its state, and how it recovers from failures."""

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, memory_bytes

DEFAULT_INTERVAL = 300.0
"""Seconds between checkpoints, unless the manifest or the brain sets another interval."""

AUTO_INTERVAL = "Auto"
"""The interval between checkpoints that the brain advises, as an absent interval."""


LEAST_WRITE_BANDWIDTH = "1Mi"
"""The smallest `writeBandwidth`: servers write rows in files of that size or larger, and report each one."""


class FlashMode(StrEnum):
    """`Auto` and `Enabled` need a Redis for rows; if there is none, only `Enabled` reports that."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class FlashSpec(ManifestPart):
    """Flash checkpoints go to Redis every few seconds, so that losing a parameter server costs seconds of training.

    The default `interval` is 15 seconds, or longer if flash checkpoints would take more than 1% of the training time.
    The parameter servers share `maxBytes` of Redis equally.
    """

    mode: FlashMode = FlashMode.AUTO
    interval: Seconds | None = Field(default=None, gt=0, description="Interval between flash checkpoints")
    max_bytes: Quantity = Field(default="1Gi", description="Most bytes of the job in Redis, over all parameter servers")

    @property
    def bytes_limit(self) -> int:
        """`maxBytes` in bytes."""
        return memory_bytes(self.max_bytes)


class Quantization(StrEnum):
    """How checkpoints store the weights of embedding rows: `None` as float32, a number as that many bits per weight.

    `Auto` takes the fewest bits that are expected to cost at most 0.01% of the accuracy, given the number of restores
    (Check-N-Run section 5.2.1).
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

    `OneShot`: since the first one. `Consecutive`: since the previous one. `Intermittent`: as `OneShot`, but with all
    rows again once that is expected to write less. `Auto` is `Intermittent`. The last checkpoint of a job has all rows.
    """

    FULL = "Full"
    ONE_SHOT = "OneShot"
    CONSECUTIVE = "Consecutive"
    INTERMITTENT = "Intermittent"
    AUTO = "Auto"


def _absent_if_auto(value: object) -> object:
    return None if value == AUTO_INTERVAL else value


_IDENTIFIER = r"^\d{8,}$"


def _identifier(value: object) -> object:
    if isinstance(value, int):
        raise ValueError("must be text in quotes: YAML reads 00000010 as the number 8")
    if isinstance(value, str) and not re.search(_IDENTIFIER, value):
        raise ValueError("must have at least 8 digits, such as '00000007'")
    return value


_FOLDER = r"^([^:/]*(/.*)?|[^/]+://.*)$"
"""No colon in the first name of a path: `s3:/bucket` would be a local folder."""


def _folder(given: str) -> str:
    if re.search(_FOLDER, given) is None:
        scheme, _, rest = given.partition(":")
        raise ValueError(
            f"a URI has '://' after its scheme: write {scheme}://{rest.lstrip('/')}, or ./{given} for a local folder"
        )
    return given


Folder = Annotated[str, Field(min_length=1, json_schema_extra={"pattern": _FOLDER}), AfterValidator(_folder)]


class InitialCheckpointSpec(ManifestPart):
    """A checkpoint of another job; this job starts with its model and optimizer state.

    `data.continuation` says which data the job then trains.
    """

    uri: Folder = Field(description="Folder of the other job's checkpoints: a path or an fsspec URI")
    id: Annotated[str, Field(pattern=_IDENTIFIER), BeforeValidator(_identifier)] | None = Field(
        default=None, description="Id of the checkpoint, such as '00000007'; the newest restorable one if absent"
    )


class CheckpointSpec(ManifestPart):
    """The job saves checkpoints at an interval and at its end; `flash` adds a faster tier in Redis.

    Without a `uri`, `emberscale run` uses a folder of its run. Without an `interval`, or with `Auto`, the brain advises
    one; until then, and without a brain, it is five minutes. `quantization` applies to the checkpoints at the interval;
    the checkpoint at the end of a job, or at its suspension, is exact. `keep` counts checkpoints that can be restored;
    those that they build on stay, too. `writeBandwidth` spares a network and a store that other jobs share; checkpoints
    that a job waits for, at its end or its suspension, are written at full speed. A job starts from `initialFrom` only
    while it has no checkpoint of its own.
    """

    uri: Folder | None = Field(default=None, description="Folder of the checkpoints: a path or an fsspec URI")
    interval: Annotated[Annotated[Seconds, Field(gt=0)] | None, BeforeValidator(_absent_if_auto)] = Field(
        default=None, description="Interval between checkpoints; the one that the brain advises if Auto or absent"
    )
    incremental: IncrementalMode = Field(
        default=IncrementalMode.FULL,
        description="Rows that a checkpoint writes: all (Full), those changed since the first checkpoint (OneShot) "
        "or since the previous one (Consecutive); Intermittent is OneShot, with all rows again once that writes less; "
        "Auto is Intermittent",
    )
    quantization: Annotated[Quantization, BeforeValidator(_as_text)] = Field(
        default=Quantization.NONE, description="Bits per weight in checkpoints at the interval; None keeps float32"
    )
    write_bandwidth: Quantity | None = Field(
        default=None,
        description="Most bytes per second that each parameter server writes to checkpoints at the interval, at least "
        f"{LEAST_WRITE_BANDWIDTH}; no limit if absent",
    )
    keep: int = Field(default=2, ge=1, le=1000, description="Number of restorable checkpoints to keep")
    flash: FlashSpec = FlashSpec()
    initial_from: InitialCheckpointSpec | None = Field(
        default=None, description="Checkpoint of another job to start from; from scratch if absent"
    )

    @property
    def bytes_per_second(self) -> int:
        """`writeBandwidth` in bytes per second; 0 if there is no limit."""
        return 0 if self.write_bandwidth is None else memory_bytes(self.write_bandwidth)

    @field_validator("write_bandwidth")
    @classmethod
    def _enough_for_a_file(cls, bandwidth: str | None) -> str | None:
        if bandwidth is not None and memory_bytes(bandwidth) < memory_bytes(LEAST_WRITE_BANDWIDTH):
            raise ValueError(f"must be at least {LEAST_WRITE_BANDWIDTH} per second; a longer interval writes less, too")
        return bandwidth

    @model_validator(mode="after")
    def _two_folders(self) -> Self:
        initial = self.initial_from
        if initial is not None and self.uri is not None and self.uri.rstrip("/") == initial.uri.rstrip("/"):
            raise ValueError(
                f"initialFrom.uri must differ from uri ({self.uri}): a job resumes from its own checkpoints without "
                "it; remove initialFrom, or give the new job another uri"
            )
        return self


class FaultToleranceStrategy(StrEnum):
    """What happens when a parameter server dies.

    `FullRecovery`: all servers and the ledger roll back to the last checkpoint. `PartialRecovery`: only the rows of the
    lost server roll back; training repeats nothing. `ErasureCoding`: the servers hold parity of each other's rows. If
    at most `parity` servers are lost at a time, the others rebuild the lost rows and nothing rolls back; otherwise all
    roll back, as with `FullRecovery`. `Auto`: the strategy that is expected to cost least.
    """

    AUTO = "Auto"
    FULL_RECOVERY = "FullRecovery"
    PARTIAL_RECOVERY = "PartialRecovery"
    ERASURE_CODING = "ErasureCoding"


class RecoveryPriority(StrEnum):
    """Which rows are saved between checkpoints, so that a partial recovery forgets less of them (CPR section 4.2).

    Seven times between two checkpoints, servers save up to an eighth of the rows of each table. `MFU`: the rows pushed
    most often since they were saved. `SSU`: a random choice of the rows in every second push. `SCAR`: the rows that
    changed most since they were saved, for which a server keeps a copy of all weights.
    """

    NONE = "None"
    MFU = "MFU"
    SSU = "SSU"
    SCAR = "SCAR"


DEFAULT_TARGET_PLS = 0.1
"""The portion of lost samples that CPR section 4.2 calls a rough, conservative choice."""

MOST_PARITY = 2
"""The largest `parity`."""

MOST_STRIPE_WIDTH = 4
"""The most servers whose rows share parity. A push sends its changes to the servers that hold parity of its rows, and
there are as many of them, and with `parity` 2 one more: wider stripes take less memory, and more time for each push."""


class Durability(StrEnum):
    """When a server with parity answers a push.

    `Sync`: once the servers that hold its parity have stored the changes. `Async`: at once; the changes of several
    pushes are stored together, and a lost server's rows lack at most the latest of them.
    """

    SYNC = "Sync"
    ASYNC = "Async"


def can_keep_parity(servers: int, parity: int) -> bool:
    """Whether so many parameter servers can keep this parity of each other's rows."""
    return servers > parity


def stripe_width(servers: int, parity: int, most: int = MOST_STRIPE_WIDTH) -> int:
    """Returns how many of so many parameter servers share the parity of their rows; 0 or less: they can keep none.

    That is `most` of them at most. The parity takes `parity` times the memory of the rows, over this number.
    """
    return min(most, servers - parity)


_MAY_KEEP_PARITY = frozenset({FaultToleranceStrategy.AUTO, FaultToleranceStrategy.ERASURE_CODING})
_LOSE_NOTHING = frozenset({FaultToleranceStrategy.FULL_RECOVERY, FaultToleranceStrategy.ERASURE_CODING})


class FaultToleranceSpec(ManifestPart):
    """`Auto` picks the strategy that is expected to cost least, and PartialRecovery only if `targetPLS` is set.

    With parity, `durability` says when a server answers a push. `Auto` switches parity on or off only when all servers
    load rows: at the start, at a resume, and at a roll-back.

    `targetPLS` bounds the portion of lost samples of the whole job (PLS, CPR equation 3). With partial recovery,
    `priority` saves some rows more often; PLS does not count that.
    """

    strategy: FaultToleranceStrategy = FaultToleranceStrategy.AUTO
    target_pls: float | None = Field(
        default=None,
        gt=0,
        le=1,
        alias="targetPLS",
        description="Bound on the portion of lost samples; with PartialRecovery, 0.1 if absent",
    )

    priority: RecoveryPriority = Field(
        default=RecoveryPriority.NONE,
        description="With partial recovery: rows to save between checkpoints, by frequency (MFU), by a sample of "
        "pushes (SSU) or by change (SCAR)",
    )
    parity: int = Field(
        default=1,
        ge=1,
        le=MOST_PARITY,
        description="With ErasureCoding or Auto: parameter servers that the job may lose at a time without a roll-back",
    )
    durability: Durability = Field(
        default=Durability.SYNC,
        description="With ErasureCoding or Auto: Sync stores the changes of a push as parity before the push is "
        "answered; Async stores them later, for less work, and a lost parameter server forgets its latest pushes",
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
            raise ValueError(f"targetPLS: {self.strategy} loses no sample; remove targetPLS, or choose PartialRecovery")
        if self.priority is not RecoveryPriority.NONE and not self.allowed_pls:
            raise ValueError(
                "priority: Auto loses no sample without targetPLS; remove priority, or set targetPLS, or choose "
                "PartialRecovery"
                if self.strategy is FaultToleranceStrategy.AUTO
                else f"priority: {self.strategy} loses no sample; remove priority, or choose PartialRecovery"
            )
        if self.durability is Durability.ASYNC and self.strategy not in _MAY_KEEP_PARITY:
            raise ValueError(
                f"durability: {self.strategy} keeps no parity; remove durability, or choose ErasureCoding or Auto"
            )
        return self


class CleanPodPolicy(StrEnum):
    """Pods to delete when the job has ended.

    `Running` and `None` delete the pods that still run, and keep those that have ended, with their logs. `All` deletes
    all pods.
    """

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class RunPolicy(ManifestPart):
    """Limits beyond which the job fails, its priority, and what stays after its end.

    `ttlAfterFinished`, `cleanPodPolicy` and `priorityClassName` apply only on clusters.
    """

    backoff_limit: int = Field(
        default=6, ge=0, le=10_000, description="Restarts after the job's own errors before it fails"
    )
    active_deadline: Seconds | None = Field(
        default=None,
        gt=0,
        description="Time that the job may run before it fails, suspension not counted; no limit if absent",
    )
    ttl_after_finished: Seconds | None = Field(
        default=None, ge=0, description="Time from the job's end to the deletion of the TrainingJob; never if absent"
    )
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    priority_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, description="PriorityClass of new pods"
    )


class ScalingMode(StrEnum):
    """`Manual`: the job keeps the sizes in the manifest. `Auto`: it follows the brain's plans within the bounds."""

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
        description="Time that new parameter servers may take to start before the job gives up changing their number, "
        "and that a job without sizes waits for room that other jobs have",
    )
    max_memory_growth: float = Field(
        default=4.0,
        ge=1,
        le=1000,
        description="A role that runs out of memory gets 1.5 times as much, up to this multiple of its first limit",
    )
