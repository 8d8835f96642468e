"""The job machine, one decision at a time; whole stories are in `scenarios/`."""

from dataclasses import replace
from typing import Any

import pytest

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_api.shape import RoleShape
from emberscale_operator.machine import (
    Action,
    Create,
    Decision,
    Delete,
    DeleteJob,
    Demand,
    ExitReason,
    Forget,
    History,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    JobIntent,
    JobStanding,
    Kill,
    MasterReport,
    PhaseNews,
    Policy,
    ReportExit,
    Resize,
    Resources,
    Scale,
    ShutDown,
    Suspend,
    WaitUntil,
    decide,
)
from emberscale_operator.machine.restarts import Backoff, advance
from training_jobs import training_spec

POLICY = Policy(
    Backoff(base=1.0, factor=2.0, limit=8.0, reset_after=60.0),
    backoff_limit=2,
    stop_grace=10.0,
    silence=15.0,
    start_silence=30.0,
)
SMALL, LARGE = Resources(1.0, 1 << 30), Resources(2.0, 2 << 30)
HEARD = MasterReport(answers=True, plan_heard=True, heard_at=5.0)
TRAINING = JobStanding(JobPhase.TRAINING, active_since=0.0)


def running(role: Role, index: int = 0, incarnation: int = 1, resources: Resources | None = None) -> Instance:
    wanted = Resources() if resources is None else resources
    return Instance(InstanceId(role, index, incarnation), InstanceState.RUNNING, wanted, started_at=0.0)


def exited(instance: Instance, reason: ExitReason = ExitReason.ERROR, code: int = 1, at: float = 5.0) -> Instance:
    return replace(instance, state=InstanceState.EXITED, exit=InstanceExit(reason, code, at))


def intent(suspend: bool = False, **more: Any) -> JobIntent:
    spec: dict[str, Any] = {"ps": {"replicas": 1}, "worker": {"replicas": 1}}
    known = ("revisions", "keeps_ended", "ttl", "own", "awaits_store")
    options = {name: more.pop(name) for name in known if name in more}
    return JobIntent(training_spec(**{**spec, **more}), suspend=suspend, policy=POLICY, **options)


def limits(replicas: int, resources: Resources) -> dict[str, Any]:
    of_role = {"cpu": resources.cpu_cores, "memory": str(resources.memory_bytes)}
    return {"replicas": replicas, "resources": {"limits": of_role}}


def look(
    job: JobIntent,
    observed: list[Instance],
    now: float = 5.0,
    standing: JobStanding = TRAINING,
    master: MasterReport = HEARD,
) -> Decision:
    return decide(job, standing, master, observed, now)


def actions(*args: Any, **options: Any) -> tuple[Action, ...]:
    return look(*args, **options).actions


MASTER, PS, WORKER = running(Role.MASTER), running(Role.PS), running(Role.WORKER)
ALL = [MASTER, PS, WORKER]


def ended(phase: JobPhase = JobPhase.COMPLETE, at: float = 5.0, told: bool = True) -> JobStanding:
    return replace(TRAINING, phase=phase, rested_at=at, told=told)


def test_what_is_wanted_and_missing_is_created() -> None:
    job = intent(worker=limits(2, SMALL))
    assert actions(job, [MASTER, PS, running(Role.WORKER, 1)]) == (
        Create(InstanceId(Role.WORKER, 0, 1), SMALL),
        Resize(InstanceId(Role.WORKER, 1, 1), SMALL),
    )


def test_what_is_as_wanted_is_left_alone() -> None:
    assert actions(intent(), ALL) == ()


def test_limits_that_nobody_asked_for_stay() -> None:
    assert actions(intent(), [MASTER, PS, running(Role.WORKER, resources=SMALL)]) == ()


