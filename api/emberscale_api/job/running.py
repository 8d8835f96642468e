"""A running job as its master reports it: the plan, and the status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.status import MAX_COUNT, CheckpointCost, EvaluationResult, JobPhase
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

    * `reason`: CamelCase; Manifest, WaitingForPlan, WaitingForRoom, NoPlan, or the action of the brain's plan.
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
    * `rounds`: a worker's decision on rounds; None if the manifest disables them, or before the first report.
    """

    member: MemberId
    alive: bool = False
    peak_memory_bytes: int = 0
    metrics_address: str = ""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    slowness: SlowMember | None = None
    buckets: int = 0
    delays_for_memory: bool = False
    rounds: RoundsDecision | None = None


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
    """Whether the rows of any parameter server can be rebuilt from parity, and what was rebuilt.

    * `problem`: why they cannot; empty: nothing is wrong. `lost`: the server whose rows are being rebuilt; empty: none.
    * `rebuilds`: so far. `rebuilt`: the last server; `seconds` after its loss, its successor had all its `bytes`.
    * `given_up`: no parity is kept any more; the figures of rebuilds stay.
    """

    protected: bool = False
    problem: str = ""
    lost: str = ""
    rebuilds: int = 0
    seconds: float = 0.0
    bytes: int = 0
    rebuilt: str = ""
    given_up: bool = False


def expected_restore_seconds(costs: Sequence[CheckpointCost]) -> float | None:
    """Returns the seconds in which the newest of these checkpoints is read, at the rate at which they were written.

    Returns None if nothing was measured. A restore may be faster or slower than that, as reads of a store differ from
    writes.
    """
    written, seconds = sum(cost.written_bytes for cost in costs), sum(cost.seconds for cost in costs)
    return costs[-1].bytes * seconds / written if written and seconds > 0 else None


@dataclass(frozen=True)
class Forgotten:
    """What one recovery lost.

    * `servers`: who was lost, by index. `checkpoint`: the id of the one that their rows were reloaded from; empty: they
      were rebuilt from parity that lagged.
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
    """Bytes that workers exchanged with parameter servers, with headers, their `batches`, and their rounds.

    `round_bytes` are those of keys and rows of rounds, `single_bytes` what their batches would have taken one by one.
    `round_rows` are distinct rows of rounds, `single_rows` those that their batches would have pulled one by one.
    """

    bytes: int = 0
    rounds: int = 0
    round_batches: int = 0
    round_bytes: int = 0
    single_bytes: int = 0
    batches: int = 0
    round_rows: int = 0
    single_rows: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """Returns the sums of both, each at most MAX_COUNT."""
        return Traffic(**_totals(self, other))

    @property
    def hit_ratio(self) -> float:
        """The share of the rows of batches in rounds that an earlier batch of the round had brought, 0 to 1."""
        return 1 - self.round_rows / self.single_rows if self.single_rows else 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes on the wire that rounds saved; negative if they took more."""
        return self.single_bytes - self.round_bytes

    @property
    def single_batches(self) -> int:
        """Batches that were trained one by one."""
        return max(0, self.batches - self.round_batches)


@dataclass(frozen=True)
class AdmissionCounts:
    """What became of keys and rows of a table. What a roll-back has undone still counts.

    * `admitted`: keys that got a row, in a table with admission.
    * `refused`: pushes that were only counted.
    * `evicted`: rows that were removed because of `eviction`.
    """

    admitted: int = 0
    refused: int = 0
    evicted: int = 0

    def plus(self, other: "AdmissionCounts") -> "AdmissionCounts":
        """Returns the sums of both, each at most MAX_COUNT."""
        return AdmissionCounts(**_totals(self, other))


def _totals(one: object, other: object) -> dict[str, int]:
    """The sums of the fields of two records of counts, each at most MAX_COUNT, which messages and JSON hold exactly."""
    return {name: min(value + getattr(other, name), MAX_COUNT) for name, value in vars(one).items()}


def total_admission(
    one: Mapping[str, AdmissionCounts], other: Mapping[str, AdmissionCounts]
) -> Mapping[str, AdmissionCounts]:
    """The counts of both, by table."""
    none = AdmissionCounts()
    return {table: one.get(table, none).plus(other.get(table, none)) for table in one.keys() | other.keys()}


@dataclass(frozen=True)
class JobStatus:
    """How far a job is.

    * `phase`: None where this version does not know it. `reason` is CamelCase, `message` a sentence.
    * `epoch` counts from 0; `samples` are committed, over all epochs. `expected_samples`: 0 until the data is indexed.
    * `samples_per_second`, `loss`, `auc`: over a recent window. `eta_seconds`: negative while it is not known.
    * `evaluated_samples`: of the evaluation under way. `training_seconds`: time spent in Training.
    * `checkpoint`: the id of the last complete one. `checkpoints`: what the newest cost, oldest first.
    * `flash`: None where the job has no flash checkpoints. `protection`: None where it keeps no parity, and there
      is nothing to tell of it.
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

    @property
    def rounds(self) -> Mapping[str, RoundsDecision]:
        """Each worker's decision on rounds, by its slot; empty if the manifest disables them."""
        return {one.member.slot: one.rounds for one in self.members if one.rounds is not None}


def kept_protection(status: JobStatus) -> ProtectionStatus | None:
    """Returns the protection of a job that keeps parity now; None if it keeps none."""
    told = status.protection
    return None if told is None or told.given_up else told


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
    * `silent`: incarnations that the master has given up, because they are silent or to have them replaced.
    * `drained`: servers that have given all their rows away, so that their end is no failure.
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
    drained: tuple[MemberId, ...] = ()
    final: JobStatus | None = None
    asked: Scale | None = None
    routed_ps: int = 0
