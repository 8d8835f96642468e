"""Builds the `status` of a TrainingJob from the known facts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.rounds import decisions_in_words
from emberscale_api.job.running import (
    FlashStatus,
    JobPlan,
    JobStatus,
    ProtectionStatus,
    Sizing,
    SlowMember,
    expected_restore_seconds,
    kept_protection,
)
from emberscale_api.job.status import (
    ENDED,
    RECOVERY_STEPS,
    RESTING,
    STARTED_STEP,
    CheckpointCost,
    Condition,
    ConditionType,
    EvaluationResult,
    HotEmbeddingsProgress,
    JobPhase,
    MemberStatus,
    PlanStatus,
    Progress,
    Rebuilds,
    RolePlan,
    RoleStatus,
    TrainingJobStatus,
)
from emberscale_api.readable import duration_text
from emberscale_operator.kubernetes.names import JOB_LABEL, ROLE_LABEL
from emberscale_operator.kubernetes.record import rounded
from emberscale_operator.kubernetes.spreading import shared_nodes, sharing_text
from emberscale_operator.machine import Demand, JobStanding

FLASH_FAILED = "FlashCheckpointFailed"
"""The reason of the condition FlashCheckpoint while they fail."""

SHARED_NODES = "SharedNodes"
"""The reason of the condition Protected where a node runs more parameter servers of a job than parity covers."""

_UNPROTECTED = "losing a parameter server now rolls the job back"

_LONGEST_SECONDS = 1e9
_CHECKPOINTS_TOLD = 5
_MOST_WARNINGS = 16
"""More warnings than a master has, as a bound: the API server does not store objects that are too large."""


@dataclass(frozen=True)
class Facts:
    """The facts from which a status is built.

    * `standing`: where the job stands; `reason` and `message` are its, or those of what its pods wait for.
    * `demands`: the wanted pods; None if nobody knows them, so that the last known numbers stand.
    * `members`: every member as it is to be written.
    * `now`: seconds since 1970.
    * `ready`: counts the ready pods of each role.
    * `blocked`: reason and message of what a job that does not train waits for.
    * `image`: the operator's, which the job gets if it has none yet.
    * `parity`: how many parameter servers may be lost at a time where the job keeps parity.
    """

    name: str
    generation: int
    standing: JobStanding
    reason: str
    message: str
    demands: Sequence[Demand] | None
    members: tuple[MemberStatus, ...]
    now: float
    ready: Mapping[Role, int] = field(default_factory=dict)
    blocked: tuple[str, str] | None = None
    master: JobStatus | None = None
    plan: JobPlan | None = None
    image: str = ""
    parity: int = 1

    @property
    def phase(self) -> JobPhase:
        """The job's phase."""
        return self.standing.phase


def build_status(before: TrainingJobStatus, facts: Facts) -> TrainingJobStatus:
    """The status that follows `before`; the same one where nothing has changed."""
    ended = facts.phase in ENDED
    started = before.start_time or (None if facts.phase is JobPhase.SUSPENDED else rounded(facts.now))
    plan = _plan(facts) if not ended else before.plan
    return TrainingJobStatus(
        phase=facts.phase,
        reason=facts.reason,
        message=facts.message[:2048],
        observed_generation=facts.generation,
        conditions=_conditions(before.conditions, facts),
        start_time=started,
        active_since=rounded(facts.standing.active_since) if facts.standing.active_since is not None else None,
        completion_time=(before.completion_time or rounded(facts.now)) if ended else None,
        progress=_progress(facts.master, ended) if facts.master is not None else before.progress,
        plan=plan or before.plan,
        master=_role(Role.MASTER, facts, before.master),
        ps=_role(Role.PS, facts, before.ps),
        worker=_role(Role.WORKER, facts, before.worker),
        members=facts.members,
        applied_ps=facts.standing.applied_ps,
        image=before.image or facts.image,
        selector=f"{JOB_LABEL}={facts.name},{ROLE_LABEL}={Role.WORKER}",
    )