def test_a_second_restart_in_a_row_waits() -> None:
    past = advance(History(), [exited(MASTER)], POLICY.backoff)
    again = exited(running(Role.MASTER, incarnation=2), at=6.0)
    standing = replace(TRAINING, history=past)
    assert actions(intent(), [again, PS, WORKER], now=6.5, standing=standing) == (Forget(again.id), WaitUntil(7.0))
    assert Create(InstanceId(Role.MASTER, 0, 3), Resources()) in actions(
        intent(), [again, PS, WORKER], now=7.0, standing=standing
    )


def test_one_that_is_terminating_is_waited_for() -> None:
    assert actions(intent(), [MASTER, PS, replace(WORKER, state=InstanceState.TERMINATING)]) == ()


def test_other_resources_are_a_resize_of_what_runs() -> None:
    job, worker = intent(worker=limits(1, LARGE)), running(Role.WORKER, resources=SMALL)
    assert actions(job, [MASTER, PS, worker]) == (Resize(worker.id, LARGE),)
    assert actions(job, [MASTER, PS, replace(worker, state=InstanceState.PENDING)]) == (), "a node prepares it"


def test_what_no_node_takes_is_replaced_when_it_is_to_get_other_resources() -> None:
    job, worker = intent(worker=limits(1, SMALL)), running(Role.WORKER, resources=LARGE)
    waits = replace(worker, state=InstanceState.PENDING, unplaced=True)
    assert actions(intent(worker=limits(1, LARGE)), [MASTER, PS, waits]) == ()
    assert actions(job, [MASTER, PS, waits]) == (Delete(waits.id),)
    assert actions(job, [MASTER, PS, replace(waits, state=InstanceState.TERMINATING)]) == ()
    gone = replace(worker, state=InstanceState.EXITED, exit=InstanceExit(ExitReason.KILLED, -9, 5.0, deleted=True))
    after = look(job, [MASTER, PS, gone])
    assert Create(InstanceId(Role.WORKER, 0, 2), SMALL) in after.actions, "without a back-off"
    assert (after.standing.history.restarts(Role.WORKER), after.standing.history.of(Role.WORKER, 0).faults) == (0, 0)


def test_the_older_of_two_lives_of_one_member_is_deleted() -> None:
    assert actions(intent(), [*ALL, running(Role.WORKER, 0, 2)]) == (Delete(WORKER.id),)


def test_an_exit_is_reported_to_a_live_master_and_then_forgotten() -> None:
    died = exited(WORKER)
    assert died.exit is not None
    assert ReportExit(died.id, died.exit) in actions(intent(), [MASTER, PS, died])
    past = advance(History(), [died], POLICY.backoff).with_reported(died.id)
    told = actions(intent(), [MASTER, PS, died], standing=replace(TRAINING, history=past))
    assert Forget(died.id) in told
    assert ReportExit(died.id, died.exit) not in told


def test_an_exit_is_kept_while_there_is_no_master_to_hear_of_it() -> None:
    died = exited(WORKER)
    found = actions(intent(), [exited(MASTER), PS, died])
    assert not any(isinstance(action, ReportExit) for action in found)
    assert Forget(died.id) not in found


def test_a_member_that_completed_is_replaced_once_the_master_was_told_and_still_wants_it() -> None:
    done = exited(WORKER, ExitReason.COMPLETED, 0, at=0.0)
    successor = Create(InstanceId(Role.WORKER, 0, 2), WORKER.resources)
    assert successor not in actions(intent(), [MASTER, PS, done])  # the plan may be from before the job's end
    past = advance(History(), [done], POLICY.backoff).with_reported(done.id)
    standing = replace(TRAINING, history=past)
    assert successor in actions(intent(), [MASTER, PS, done], standing=standing)
    unheard = replace(HEARD, plan_heard=False)
    assert successor not in actions(intent(), [MASTER, PS, done], standing=standing, master=unheard)
    over = replace(HEARD, end=PhaseNews(JobPhase.COMPLETE))
    assert successor not in actions(intent(), [MASTER, PS, done], standing=standing, master=over)


