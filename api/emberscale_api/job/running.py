"""A running job as its master reports it: the plan, and the status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import EvaluationResult, JobPhase
from emberscale_api.shape import RoleShape


@dataclass(frozen=True)
class ScalingStep:
    """A completed step of a change of shape.

    `number` ascends over the life of the job; `reason` is CamelCase; `seconds` says how long it took, 0 for what takes
    no time.
    """

    number: int
    reason: str = ""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Sizing:
    """Who chose the numbers and the resources of processes, and why.

    * `reason`: CamelCase; Manifest, WaitingForPlan, NoPlan, or the action of the brain's plan.
    * `plan_version`: of the brain's plan; 0: none was followed. `since`: of the last change, seconds since 1970.
    * `expected_samples_per_second`: 0 while it is not known.
    * `scalings`: changes of shape so far. `steps`: the last steps of them, oldest first. `scaling`: one is under way.
    """

    reason: str = ""
    message: str = ""
    plan_version: int = 0
    expected_samples_per_second: float = 0.0
    since: float = 0.0
    scalings: int = 0
    steps: tuple[ScalingStep, ...] = ()
    scaling: bool = False


@dataclass(frozen=True)
class SlowMember:
    """How many times as long as the median of its peers a member takes for the same work, and for how many seconds.

    `remedy` is what is done about it, as the end of a sentence.
    """

    factor: float
    seconds: float = 0.0
    remedy: str = ""


@dataclass(frozen=True)
class MemberNow:
    """A member of a running job.

    * `slowness`: None unless it is clearly slower than its peers, and has been for seconds.
    * `buckets`: how many a parameter server owns. `delays_for_memory`: its pushes wait, as it is near its limit.
    """

    member: MemberId
    alive: bool = False
    peak_memory_bytes: int = 0
    metrics_address: str = ""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    slowness: SlowMember | None = None
    buckets: int = 0
    delays_for_memory: bool = False


@dataclass(frozen=True)
class FlashStatus:
    """The flash checkpoints of a job.

    * `checkpoint`: the id of the newest; empty: there is none. `interval_seconds`: until the next.
    * `seconds`: that it took. `held_seconds`: for which it held pushes.
    * `written_bytes`: that it added. `bytes`: of it and of what it builds on.
    * `problem`: why there is no newer one; empty: nothing is wrong.
    """

    checkpoint: str = ""
    seconds: float = 0.0
    held_seconds: float = 0.0
    written_bytes: int = 0
    bytes: int = 0
    interval_seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class ProtectionStatus:
    """Whether the rows of any parameter server can be rebuilt from parity.

    * `problem`: why they cannot; empty: nothing is wrong. `lost`: the server whose rows are being rebuilt; empty: none.
    * `rebuilds`: so far. `rebuilt`: the last server; `seconds` after its loss, its successor had all its `bytes`.
    """

    protected: bool = False
    problem: str = ""
    lost: str = ""
    rebuilds: int = 0
    seconds: float = 0.0
    bytes: int = 0
    rebuilt: str = ""


@dataclass(frozen=True)
class CheckpointCost:
    """What a persistent checkpoint cost.

    * `seconds`: that it took. `held_seconds`: for which it held pushes.
    * `written_bytes`: in its own folder. `bytes`: of it and of what it builds on, which a restore reads.
    """

    checkpoint: str
    seconds: float
    held_seconds: float
    written_bytes: int
    bytes: int


@dataclass(frozen=True)
class Forgotten:
    """What one partial recovery lost.

    * `servers`: who was lost, by index. `checkpoint`: the id of the one that their rows were reloaded from.
    * `samples`: whose effect on these rows is lost. `share`: of all rows, 0 to 1.
    * `batches`: [start, stop) ranges of them by epoch.
    * `pls`: what this adds to the portion of lost samples. `priority_saves`: that were loaded over the checkpoint.
    """

    servers: tuple[int, ...]
    checkpoint: str
    samples: int
    share: float
    pls: float
    batches: Mapping[int, tuple[tuple[int, int], ...]]
    priority_saves: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that workers exchanged with parameter servers, with headers, and their rounds.

    `round_bytes` are those of keys and rows of rounds, `single_bytes` what their batches would have taken one by one.
    """

    bytes: int = 0
    rounds: int = 0
    round_batches: int = 0
    round_bytes: int = 0
    single_bytes: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """Both together."""
        return Traffic(
            self.bytes + other.bytes,
            self.rounds + other.rounds,
            self.round_batches + other.round_batches,
            self.round_bytes + other.round_bytes,
            self.single_bytes + other.single_bytes,
        )