def to_document(status: TrainingJobStatus) -> dict[str, Any]:
    """The status to send."""
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    # there may be a thousand: each says only what there is to say
    members = [member.model_dump(mode="json", by_alias=True, exclude_defaults=True) for member in status.members]
    return {**document, "members": members}


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The RFC 7386 patch from one document to the other; empty where they are equal."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[key] = inner
        elif value != old or key not in before:
            patch[key] = value
    return patch


def unknown_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields of both documents, with null for values: a patch from that to `after` sets or clears each."""
    found: dict[str, Any] = {}
    for key in before.keys() | after.keys():
        parts = [part for part in (before.get(key), after.get(key)) if isinstance(part, Mapping)]
        found[key] = (unknown_after(parts[0], parts[-1]) or None) if parts else None
    return found


def dropped_fields(sent: Mapping[str, Any], kept: Mapping[str, Any], path: str = "status") -> set[str]:
    """Returns the fields of a patch that the API server has left out, since an older definition does not know them."""
    dropped: set[str] = set()
    for key, value in sent.items():
        inner, held = f"{path}.{key}", kept.get(key)
        pairs = (
            zip(value, held, strict=False) if isinstance(value, list) and isinstance(held, list) else [(value, held)]
        )
        if value is not None and key not in kept:
            dropped.add(inner)
        for part, whole in pairs:
            if isinstance(part, Mapping) and isinstance(whole, Mapping):
                dropped |= dropped_fields(part, whole, inner)
    return dropped


def without_progress(document: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a status that is written at once; progress may wait a little."""
    return {key: value for key, value in document.items() if key != "progress"}


def unknown_progress(before: Sequence[Mapping[str, Any]], problem: str, now: float) -> list[dict[str, Any]] | None:
    """The conditions of a job that this version cannot read, `before` but for Progressing; None where that says so."""
    said = {
        "type": str(ConditionType.PROGRESSING),
        "status": "Unknown",
        "reason": "UnreadableStatus",
        "message": problem,
    }
    old = next((one for one in before if one["type"] == said["type"]), {})
    if said.items() <= old.items():
        return None
    since = rounded(now).strftime("%Y-%m-%dT%H:%M:%SZ")
    others = [dict(one) for one in before if one["type"] != said["type"]]
    return [{**said, "lastTransitionTime": since, "observedGeneration": old.get("observedGeneration", 0)}, *others]