def test_an_edit_replaces_the_master_and_what_does_not_run_yet() -> None:
    job = intent(revisions={Role.MASTER: "new", Role.WORKER: "new", Role.PS: "new"})
    master, ps = (replace(instance, revision="old") for instance in (MASTER, PS))
    stuck = replace(WORKER, revision="old", state=InstanceState.PENDING)
    assert actions(job, [master, ps, stuck]) == (Delete(master.id), Delete(stuck.id))


def test_the_master_goes_after_its_members_and_the_store_after_the_master() -> None:
    store = running(Role.REDIS)
    assert actions(intent(), [MASTER, store], standing=ended()) == (ShutDown(MASTER.id),)
    leaving = replace(MASTER, state=InstanceState.TERMINATING)
    assert actions(intent(), [leaving, store], standing=ended()) == ()
    assert actions(intent(), [store], standing=ended()) == (Delete(store.id, at_once=True),)


@pytest.mark.parametrize(
    ("master", "now", "expected"),
    [
        (HEARD, 6.0, ShutDown(MASTER.id)),
        (replace(HEARD, told_to_end_at=6.0), 35.0, WaitUntil(36.0)),
        (replace(HEARD, told_to_end_at=6.0), 36.0, Delete(MASTER.id, at_once=True)),
        (replace(HEARD, cannot_be_told=True), 6.0, Delete(MASTER.id, at_once=True)),
        (MasterReport(), 14.0, WaitUntil(15.0)),
        (MasterReport(), 15.0, Delete(MASTER.id, at_once=True)),
    ],
)
def test_a_master_ends_by_itself_where_it_can_be_told_to(master: MasterReport, now: float, expected: Action) -> None:
    assert actions(intent(), [MASTER], now=now, standing=ended(), master=master) == (expected,)


def test_pods_that_hold_the_logs_of_a_job_that_has_ended_stay_where_they_are_to() -> None:
    holds, gone = replace(exited(WORKER), holds_log=True), exited(PS)
    assert actions(intent(keeps_ended=True), [holds, gone], standing=ended()) == (Forget(gone.id),)
    assert actions(intent(keeps_ended=True, suspend=True), [holds], standing=ended(JobPhase.SUSPENDED)) == (
        Forget(holds.id),
    )
    assert actions(intent(), [holds], standing=ended()) == (Forget(holds.id),)


def test_nothing_is_created_once_the_job_has_ended() -> None:
    assert actions(intent(worker={"replicas": 3}), [], standing=ended()) == ()


def test_the_rest_starts_once_the_jobs_own_store_was_ready() -> None:
    job = intent(own=(Demand(Role.REDIS, 1),), awaits_store=True)
    store = running(Role.REDIS)
    assert actions(job, [], standing=JobStanding()) == (Create(InstanceId(Role.REDIS, 0, 1), Resources()),)
    assert actions(job, [store], standing=JobStanding()) == ()
    decision = look(job, [replace(store, ready=True)], standing=JobStanding())
    assert Create(InstanceId(Role.MASTER, 0, 1), Resources()) in decision.actions
    # this survives restarts of the store
    later = look(job, [exited(store), *ALL], standing=decision.standing)
    assert later.actions == (Forget(store.id), Create(InstanceId(Role.REDIS, 0, 2), Resources()))


@pytest.mark.parametrize(
    ("reason", "code", "told"),
    [
        (ExitReason.ERROR, 1, "exit code 1; spec.runPolicy.backoffLimit allows 2"),
        (ExitReason.OOM_KILLED, -9, "out of memory; spec.runPolicy.backoffLimit allows 2; more memory: spec.master."),
    ],
)
def test_a_member_that_keeps_failing_fails_the_job(reason: ExitReason, code: int, told: str) -> None:
    standing = TRAINING
    for incarnation in (1, 2, 3):
        died = exited(running(Role.MASTER, incarnation=incarnation), reason, code)
        standing = look(intent(), [died, PS, WORKER], standing=standing, master=MasterReport()).standing
    assert (standing.phase, standing.reason, standing.told) == (JobPhase.FAILED, "BackoffLimitExceeded", False)
    assert told in standing.message
    assert "master-0" in standing.message