@dataclass(frozen=True)
class AdmissionCounts:
    """What became of keys and rows of a table since its store was made.

    * `admitted`: keys that got a row, in a table with admission.
    * `refused`: pushes that were only counted.
    * `evicted`: rows that were removed because of `eviction`.
    """

    admitted: int = 0
    refused: int = 0
    evicted: int = 0

    def plus(self, other: "AdmissionCounts") -> "AdmissionCounts":
        """Both together."""
        return AdmissionCounts(
            self.admitted + other.admitted, self.refused + other.refused, self.evicted + other.evicted
        )

    def continues(self, earlier: "AdmissionCounts") -> bool:
        """Whether these counts can be those of the same table, later."""
        return self.admitted >= earlier.admitted and self.refused >= earlier.refused and self.evicted >= earlier.evicted


@dataclass(frozen=True)
class JobStatus:
    """How far a job is.

    * `phase`: None where this version does not know it. `reason` is CamelCase, `message` a sentence.
    * `epoch` counts from 0; `samples` are committed, over all epochs. `expected_samples`: 0 until the data is indexed.
    * `samples_per_second`, `loss`, `auc`: over a recent window. `eta_seconds`: negative while it is not known.
    * `evaluated_samples`: of the evaluation under way. `training_seconds`: time spent in Training.
    * `checkpoint`: the id of the last complete one. `checkpoints`: what the newest cost, oldest first.
    * `flash`: None where the job has no flash checkpoints. `protection`: None where it keeps no parity.
    * `recoveries`: roll-backs to a checkpoint. `pls`: portion of lost samples. `forgotten`: oldest first.
    * `warnings`: signs of a mistake in the job, each with what to do.
    """

    phase: JobPhase | None = None
    reason: str = ""
    message: str = ""
    epoch: int = 0
    epochs: int = 0
    samples: int = 0
    expected_samples: int = 0
    samples_per_second: float = 0.0
    loss: float = 0.0
    auc: float = 0.0
    eta_seconds: float = 0.0
    evaluations: tuple[EvaluationResult, ...] = ()
    evaluated_samples: int = 0
    members: tuple[MemberNow, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    admission: Mapping[str, AdmissionCounts] = field(default_factory=dict)
    bad_records: int = 0
    bad_record_samples: tuple[BadRecord, ...] = ()
    truncated_records: int = 0
    checkpoint: str = ""
    checkpoints: tuple[CheckpointCost, ...] = ()
    flash: FlashStatus | None = None
    protection: ProtectionStatus | None = None
    recoveries: int = 0
    pls: float = 0.0
    forgotten: tuple[Forgotten, ...] = ()
    training_seconds: float = 0.0
    sizing: Sizing = Sizing()
    traffic: Traffic = Traffic()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """What the manifest says now: numbers of processes, 0 where it leaves one open.

    `waits` says what keeps the first new parameter server from starting; empty: nothing.
    """

    ps: int
    workers: int
    waits: str = ""


@dataclass(frozen=True)
class JobPlan:
    """The processes that a master wants.

    * `phase`: one in which the job rests: no process is wanted any more. `final`: what the job came to, then.
    * `silent`: incarnations that the master has given up because they are silent.
    * `asked`: what the master has heard last of the manifest; None from one that does not follow edits.
    * `routed_ps`: servers in the routing table, or that have joined to take rows over; 0: none yet.
    """

    version: int = 0
    reason: str = ""
    message: str = ""
    shapes: Mapping[Role, RoleShape] = field(default_factory=dict)
    phase: JobPhase | None = None
    sizing: Sizing = Sizing()
    silent: tuple[MemberId, ...] = ()
    final: JobStatus | None = None
    asked: Scale | None = None
    routed_ps: int = 0
