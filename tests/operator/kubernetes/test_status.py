"""The status of a job, as people read it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.running import (
    FlashStatus,
    JobPlan,
    JobStatus,
    MemberNow,
    ProtectionStatus,
    ScalingStep,
    Sizing,
    SlowMember,
    Traffic,
)
from emberscale_api.job.status import (
    CheckpointCost,
    ConditionType,
    HotEmbeddingsProgress,
    JobPhase,
    MemberStatus,
    Rebuilds,
    TrainingJobStatus,
)
from emberscale_api.shape import RoleShape
from emberscale_operator.kubernetes.job import read_job
from emberscale_operator.kubernetes.observation import plan_of
from emberscale_operator.kubernetes.record import rounded, standing_of
from emberscale_operator.kubernetes.status import Facts, build_status, merge_patch, to_document, unknown_after
from emberscale_operator.kubernetes.stories import tell_condition, tell_flash, tell_phase, tell_steps
from emberscale_operator.machine import Demand, JobStanding, Resources, demands_of
from emberscale_operator.machine.intent import grown_memory, replicas_of
from eventually import unwrap
from training_jobs import job_body

NOW = 1_767_225_600.0


def facts(phase: JobPhase, now: float = NOW, **more: Any) -> Facts:
    demands = (Demand(Role.WORKER, 2),)
    return Facts(
        name="ctr",
        generation=3,
        standing=JobStanding(phase),
        reason=str(phase),
        message="",
        demands=demands,
        members=(),
        now=now,
        **more,
    )


def conditions(status: TrainingJobStatus) -> dict[str, str]:
    return {condition.type: condition.status for condition in status.conditions}


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = build_status(TrainingJobStatus(), facts(JobPhase.PENDING))
    second = build_status(first, facts(JobPhase.TRAINING, NOW + 10))
    third = build_status(second, facts(JobPhase.COMPLETE, NOW + 20))
    assert second.conditions[0].last_transition_time == first.conditions[0].last_transition_time
    assert third.conditions[0].last_transition_time > second.conditions[0].last_transition_time
    assert conditions(third) == {"Progressing": "False", "Complete": "True"}
    assert third.completion_time is not None
    assert build_status(third, facts(JobPhase.COMPLETE, NOW + 99)).completion_time == third.completion_time


def test_a_condition_of_a_newer_version_stays() -> None:
    first = build_status(TrainingJobStatus(), facts(JobPhase.PENDING))
    foreign = first.conditions[0].model_copy(update={"type": "Audited"})
    before = first.model_copy(update={"conditions": (foreign, *first.conditions)})
    assert [one.type for one in build_status(before, facts(JobPhase.COMPLETE)).conditions] == [
        "Progressing",
        "Complete",
        "Audited",
    ]


def test_a_suspended_job_rests_since_its_suspension_whatever_others_told_since() -> None:
    suspended = build_status(TrainingJobStatus(), facts(JobPhase.SUSPENDED))
    foreign = suspended.conditions[0].model_copy(update={"type": "Quota", "last_transition_time": rounded(NOW + 60.0)})
    told = suspended.model_copy(update={"conditions": (*suspended.conditions, foreign)})
    assert standing_of(told).rested_at == NOW


def test_a_job_keeps_the_image_of_the_operator_that_created_it() -> None:
    first = build_status(TrainingJobStatus(), facts(JobPhase.PENDING, image="emberscale:1"))
    assert build_status(first, facts(JobPhase.TRAINING, image="emberscale:2")).image == "emberscale:1"


def test_the_same_facts_give_the_same_status_later() -> None:
    first = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING))
    assert build_status(first, facts(JobPhase.TRAINING, NOW + 1000)) == first


def test_a_blocked_job_does_not_progress_and_says_why() -> None:
    status = build_status(TrainingJobStatus(), facts(JobPhase.PENDING, blocked=("Unschedulable", "ps-0: no node")))
    (condition,) = status.conditions
    assert (condition.status, condition.reason, condition.message) == ("False", "Unschedulable", "ps-0: no node")


def steps(*reasons: str, scaling: bool = False) -> JobPlan:
    told = tuple(ScalingStep(n, reason, f"{n}!") for n, reason in enumerate(reasons, 4))
    return JobPlan(sizing=Sizing(steps=told, scaling=scaling))


def test_a_change_of_shape_is_a_condition_with_its_last_step() -> None:
    first = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, plan=JobPlan()))
    assert conditions(first) == {"Progressing": "True"}
    planned = build_status(first, facts(JobPhase.TRAINING, plan=steps("PlannedScaling", scaling=True)))
    assert conditions(planned)["Scaling"] == "True"
    refused = build_status(planned, facts(JobPhase.TRAINING, plan=steps("PlannedScaling", "GaveUpScaling")))
    condition = refused.conditions[-1]
    assert (condition.type, condition.status, condition.reason, condition.message) == (
        "Scaling",
        "False",
        "GaveUpScaling",
        "5!",
    )
    assert refused.plan is not None
    assert refused.plan.step == 5
    recalled = build_status(refused, facts(JobPhase.TRAINING, plan=plan_of(refused.plan)))
    assert recalled.conditions == refused.conditions
    assert unwrap(recalled.plan).step == 5


def test_a_job_at_rest_does_not_scale() -> None:
    planned = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, plan=steps("PlannedScaling", scaling=True)))
    rests = build_status(planned, facts(JobPhase.SUSPENDED, plan=steps("PlannedScaling", scaling=True)))
    assert conditions(rests)["Scaling"] == "False"


def of_master(*slow: tuple[int, float, str]) -> JobStatus:
    """Three workers, some of which are slower than their peers: index, factor and remedy."""
    slowness = {index: SlowMember(factor, seconds=9, remedy=remedy) for index, factor, remedy in slow}
    workers = tuple(MemberNow(MemberId(Role.WORKER, index), slowness=slowness.get(index)) for index in range(3))
    return JobStatus(JobPhase.TRAINING, members=workers)


def test_slow_members_are_a_condition_and_told_once_and_when_it_is_over() -> None:
    recorder, job = Recorder(), read_job(job_body())
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=of_master()))
    assert conditions(status) == {"Progressing": "True"}
    for master in (
        of_master((1, 30.0, "it rests")),
        of_master((1, 30.0, "it rests")),
        of_master((0, 5.0, "it gets smaller shards"), (1, 30.0, "it rests")),
        of_master(),
    ):
        before, status = status, build_status(status, facts(JobPhase.TRAINING, master=master))
        tell_condition(recorder, job, ConditionType.SLOW, before, status)  # type: ignore[arg-type]
    assert conditions(status)["SlowMembers"] == "False"
    assert [told[:3] for told in recorder.told] == [
        ("Warning", "FoundSlowMembers", "worker-1 is 30 times slower than its peers, it rests"),
        (
            "Warning",
            "FoundSlowMembers",
            "worker-0 is 5 times slower than its peers, it gets smaller shards; "
            "worker-1 is 30 times slower than its peers, it rests",
        ),
        ("Normal", "NoSlowMembers", "no member is much slower than its peers"),
    ]


def test_a_job_at_rest_has_no_slow_members() -> None:
    slow = of_master((1, 30.0, ""))
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=slow))
    assert conditions(build_status(status, facts(JobPhase.SUSPENDED, master=slow)))["SlowMembers"] == "False"


def test_servers_near_their_memory_limit_are_a_condition_and_told_once_and_when_it_is_over() -> None:
    def of_servers(*delays: bool) -> JobStatus:
        servers = (MemberNow(MemberId(Role.PS, n), delays_for_memory=delay) for n, delay in enumerate(delays))
        return JobStatus(JobPhase.TRAINING, members=tuple(servers))

    recorder, job = Recorder(), read_job(job_body())
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=of_servers(False, False)))
    assert "LowMemory" not in conditions(status)
    for master in (of_servers(False, True), of_servers(False, True), of_servers(True, True), of_servers(False, False)):
        before, status = status, build_status(status, facts(JobPhase.TRAINING, master=master))
        tell_condition(recorder, job, ConditionType.LOW_MEMORY, before, status)  # type: ignore[arg-type]
    assert conditions(status)["LowMemory"] == "False"
    assert [told[:3] for told in recorder.told] == [
        ("Warning", "DelayedPushes", "ps-1: near the memory limit; pushes are slowed down"),
        ("Warning", "DelayedPushes", "ps-0, ps-1: near the memory limit; pushes are slowed down"),
        ("Normal", "EnoughMemory", "no parameter server is near its memory limit"),
    ]


def of_flash(problem: str = "", checkpoint: str = "flash-00000003") -> JobStatus:
    flash = FlashStatus(checkpoint=checkpoint, interval_seconds=15, problem=problem)
    return JobStatus(phase=JobPhase.TRAINING, flash=flash)


def test_flash_checkpoints_that_fail_are_told_once_and_when_they_are_taken_again() -> None:
    recorder, job = Recorder(), read_job(job_body())
    status = TrainingJobStatus()
    for master in (
        of_flash(checkpoint=""),
        of_flash(),
        of_flash("ps-0: Redis is full"),
        of_flash("ps-1: Redis is full"),
        of_flash(),
        of_flash("ps-0: Redis does not answer within 5s"),
    ):
        before, status = status, build_status(status, facts(JobPhase.TRAINING, master=master))
        tell_flash(recorder, job, before, status)  # type: ignore[arg-type]
    before, status = status, build_status(status, facts(JobPhase.SUSPENDED, master=of_flash()))
    tell_flash(recorder, job, before, status)  # type: ignore[arg-type]
    again = "; training continues, and it is tried again"
    assert [told[:3] for told in recorder.told] == [
        ("Warning", "DegradedFlashCheckpoints", f"ps-0: Redis is full{again}"),
        ("Normal", "RestoredFlashCheckpoints", "Redis takes them again; one is taken every 15s"),
        ("Warning", "DegradedFlashCheckpoints", f"ps-0: Redis does not answer within 5s{again}"),
    ]


@pytest.mark.parametrize(("checkpoint", "told"), [({}, ["SavesNothing"]), ({"uri": "s3://team/ctr"}, [])])
def test_a_job_without_a_place_for_checkpoints_is_warned(checkpoint: dict[str, str], told: list[str]) -> None:
    recorder, job = Recorder(), read_job(job_body(checkpoint=checkpoint))
    for phase in (JobPhase.PREPARING, JobPhase.TRAINING):
        tell_phase(recorder, job, JobPhase.PENDING, TrainingJobStatus(phase=phase))  # type: ignore[arg-type]
    warned = {(one[1], one[3]) for one in recorder.told if one[0] == "Warning"}
    assert [reason for reason, _ in warned] == told


@pytest.mark.parametrize(
    ("before", "told"),
    [(JobPhase.SUSPENDED, ["ResumedJob"]), (JobPhase.SUSPENDING, ["ResumedJob"]), (JobPhase.TRAINING, [])],
)
def test_only_a_job_that_was_suspended_is_said_to_resume(before: JobPhase, told: list[str]) -> None:
    """A master that finds no state in another Redis begins with the phase Pending, too."""
    recorder, job = Recorder(), read_job(job_body(checkpoint={"uri": "s3://team/ctr"}))
    tell_phase(recorder, job, before, TrainingJobStatus(phase=JobPhase.PENDING))  # type: ignore[arg-type]
    assert [reason for _, reason, *_ in recorder.told] == told


def test_a_job_that_takes_flash_checkpoints_no_longer_says_so() -> None:
    """`checkpoint.flash` may be edited while a job runs."""
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=of_flash()))
    status = build_status(status, facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING)))
    (condition,) = (one for one in status.conditions if one.type == "FlashCheckpoint")
    assert (condition.status, condition.reason) == ("False", "NoFlashCheckpoints")


def test_a_job_with_parity_says_whether_a_server_may_be_lost() -> None:
    def of(protected: bool, problem: str = "", lost: str = "") -> JobStatus:
        protection = ProtectionStatus(protected=protected, problem=problem, lost=lost)
        return JobStatus(phase=JobPhase.TRAINING, protection=protection)

    def protected(status: TrainingJobStatus) -> tuple[str, str]:
        return next((one.status, one.reason) for one in status.conditions if one.type == "Protected")

    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING)))
    assert "Protected" not in conditions(status)
    said = []
    for master in (of(False, "rows of ps-0 are still sent"), of(True), of(False, "ps-1 is lost", "ps-1"), of(True)):
        status = build_status(status, facts(JobPhase.TRAINING, master=master))
        said.append(protected(status))
    assert said == [("False", "Unprotected"), ("True", "Protected"), ("False", "Rebuilding"), ("True", "Protected")]
    assert protected(build_status(status, facts(JobPhase.SUSPENDED, master=of(True)))) == ("False", "Suspended")


@pytest.mark.parametrize(
    ("given_up", "why"),
    [
        (None, "the job keeps no parity of rows any more"),
        (ProtectionStatus(rebuilds=2, given_up=True), "the job keeps no parity of rows any more"),
        (ProtectionStatus(problem="ps-1 and ps-2 part", rebuilds=2, given_up=True), "ps-1 and ps-2 part"),
    ],
)
def test_a_job_that_gave_parity_up_is_protected_no_longer(given_up: ProtectionStatus | None, why: str) -> None:
    def told(before: TrainingJobStatus, protection: ProtectionStatus | None) -> TrainingJobStatus:
        return build_status(
            before, facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING, protection=protection))
        )

    status = told(told(TrainingJobStatus(), ProtectionStatus(protected=True)), given_up)
    (condition,) = (one for one in status.conditions if one.type == "Protected")
    assert (condition.status, condition.reason) == ("False", "NoParity")
    assert condition.message == f"{why}; losing a parameter server now rolls the job back"
    away = build_status(status, facts(JobPhase.TRAINING))  # the master does not answer
    assert [one for one in away.conditions if one.type == "Protected"] == [condition]
    if given_up is not None:
        assert unwrap(unwrap(status.progress).rebuilds).count == 2
        assert "Protected" not in conditions(told(TrainingJobStatus(), given_up)), "nobody was told of parity"


def protection_on(*nodes: str, parity: int = 1) -> tuple[str, str, str]:
    """Returns what a job with parity says whose servers run on these nodes: status, reason and message."""
    servers = tuple(MemberNow(MemberId(Role.PS, index), buckets=512) for index in range(len(nodes)))
    master = JobStatus(JobPhase.TRAINING, members=servers, protection=ProtectionStatus(protected=True))
    members = tuple(
        MemberStatus(role="ps", index=index, node=node, state="Running") for index, node in enumerate(nodes)
    )
    told = replace(facts(JobPhase.TRAINING, master=master, parity=parity), members=members)
    (condition,) = (one for one in build_status(TrainingJobStatus(), told).conditions if one.type == "Protected")
    return condition.status, condition.reason, condition.message


def test_a_job_with_parity_says_how_many_servers_it_may_lose() -> None:
    said = [protection_on("a", "b", "c", parity=parity)[2] for parity in (1, 2)]
    assert said == [
        f"the rows of any {lost} can be rebuilt from parity on the others"
        for lost in ("one parameter server", "2 parameter servers at once")
    ]


def test_a_node_that_would_take_more_servers_away_than_parity_covers_is_named_while_the_job_is_protected() -> None:
    assert protection_on("a", "b")[:2] == ("True", "Protected")
    status, reason, message = protection_on("a", "a")
    assert (status, reason) == ("True", "SharedNodes")
    assert "ps-0, ps-1 share node a: the loss of that node" in message
    assert protection_on("a", "a", "b", parity=2)[:2] == ("True", "Protected")
    status, reason, message = protection_on("a", "a", "a", "b", parity=2)
    assert (status, reason) == ("True", "SharedNodes")
    assert "ps-0, ps-1, ps-2 share node a" in message


def test_the_last_rebuild_is_part_of_the_progress() -> None:
    def of(rebuilds: int) -> JobStatus:
        protection = ProtectionStatus(rebuilds=rebuilds, seconds=1.23456, bytes=7, rebuilt="ps-1")
        return JobStatus(phase=JobPhase.TRAINING, protection=protection)

    told = [build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=of(count))).progress for count in (0, 2)]
    assert [unwrap(one).rebuilds for one in told] == [None, Rebuilds(count=2, server="ps-1", seconds=1.235, bytes=7)]


def test_what_checkpoints_cost_and_a_restore_would_take_is_part_of_the_progress() -> None:
    costs = tuple(
        CheckpointCost(
            checkpoint=f"0000000{n}",
            seconds=2.00049,
            held_seconds=0.01236,
            written_bytes=1_000_000,
            bytes=n * 1_000_000,
        )
        for n in range(1, 8)
    )
    told = facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING, checkpoints=costs))
    progress = unwrap(build_status(TrainingJobStatus(), told).progress)
    assert [one.checkpoint for one in progress.checkpoints] == [f"0000000{n}" for n in range(3, 8)]
    newest = CheckpointCost(
        checkpoint="00000007", seconds=2.0, held_seconds=0.0124, written_bytes=1_000_000, bytes=7_000_000
    )
    assert progress.checkpoints[-1] == newest
    assert progress.restore_seconds == 14.0
    document = to_document(build_status(TrainingJobStatus(), told))["progress"]
    assert (document["restoreSeconds"], document["checkpoints"][-1]["heldSeconds"]) == (14.0, 0.0124)
    before = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING)))
    assert (unwrap(before.progress).checkpoints, unwrap(before.progress).restore_seconds) == ((), None)


def test_what_rounds_save_and_why_they_are_trained_is_part_of_the_progress() -> None:
    def of(rounds: RoundsDecision | None) -> HotEmbeddingsProgress | None:
        traffic = Traffic(0, 3, 48, 410, 1000, batches=60, round_rows=40, single_rows=100)
        members = (MemberNow(MemberId(Role.WORKER, 0), rounds=rounds),)
        told = facts(JobPhase.TRAINING, master=JobStatus(phase=JobPhase.TRAINING, members=members, traffic=traffic))
        return unwrap(build_status(TrainingJobStatus(), told).progress).hot_embeddings

    assert of(None) is None
    assert of(RoundsDecision(True, "EstimatePays", "0.41x of the bytes")) == HotEmbeddingsProgress(
        message="on: 0.41x of the bytes",
        workers_in_rounds=1,
        round_batches=48,
        single_batches=12,
        hit_percent="60%",
        saved_bytes=590,
    )


def test_a_lost_server_is_told_as_a_warning() -> None:
    recorder = Recorder()
    job = read_job(job_body())
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, plan=steps("PlannedScaling")))
    tell_steps(recorder, job, status.plan, steps("PlannedScaling", "Degraded", "Recovered"))  # type: ignore[arg-type]
    assert [told[:2] for told in recorder.told] == [("Warning", "Degraded"), ("Normal", "Recovered")]


def test_steps_are_told_once() -> None:
    recorder = Recorder()
    job = read_job(job_body())
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, plan=steps("PlannedScaling")))
    tell_steps(recorder, job, status.plan, steps("PlannedScaling", "GaveUpScaling"))  # type: ignore[arg-type]
    assert recorder.told == [("Warning", "GaveUpScaling", "5!", "5")]


class Recorder:
    """Records what an EventRecorder would tell."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, str]] = []

    def normal(self, job: object, reason: str, message: str, key: str) -> None:
        self.told.append(("Normal", reason, message, key))

    def warning(self, job: object, reason: str, message: str, key: str) -> None:
        self.told.append(("Warning", reason, message, key))