def test_kills_from_outside_never_fail_the_job() -> None:
    standing = TRAINING
    for incarnation in range(1, 10):
        died = exited(running(Role.WORKER, incarnation=incarnation), ExitReason.KILLED, -9)
        standing = look(intent(), [MASTER, PS, died], standing=standing).standing
    assert standing.phase is JobPhase.TRAINING
    assert standing.history.of(Role.WORKER, 0).restarts == 9


def test_the_phase_is_the_masters_while_it_answers() -> None:
    said = replace(HEARD, status=PhaseNews(JobPhase.EVALUATING, "Evaluating", "epoch 1"))
    standing = look(intent(), ALL, master=said).standing
    assert (standing.phase, standing.reason, standing.message) == (JobPhase.EVALUATING, "Evaluating", "epoch 1")
    away = look(intent(), ALL, standing=standing, master=replace(said, answers=False)).standing
    assert (away.phase, away.reason) == (JobPhase.EVALUATING, "WaitingForMaster")


def test_a_job_ends_as_its_master_says() -> None:
    end = PhaseNews(JobPhase.COMPLETE, "Completed", "plan")
    standing = look(intent(), ALL, master=replace(HEARD, end=end)).standing
    assert (standing.phase, standing.reason, standing.rested_at) == (JobPhase.COMPLETE, "Completed", 5.0)
    assert look(intent(), ALL, now=99.0, standing=standing, master=MasterReport()).standing == standing


def test_a_suspension_asks_for_a_checkpoint_and_waits_for_it() -> None:
    asked = look(intent(suspend=True), ALL)
    assert asked.standing.phase is JobPhase.SUSPENDING
    assert Suspend() in asked.actions
    saved = replace(HEARD, suspended=True, status=PhaseNews(JobPhase.SUSPENDED, "Suspended", "resumes from 7"))
    rests = look(intent(suspend=True), ALL, standing=asked.standing, master=saved).standing
    assert (rests.phase, rests.reason, rests.message) == (JobPhase.SUSPENDED, "JobSuspended", "resumes from 7")


def test_a_job_that_has_not_begun_rests_at_once() -> None:
    assert look(intent(suspend=True), [], standing=JobStanding(), master=MasterReport()).standing.rests
    assert look(intent(suspend=True), ALL, standing=JobStanding(), master=MasterReport()).standing.rests


def test_a_suspension_whose_master_does_not_answer_rests_without_a_checkpoint_in_the_end() -> None:
    silent = MasterReport(heard_at=5.0)
    standing = look(intent(suspend=True), ALL, now=10.0, master=silent).standing
    standing = look(intent(suspend=True), ALL, now=309.0, standing=standing, master=silent).standing
    assert standing.phase is JobPhase.SUSPENDING
    standing = look(intent(suspend=True), ALL, now=310.0, standing=standing, master=silent).standing
    assert (standing.phase, standing.reason, standing.told) == (JobPhase.SUSPENDED, "JobSuspended", False)
    assert "resumes from its last checkpoint" in standing.message


@pytest.mark.parametrize("standing", [TRAINING, replace(TRAINING, phase=JobPhase.PENDING)])
def test_a_master_that_is_ready_and_does_not_answer_is_told_from_one_that_starts(standing: JobStanding) -> None:
    """A NetworkPolicy that denies everything lets the kubelet's probes through, and keeps the operator out."""
    unheard, ready = MasterReport(unanswered_since=5.0), replace(MASTER, ready=True)

    def told(master: Instance, now: float) -> str:
        after = look(intent(), [master, PS, WORKER], now=now, standing=standing, master=unheard).standing
        assert (after.phase, after.reason) == (standing.phase, "WaitingForMaster")
        return after.message

    assert "NetworkPolicy" in told(ready, 20.0)
    assert "NetworkPolicy" not in told(ready, 19.0)
    assert "NetworkPolicy" not in told(MASTER, 20.0)


