"""`status` of a TrainingJob on a cluster: written by the operator, read by people and the client."""

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from emberscale_api.compatibility import VERSION
from emberscale_api.errors import InvalidError
from emberscale_api.job.schema import ManifestPart

PROGRESS_BINS = 1024
"""Bins of the histograms of predictions that travel with every heartbeat."""

EVALUATION_BINS = 16384
"""Bins of an evaluation shard's histograms: AUC to about 1e-5."""

BINNED_LOGITS = 48.0
"""The logits that the bins of predictions cover, equally, around 0. The float32 next to 1 has the logit 16.6."""

MAX_COUNT = 1 << 53
"""The largest integer that processes report: JSON holds it exactly, and sums of a thousand such stay below 2^64. The
API server takes none of 2^63 or more."""
MAX_QUANTITY = 1e15
"""The largest quantity that processes report, such as seconds, cores or a rate: thirty million years, and finite."""


class JobPhase(StrEnum):
    """The phase of a job. `SUSPENDING`: the checkpoint that it will resume from is being taken."""

    PENDING = "Pending"
    PREPARING = "Preparing"
    RESTORING = "Restoring"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    SAVING = "Saving"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


ENDED = frozenset({JobPhase.COMPLETE, JobPhase.FAILED})
"""Phases that nothing follows."""
RESTING = ENDED | {JobPhase.SUSPENDED}
"""Phases in which no instance is wanted."""


class ConditionType(StrEnum):
    """`PROGRESSING`: nothing blocks the job. `SCALING`: its shape is changing. `SLOW`: a member is much slower than its
    peers. `LOW_MEMORY`: a parameter server is near its memory limit and delays pushes. `FLASH_CHECKPOINT`: flash
    checkpoints are taken. `PROTECTED`: the rows of any parameter server can be rebuilt from parity. The others as in
    batch/v1.
    """

    PROGRESSING = "Progressing"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    SCALING = "Scaling"
    SLOW = "SlowMembers"
    LOW_MEMORY = "LowMemory"
    FLASH_CHECKPOINT = "FlashCheckpoint"
    PROTECTED = "Protected"


class _Status(ManifestPart):
    model_config = ConfigDict(extra="ignore")


_REASON = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
_LONGEST_REASON = 1024


def fitting_reason(reason: str, message: str, otherwise: str) -> tuple[str, str]:
    """A reason that others gave, such as an admission webhook, and its message, as a condition takes them.

    `otherwise` replaces a reason that does not fit, and the message keeps it.
    """
    if len(reason) <= _LONGEST_REASON and re.fullmatch(_REASON, reason) is not None:
        return reason, message
    return otherwise, message if reason in message else f"{reason}: {message}".removesuffix(": ")


class Condition(_Status):
    """As metav1.Condition."""

    type: str = Field(max_length=316)
    status: Literal["True", "False", "Unknown"]
    observed_generation: int = Field(default=0, ge=0)
    last_transition_time: datetime
    reason: str = Field(min_length=1, max_length=_LONGEST_REASON, pattern=_REASON)
    message: str = Field(max_length=32768)


class EvaluationResult(_Status):
    """The result of the evaluation after an epoch, counted from 1.

    `normalizedEntropy` is the log loss relative to that of always predicting the mean label, `calibration` the mean
    prediction relative to the mean label.
    """

    epoch: int
    samples: int
    # None where the labels leave a value undefined; the log loss is in nats
    auc: float | None = None
    logloss: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None


PARITY_STEP = "ChangedParity"
"""The reason of the step that tells that parity is kept from now on, or no longer: under `Auto`, or after partings."""

ROLLED_BACK_STEP = "RolledBack"
"""The reason of the step that tells why a job went back to a checkpoint."""

RECOVERY_STEPS = frozenset(
    {PARITY_STEP, "Degraded", "Recovered", "RecoveredPartially", "Returned", ROLLED_BACK_STEP, "RowsRebuilt"}
)
"""Reasons of steps that tell how the job recovers from the loss of a parameter server, not how its shape changed."""

STARTED_STEP = "StartedFromCheckpoint"
"""The reason of the step that tells from which checkpoint of another job this one started."""


class Rebuilds(_Status):
    """Rebuilds from parity. `count` is how many parameter servers were rebuilt, and `server` the last of them:
    `seconds` after its loss, its successor served its rows again, of so many `bytes`.
    """

    count: int = 0
    server: str = ""
    seconds: float = 0.0
    bytes: int = 0


class CheckpointCost(_Status):
    """What a persistent checkpoint cost: it took `seconds`, for `held_seconds` of which it held pushes, and wrote
    `written_bytes` into its own folder. A restore from it reads `bytes`, of it and of what it builds on.
    """

    checkpoint: str
    seconds: float = 0.0
    held_seconds: float = 0.0
    written_bytes: int = 0
    bytes: int = 0