def _conditions(before: Iterable[Condition], facts: Facts) -> tuple[Condition, ...]:
    conditions = {condition.type: condition for condition in before}

    def put(kind: ConditionType, holds: bool, reason: str, message: str) -> None:
        old = conditions.get(kind)
        status: Literal["True", "False"] = "True" if holds else "False"
        since = old.last_transition_time if old is not None and old.status == status else rounded(facts.now)
        conditions[kind] = Condition(
            type=kind,
            status=status,
            observed_generation=facts.generation,
            last_transition_time=since,
            reason=reason,
            message=message[:2048],
        )

    def end(kind: ConditionType, reason: str, message: str) -> None:
        if kind in conditions:
            put(kind, False, reason, message)

    phase, master = facts.phase, facts.master
    resting = phase in RESTING
    said = (facts.reason or str(phase), facts.message)
    blocked = None if resting else facts.blocked
    put(ConditionType.PROGRESSING, not resting and blocked is None, *(blocked or said))
    if phase in ENDED:
        put(ConditionType(str(phase)), True, *said)
    if phase is JobPhase.SUSPENDED:
        put(ConditionType.SUSPENDED, True, facts.reason or "JobSuspended", facts.message)
    elif phase is not JobPhase.SUSPENDING:
        end(ConditionType.SUSPENDED, "JobResumed", "the job resumes from its last checkpoint")
    sizing = facts.plan.sizing if facts.plan is not None else Sizing()
    changes = [step for step in sizing.steps if step.reason and step.reason not in (*RECOVERY_STEPS, STARTED_STEP)]
    if resting:
        for kind in (ConditionType.SCALING, ConditionType.FLASH_CHECKPOINT, ConditionType.PROTECTED):
            end(kind, str(phase), "the job rests")
    elif changes:
        put(ConditionType.SCALING, sizing.scaling, changes[-1].reason, changes[-1].message)
    members = () if resting or master is None else master.members
    if slow := [_slow_text(one.member, one.slowness) for one in members if one.slowness is not None]:
        put(ConditionType.SLOW, True, "FoundSlowMembers", "; ".join(slow))
    elif resting or master is not None:
        end(ConditionType.SLOW, "NoSlowMembers", "no member is much slower than its peers")
    if full := [one.member.slot for one in members if one.delays_for_memory]:
        message = f"{', '.join(full)}: near the memory limit; pushes are slowed down"
        put(ConditionType.LOW_MEMORY, True, "DelayedPushes", message)
    elif resting or master is not None:
        end(ConditionType.LOW_MEMORY, "EnoughMemory", "no parameter server is near its memory limit")
    if master is not None and not resting:
        if master.flash is not None:
            put(ConditionType.FLASH_CHECKPOINT, *_flash(master.flash))
        else:
            end(ConditionType.FLASH_CHECKPOINT, "NoFlashCheckpoints", "the job takes no flash checkpoints any more")
        if (protection := kept_protection(master)) is not None:
            put(ConditionType.PROTECTED, *_protection(protection, master, facts))
        else:
            problem = master.protection.problem if master.protection is not None else ""
            why = problem or "the job keeps no parity of rows any more"
            end(ConditionType.PROTECTED, "NoParity", f"{why}; {_UNPROTECTED}")
    order = {str(kind): number for number, kind in enumerate(ConditionType)}
    # others may have written conditions of types that this version does not know: they stay, behind its own
    return tuple(sorted(conditions.values(), key=lambda condition: order.get(condition.type, len(order))))


def _slow_text(member: MemberId, slowness: SlowMember) -> str:
    remedy = f", {slowness.remedy}" if slowness.remedy else ""
    return f"{member.slot} is {slowness.factor:g} times slower than its peers{remedy}"


def _protection(protection: ProtectionStatus, status: JobStatus, facts: Facts) -> tuple[bool, str, str]:
    """Whether as many parameter servers as parity covers can be lost without a roll-back, a reason, and a message."""
    if not protection.protected:
        reason = "Rebuilding" if protection.lost else "Unprotected"
        return False, reason, f"{protection.problem}; {_UNPROTECTED}"
    lost = "any one parameter server" if facts.parity == 1 else f"any {facts.parity} parameter servers at once"
    message = f"the rows of {lost} can be rebuilt from parity on the others"
    group = {one.member.index for one in status.members if one.member.role is Role.PS and one.buckets}
    if shared := shared_nodes(group, facts.members, facts.parity):
        return True, SHARED_NODES, f"{message}; {sharing_text(shared)}"
    return True, "Protected", message


def _flash(flash: FlashStatus) -> tuple[bool, str, str]:
    """Whether flash checkpoints are taken, a reason, and a message that changes only with what it is about."""
    every = f"every {duration_text(round(flash.interval_seconds))}"
    if flash.problem:
        return False, FLASH_FAILED, f"{flash.problem}; training continues, and it is tried again"
    if not flash.checkpoint:
        return False, "FlashCheckpointPending", f"none is taken yet; one is taken {every}"
    return True, "FlashCheckpointTaken", f"one is taken {every}"