def test_an_operator_that_starts_does_not_call_a_master_unavailable_that_it_has_not_asked_yet() -> None:
    told = replace(TRAINING, reason="Training", message="epoch 1 of 10")
    ready = replace(MASTER, ready=True)
    after = look(intent(), [ready, PS, WORKER], standing=told, master=MasterReport()).standing
    assert (after.phase, after.reason, after.message) == (told.phase, told.reason, told.message)
    assert look(intent(), [PS, WORKER], standing=told, master=MasterReport()).standing.reason == "WaitingForMaster"


def test_whoever_has_the_tokens_of_a_deleted_secret_is_ended_at_once() -> None:
    """Later masters and members have others: one by one, each would fail on those that are left, and count for it."""
    refuses = MasterReport(refuses=True, unanswered_since=5.0)
    assert actions(intent(), ALL, now=19.0, master=refuses) == (WaitUntil(20.0),)
    killed = [action.id for action in actions(intent(), ALL, now=20.0, master=refuses) if isinstance(action, Kill)]
    assert killed == [instance.id for instance in ALL]


def test_servers_stay_until_the_plan_lets_them_go_whoever_decides() -> None:
    both = [*ALL, running(Role.PS, 1)]
    standing = look(intent(ps={"replicas": 2}), both, standing=TRAINING, master=replace(HEARD, sizes=sized(2))).standing
    fewer = intent(ps={"replicas": 1})
    unknown = look(fewer, both, standing=standing, master=MasterReport())
    assert not [action for action in unknown.actions if isinstance(action, Delete)]
    moved = look(fewer, both, standing=unknown.standing, master=replace(HEARD, sizes=sized(1)))
    assert Delete(InstanceId(Role.PS, 1, 1)) in moved.actions


@pytest.mark.parametrize("ps", [{"replicas": 2}, {"minReplicas": 1, "maxReplicas": 2}])
def test_no_master_gets_more_servers_than_the_manifest_allows(ps: dict[str, int]) -> None:
    asks = replace(HEARD, sizes=sized(1000))
    standing = look(intent(ps=ps), ALL, standing=TRAINING, master=asks).standing
    assert standing.applied_ps == 2
    fewer = look(intent(ps={"replicas": 1}), ALL, standing=standing, master=asks)
    assert fewer.standing.applied_ps == 2


def test_one_more_server_may_stand_in_for_the_only_one() -> None:
    asks = replace(HEARD, sizes=sized(3))
    assert look(intent(ps={"replicas": 1}), ALL, standing=TRAINING, master=asks).standing.applied_ps == 2


def test_what_keeps_a_server_from_starting_is_told_once() -> None:
    waits = replace(intent(), waits="ps-1: Unschedulable: 0/1 nodes")
    told = look(waits, ALL, standing=TRAINING, master=replace(HEARD, asked=Scale(1, 1)))
    assert told.actions == (Scale(1, 1, waits.waits),)
    assert not look(waits, ALL, standing=TRAINING, master=replace(HEARD, asked=Scale(1, 1, waits.waits))).actions


def test_a_reason_that_changes_at_each_look_is_told_now_and_then_and_a_number_at_once() -> None:
    waits = replace(intent(), waits="ps-1: ImagePullBackOff: back-off 20s")
    master = replace(HEARD, asked=Scale(1, 1, "ps-1: ErrImagePull"), told_at=100.0)
    assert look(waits, ALL, now=101.0, standing=TRAINING, master=master).actions == (WaitUntil(110.0),)
    assert look(waits, ALL, now=110.0, standing=TRAINING, master=master).actions == (Scale(1, 1, waits.waits),)
    edited = replace(intent(ps={"replicas": 2}), waits=waits.waits)
    assert Scale(2, 1, waits.waits) in look(edited, ALL, now=101.0, standing=TRAINING, master=master).actions