class HotEmbeddingsProgress(_Status):
    """Whether workers train rounds of batches, and what that saves.

    `message` is the decision with its numbers. `hit_percent` is the share of the rows of batches in rounds that an
    earlier batch of the round had pulled. `saved_bytes` are bytes on the wire, compared with batches one by one.
    """

    message: str = ""
    workers_in_rounds: int = 0
    round_batches: int = 0
    single_batches: int = 0
    hit_percent: str = ""
    saved_bytes: int = 0


class Progress(_Status):
    """The progress of training. `loss` and `auc` are over a recent window; `percent` and `eta` are for people.

    `checkpoints` are the newest persistent ones, oldest first, and `restore_seconds` is how long it would
    take to read the newest at the rate at which they were written; absent until one was measured.

    `pls` is the portion of samples whose effect partial recoveries have lost. `rebuilds` is absent until a server was
    rebuilt from parity, `hot_embeddings` where the manifest disables them. `warnings` are signs that the job may not be
    what the user wanted, each with its remedy.
    """

    samples: int = 0
    expected_samples: int = 0
    percent: str = ""
    samples_per_second: int = 0
    eta: str = ""
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    auc: float | None = None
    evaluations: tuple[EvaluationResult, ...] = ()
    checkpoint: str = ""
    checkpoints: tuple[CheckpointCost, ...] = ()
    restore_seconds: float | None = None
    recoveries: int = 0
    pls: float = 0.0
    rebuilds: Rebuilds | None = None
    hot_embeddings: HotEmbeddingsProgress | None = None
    bad_records: int = 0
    truncated_records: int = 0
    warnings: tuple[str, ...] = ()


class RolePlan(_Status):
    """What the plan in force gives a role; quantities as in `resources`, empty where there is no limit."""

    replicas: int
    cpu: str = ""
    memory: str = ""


class PlanStatus(_Status):
    """The plan in force, and the reason for it.

    `version` is the master's; `brain_version` is that of the brain's plan that it followed last, 0 for none. The
    expected speed is 0 if it is unknown; `scalings` counts changes of shape, `step` is the number of the last step of
    such a change that an Event tells of.
    """

    version: int = 0
    reason: str = ""
    message: str = ""
    brain_version: int = 0
    expected_samples_per_second: int = 0
    scalings: int = 0
    step: int = 0
    ps: RolePlan | None = None
    worker: RolePlan | None = None


class RoleStatus(_Status):
    """Pods of a role; `summary` is ready/wanted. `memory_bytes` is the size after running out of memory."""

    wanted: int = 0
    ready: int = 0
    restarts: int = 0
    summary: str = ""
    memory_bytes: int | None = None


class MemberStatus(_Status):
    """One role and index, over all of its pods.

    `incarnation` counts them; `counted` is the newest whose exit is in `restarts` (exits that were not requested),
    `streak` (consecutive exits) and `faults` (the job's own errors). `not_before` is when the next may start; `reason`
    and `message` say what it waits for or how the last one ended. `cpu` and `memory` are the limits that the pod runs
    with.
    """

    role: str
    index: int
    pod: str = ""
    uid: str = ""
    node: str = ""
    state: str = ""
    reason: str = ""
    message: str = ""
    cpu: str = ""
    memory: str = ""
    incarnation: int = 0
    counted: int = 0
    restarts: int = 0
    streak: int = 0
    faults: int = 0
    not_before: datetime | None = None


class TrainingJobStatus(_Status):
    """The state of the job, as the operator last saw it.

    `active_since` is when the job started, plus the time that it was suspended. `applied_ps` is the number of parameter
    servers that it runs with; while rows move, the larger one. `image` is the image of the operator that created the
    job: all pods of the job use it, unless their template names another.
    """

    phase: JobPhase = JobPhase.PENDING
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    start_time: datetime | None = None
    active_since: datetime | None = None
    completion_time: datetime | None = None
    progress: Progress | None = None
    plan: PlanStatus | None = None
    master: RoleStatus | None = None
    ps: RoleStatus | None = None
    worker: RoleStatus | None = None
    members: Annotated[
        tuple[MemberStatus, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role", "index"]}),
    ] = ()
    applied_ps: int | None = None
    image: str = ""
    selector: str = ""

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of a type, if it was ever told."""
        return next((one for one in self.conditions if one.type == kind), None)


class UnreadableStatusError(InvalidError):
    """A status that another version wrote and this one cannot read; the text says which field."""


def parse_status(document: Mapping[str, Any]) -> TrainingJobStatus:
    """The `status` of a TrainingJob, that of a new job where it is empty. Raises UnreadableStatusError."""
    try:
        return TrainingJobStatus.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in ("status", *first["loc"]))
        raise UnreadableStatusError(f"version {VERSION} cannot read {path} ({first['input']!r})") from error