def test_progress_that_is_not_a_number_is_left_out() -> None:
    master = JobStatus(phase=JobPhase.TRAINING, samples=99, expected_samples=100, auc=float("nan"), eta_seconds=-1)
    progress = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING, master=master)).progress
    assert progress is not None
    assert (progress.auc, progress.eta, progress.percent) == (None, "", "99%")


documents = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from("abcd"), documents, max_size=4)


def apply(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    result = dict(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = apply(inner if isinstance(inner, dict) else {}, value)
        else:
            result[key] = value
    return result


@given(objects, objects)
def test_a_patch_leads_from_one_document_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


@given(objects, objects, objects)
def test_after_a_patch_of_unknown_outcome_the_next_leads_from_either_document_to_its_own(
    before: dict[str, Any], lost: dict[str, Any], after: dict[str, Any]
) -> None:
    patch = merge_patch(unknown_after(before, lost), after)
    assert apply(before, patch) == apply(lost, patch) == after
    assert after.keys() <= patch.keys(), "every field is sent"


def test_a_status_survives_being_written_and_read() -> None:
    status = build_status(TrainingJobStatus(), facts(JobPhase.TRAINING))
    assert TrainingJobStatus.model_validate(to_document(status)) == status


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 20))
def test_a_plan_never_leaves_the_manifests_bounds(planned: int, least: int, span: int) -> None:
    role = read_job(job_body(worker={"minReplicas": least, "maxReplicas": least + span})).spec.worker
    assert least <= replicas_of(role, RoleShape(planned)) <= least + span


def test_an_edit_of_replicas_goes_before_an_older_plan() -> None:
    spec = read_job(job_body(worker={"replicas": 5})).spec
    sizes = {Role.WORKER: RoleShape(2), Role.PS: RoleShape(1)}
    counts = {demand.role: demand.replicas for demand in demands_of(spec, sizes)}
    assert counts[Role.WORKER] == 5


def test_memory_that_grew_is_asked_for() -> None:
    spec = read_job(job_body(ps={"resources": {"limits": {"memory": "1Gi"}}})).spec
    grown = grown_memory(1 << 30)
    resources = {demand.role: demand.resources for demand in demands_of(spec, grown={Role.PS: grown})}
    assert resources[Role.PS] == Resources(None, 1536 << 20)


def test_signs_that_a_job_is_not_what_was_wanted_are_in_the_status() -> None:
    told = JobStatus(samples=1, expected_samples=1, warnings=("spec.training.batchSize is larger than the data",))
    status = build_status(TrainingJobStatus(), facts(JobPhase.COMPLETE, master=told))
    assert unwrap(status.progress).warnings == ("spec.training.batchSize is larger than the data",)