def test_a_master_that_follows_no_edits_is_told_nothing() -> None:
    assert not look(intent(ps={"replicas": 2}), ALL, standing=TRAINING, master=replace(HEARD, sizes=sized(1))).actions


def sized(servers: int) -> dict[Role, RoleShape]:
    return {Role.PS: RoleShape(servers), Role.WORKER: RoleShape(1)}


def test_a_suspended_job_rests_until_nothing_of_it_is_left_and_it_is_resumed() -> None:
    rests = ended(JobPhase.SUSPENDED)
    assert look(intent(), [MASTER], standing=rests).standing.phase is JobPhase.SUSPENDED
    assert look(intent(suspend=True), [], standing=rests).standing.phase is JobPhase.SUSPENDED
    assert look(intent(), [], standing=rests).standing.phase is JobPhase.PENDING


def test_the_deadline_counts_while_the_master_is_away_and_not_while_the_job_rests() -> None:
    job, away = intent(runPolicy={"activeDeadline": "100s"}), MasterReport()
    assert look(job, ALL, now=100.0, master=away).standing.phase is JobPhase.TRAINING
    assert look(job, ALL, now=101.0).standing.phase is JobPhase.TRAINING, "a master that answers counts itself"
    late = look(job, ALL, now=101.0, master=away).standing
    assert (late.phase, late.reason) == (JobPhase.FAILED, "DeadlineExceeded")
    resumed = look(job, [], now=1000.0, standing=ended(JobPhase.SUSPENDED, at=60.0), master=away).standing
    assert look(job, [], now=1040.0, standing=resumed, master=away).standing.phase is JobPhase.PENDING
    assert look(job, [], now=1041.0, standing=resumed, master=away).standing.reason == "DeadlineExceeded"


def test_a_job_is_deleted_when_its_time_is_over() -> None:
    assert actions(intent(ttl=60.0), [], now=64.0, standing=ended()) == ()
    assert actions(intent(ttl=60.0), [], now=65.0, standing=ended()) == (DeleteJob(),)


def test_memory_grows_where_it_ran_out() -> None:
    died = exited(replace(PS, resources=Resources(None, 1 << 30)), ExitReason.OOM_KILLED, -9)
    job = intent(ps={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}})
    decision = look(job, [MASTER, died, WORKER])
    assert Create(InstanceId(Role.PS, 0, 2), Resources(None, 1536 << 20)) in decision.actions
    again = look(job, [MASTER, died, WORKER], standing=decision.standing)
    assert again.standing.grown == {Role.PS: 1536 << 20}, "the same end counts once"


def memory_after_ends(mode: str, ends: int) -> list[int]:
    """Returns the limits, in MiB, of a PS of 1 GiB after each of `ends` ends for lack of memory."""
    job = intent(
        ps={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}},
        scaling={"mode": mode, "maxMemoryGrowth": 2},
        runPolicy={"backoffLimit": 100},
    )
    job, standing, limit, found = replace(job, policy=replace(POLICY, backoff_limit=100)), TRAINING, 1 << 30, []
    for incarnation in range(1, ends + 1):
        ps = running(Role.PS, 0, incarnation, Resources(None, limit))
        standing = look(job, [MASTER, exited(ps, ExitReason.OOM_KILLED, -9), WORKER], standing=standing).standing
        limit = standing.grown.get(Role.PS, limit)
        found.append(limit >> 20)
    return found


def test_memory_grows_up_to_a_bound_and_not_at_all_where_the_manifests_sizes_stand() -> None:
    assert memory_after_ends("Auto", 4) == [1536, 2048, 2048, 2048]
    assert memory_after_ends("Manual", 2) == [1024, 1024]