def _progress(status: JobStatus, ended: bool) -> Progress:
    expected = status.expected_samples
    going = status.eta_seconds >= 0 and not ended and status.phase is JobPhase.TRAINING
    return Progress(
        samples=status.samples,
        expected_samples=expected,
        percent=f"{_percent(status.samples, expected)}%" if expected else "",
        samples_per_second=0 if ended else round(status.samples_per_second),
        eta=duration_text(status.eta_seconds) if going else "",
        epoch=status.epoch + 1,
        epochs=status.epochs,
        loss=_finite(status.loss),
        auc=_finite(status.auc),
        evaluations=tuple(map(_rounded, status.evaluations)),
        checkpoint=status.checkpoint,
        checkpoints=tuple(map(_rounded_cost, status.checkpoints[-_CHECKPOINTS_TOLD:])),
        restore_seconds=_seconds(expected_restore_seconds(status.checkpoints)),
        recoveries=status.recoveries,
        pls=round(status.pls, 6),
        rebuilds=_rebuilds(status.protection),
        hot_embeddings=_hot_embeddings(status),
        bad_records=status.bad_records,
        truncated_records=status.truncated_records,
        warnings=tuple(warning[:1024] for warning in status.warnings[:_MOST_WARNINGS]),
    )


def _rounded_cost(cost: CheckpointCost) -> CheckpointCost:
    return cost.model_copy(update={"seconds": round(cost.seconds, 3), "held_seconds": round(cost.held_seconds, 4)})


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(min(value, _LONGEST_SECONDS), 1)


def _rebuilds(protection: ProtectionStatus | None) -> Rebuilds | None:
    if protection is None or not protection.rebuilds:
        return None
    return Rebuilds(
        count=protection.rebuilds,
        server=protection.rebuilt,
        seconds=round(protection.seconds, 3),
        bytes=protection.bytes,
    )


def _hot_embeddings(status: JobStatus) -> HotEmbeddingsProgress | None:
    traffic, decisions = status.traffic, status.rounds
    if not decisions:
        return None
    return HotEmbeddingsProgress(
        message=decisions_in_words(tuple(decisions.values()))[:1024],
        workers_in_rounds=sum(one.active for one in decisions.values()),
        round_batches=traffic.round_batches,
        single_batches=traffic.single_batches,
        hit_percent=f"{traffic.hit_ratio:.0%}",
        saved_bytes=traffic.saved_bytes,
    )


def _percent(samples: int, expected: int) -> int:
    """Whole percent; 100 only when all is done."""
    return 100 if samples >= expected else min(99, samples * 100 // expected)


def _rounded(result: EvaluationResult) -> EvaluationResult:
    return result.model_copy(
        update={name: _finite(value) for name, value in result if isinstance(value, float)},
    )


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) and value != 0 else None


def _plan(facts: Facts) -> PlanStatus | None:
    if facts.plan is None and not facts.demands:
        return None
    by_role = {demand.role: demand for demand in facts.demands or ()}

    def role(of: Role) -> RolePlan | None:
        demand = by_role.get(of)
        if demand is None:
            return None
        cpu, memory = demand.resources.quantities
        return RolePlan(replicas=demand.replicas, cpu=cpu, memory=memory)

    plan = facts.plan
    sizing = plan.sizing if plan else Sizing()
    return PlanStatus(
        version=plan.version if plan else 0,
        reason=sizing.reason or "Manifest",
        message=(sizing.message or "as the manifest says, until the master is reached")[:2048],
        brain_version=sizing.plan_version,
        expected_samples_per_second=round(sizing.expected_samples_per_second),
        scalings=sizing.scalings,
        step=max((step.number for step in sizing.steps), default=0),
        ps=role(Role.PS),
        worker=role(Role.WORKER),
    )


def _role(role: Role, facts: Facts, before: RoleStatus | None) -> RoleStatus:
    if facts.demands is None:
        wanted = before.wanted if before is not None else 0
    elif facts.phase in RESTING:
        wanted = 0
    else:
        wanted = sum(demand.replicas for demand in facts.demands if demand.role is role)
    ready = facts.ready.get(role, 0)
    return RoleStatus(
        wanted=wanted,
        ready=ready,
        restarts=sum(member.restarts for member in facts.members if member.role == role),
        summary=f"{ready}/{wanted}",
        memory_bytes=facts.standing.grown.get(role),
    )