def killed(found: tuple[Action, ...]) -> list[InstanceId]:
    return [action.id for action in found if isinstance(action, Kill)]


def test_a_member_that_the_master_gave_up_is_killed() -> None:
    worker = replace(WORKER, name="life-1")
    silent = replace(HEARD, silent=frozenset({MemberId(Role.WORKER, 0, "life-1")}))
    assert killed(actions(intent(), [MASTER, PS, worker], master=silent)) == [worker.id]
    successor = replace(worker, id=InstanceId(Role.WORKER, 0, 2), name="life-2")
    assert killed(actions(intent(), [MASTER, PS, successor], master=silent)) == []


def test_a_drained_server_that_is_to_be_replaced_is_deleted_and_not_killed() -> None:
    server = replace(PS, name="life-1")
    member = frozenset({server.as_member})
    drained = replace(HEARD, silent=member, drained=member)
    assert actions(intent(), [MASTER, server, WORKER], master=drained) == (Delete(server.id, at_once=True),)
    leaving = replace(HEARD, drained=member)
    assert actions(intent(), [MASTER, server, WORKER], master=leaving) == ()


@pytest.mark.parametrize(("reason", "code"), [(ExitReason.KILLED, 3), (ExitReason.KILLED, 143), (ExitReason.ERROR, 1)])
def test_the_end_of_a_drained_server_is_no_restart_after_a_failure(reason: ExitReason, code: int) -> None:
    gone = exited(replace(PS, name="life-1"), reason, code)
    drained = replace(HEARD, drained=frozenset({gone.as_member}))
    lost = look(intent(), [MASTER, gone, WORKER]).standing.history
    left = look(intent(), [MASTER, gone, WORKER], master=drained).standing.history
    assert (lost.restarts(Role.PS), left.restarts(Role.PS)) == (1, 0)
    assert left.of(Role.PS, 0).faults == 0


def test_a_server_that_is_called_drained_each_time_is_not_restarted_without_pause() -> None:
    standing = TRAINING
    for incarnation in (1, 2, 3):
        gone = exited(replace(running(Role.PS, 0, incarnation), name=f"life-{incarnation}"))
        drained = replace(HEARD, drained=frozenset({gone.as_member}))
        standing = look(intent(), [MASTER, gone, WORKER], standing=standing, master=drained).standing
    assert standing.history.of(Role.PS, 0).ready_at == 5.0 + POLICY.backoff.delay(3, ExitReason.COMPLETED)


def test_a_member_that_never_joins_is_killed_once_the_master_could_have_heard_of_it() -> None:
    job = replace(intent(), policy=replace(POLICY, join_silence=60.0))
    known = replace(HEARD, answers_since=20.0, joined=frozenset({MemberId(Role.PS, 0, "life-1")}))
    server, worker = replace(PS, name="life-1"), replace(WORKER, name="life-1")
    members = [MASTER, server, worker]
    assert actions(job, members, now=79.0, master=known) == (WaitUntil(80.0),)
    assert killed(actions(job, members, now=80.0, master=known)) == [worker.id]
    assert killed(actions(job, members, now=80.0, master=replace(known, answers=False))) == []
    assert killed(actions(intent(), members, now=80.0, master=known)) == []


def test_a_store_that_falls_silent_is_killed_and_the_master_that_waits_for_it_is_not() -> None:
    job = intent(own=(Demand(Role.REDIS, 1),), awaits_store=True)
    store = replace(running(Role.REDIS), ready=True, unanswered_since=10.0)
    silent = replace(HEARD, answers=False, unanswered_since=8.0)
    assert killed(actions(job, [store, *ALL], now=24.0, master=silent)) == []
    assert killed(actions(job, [store, *ALL], now=25.0, master=silent)) == [store.id]
