import asyncio
import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from emberscale_api.metrics import BRAIN_DATABASE_UP, BRAIN_JOBS, BRAIN_PLANNING_FAILURES_TOTAL
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.history.changes import (
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, JobMetadata, PastJob, ShapeBounds
from emberscale_brain.service.answers import explanation_to, plan_to
from emberscale_brain.service.brain import Brain
from emberscale_brain.service.checks import Refusal, Refused
from emberscale_brain.service.instruments import SteadyClock
from emberscale_brain.service.planning import PlanningProcess
from emberscale_brain.service.runtime import BrainRuntime, UnknownJobError
from emberscale_brain.service.server import BrainServicer
from emberscale_brain.service.settings import load_settings
from emberscale_brain.warm_start import WarmStart, warm_start

MakeBrain = Callable[..., Brain]
JOB = JobId("job-1")
NO_DEADLINE = SimpleNamespace(time_remaining=lambda: None)
TWO = JobShape(2, 1, 4, 4, 4 * GIB, 8 * GIB)
BOUNDS = ShapeBounds((2, 20), (1, 1), (4, 4), (4, 4), (4 * GIB, 4 * GIB), (8 * GIB, 8 * GIB), 4)


def submitted(job: JobId = JOB, bounds: ShapeBounds = BOUNDS, **changes: object) -> JobSubmitted:
    metadata = JobMetadata("DLRM", 512, 10**6, 416, 26, 10**9, name="ads")
    return JobSubmitted(job, "ann", metadata, bounds, time.time(), **changes)  # type: ignore[arg-type]


def profile(sequence: int, workers: int = 2, throughput: float = 10_240.0) -> ProfileReported:
    shape = JobShape(workers, 1, 4, 4, 4 * GIB, 8 * GIB)
    return ProfileReported(JOB, sequence, JobProfile(time.time(), shape, 512, 0.1, throughput, 1000 * sequence))


def metrics(brain: Brain) -> str:
    return generate_latest(brain.meters.registry).decode()


def plan_of(brain: Brain) -> pb.BrainPlan:
    return plan_to(brain.plan(JOB))


def plan_for(brain: Brain, job: JobSubmitted) -> pb.BrainPlan:
    plan, _ = brain.submit(job)
    return plan_to(plan)


def explain(brain: Brain) -> pb.PlanExplanation:
    return explanation_to(brain.explain(JOB))


def planned(brain: Brain) -> pb.BrainPlan:
    """Plays a round of planning; returns the plan that is then in force."""
    brain.plan_once()
    return plan_of(brain)


def written(brain: Brain) -> bool:
    """Waits for the recorder; returns whether everything that the brain recorded is in the database."""
    return brain.report(JOB, [], ()).durable.result(timeout=60)


def database_is_up(brain: Brain) -> bool:
    return brain.meters.registry.get_sample_value(BRAIN_DATABASE_UP) == 1


def running_jobs(brain: Brain) -> float | None:
    return brain.meters.registry.get_sample_value(BRAIN_JOBS)


def test_profiles_lead_to_a_plan(start_brain: MakeBrain, rounds: Queue[None]) -> None:
    brain = start_brain()
    first, durable = brain.submit(submitted(current=TWO))
    assert first.version == 0
    assert durable.result(timeout=60)
    assert brain.report(JOB, [profile(1), profile(2)], ()).durable.result(timeout=60)
    while plan_of(brain).shape.workers != 3:
        rounds.get(timeout=60)
    plan = plan_of(brain)
    assert plan.planner == "growing"
    while f'emberscale_brain_plans_total{{action="Scale"}} {plan.version}' not in metrics(brain):
        rounds.get(timeout=60)


def test_a_fixed_job_counts_but_is_never_planned(open_brain: MakeBrain) -> None:
    brain = open_brain("cluster.cpu=23")
    brain.submit(submitted(fixed=True, current=TWO))
    other = plan_for(brain, submitted(JobId("other")))
    assert other.action == "Wait"
    brain.report(JOB, [profile(1)], ())
    assert planned(brain).version == 0
    assert "emberscale_brain_planning_seconds_count 1.0" in metrics(brain)


@pytest.mark.parametrize(("planner", "how"), [("raising", "raised: ZeroDivisionError"), ("stalling", "stalled")])
def test_a_planner_that_fails_leaves_the_last_good_plan_and_recovers(
    open_brain: MakeBrain, trouble: Path, planner: str, how: str
) -> None:
    brain = open_brain(f"planner.name={planner}", "planning.timeout=5")
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    good = planned(brain)
    assert (good.version, good.shape.workers) == (1, 3)
    trouble.touch()
    brain.report(JOB, [profile(2, workers=5)], ())
    stale = planned(brain)
    assert how in stale.stale_because
    assert (stale.version, stale.shape) == (good.version, good.shape)
    cause = {"how": how.partition(":")[0]}
    assert brain.meters.registry.get_sample_value(BRAIN_PLANNING_FAILURES_TOTAL, cause) == 1
    trouble.unlink()
    brain.report(JOB, [profile(3, workers=8)], ())
    again = planned(brain)
    assert (again.shape.workers, again.stale_because) == (9, "")


def test_jobs_that_come_do_not_make_a_planner_that_fails_try_without_pause(
    start_brain: MakeBrain, trouble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble.touch()
    tried: Queue[tuple[float, float]] = Queue()
    plan_once = Brain.plan_once

    def plan_and_submit(brain: Brain) -> None:
        began = time.monotonic()
        plan_once(brain)
        ended = time.monotonic()
        brain.submit(submitted(JobId(f"newcomer-{ended}"), current=TWO))
        tried.put((began, ended))

    monkeypatch.setattr(Brain, "plan_once", plan_and_submit)
    brain = start_brain("planner.name=raising", "planning.interval=600")
    brain.submit(submitted(current=TWO))
    (began, ended), (again, _) = tried.get(timeout=60), tried.get(timeout=60)
    assert again - ended >= ended - began


def planning_process() -> int:
    """The id of the planning process of this process's brain."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    (found,) = (pid for pid in children if b"planning_process" in Path("/proc", pid, "cmdline").read_bytes())
    return int(found)


def test_a_planning_process_that_was_stopped_is_replaced_however_much_is_to_be_told(open_brain: MakeBrain) -> None:
    brain = open_brain("planning.timeout=5", "cluster.cpu=1000")
    brain.submit(submitted(current=TWO))
    brain.plan_once()
    stopped = planning_process()
    os.kill(stopped, signal.SIGSTOP)
    brain.report(JOB, [profile(sequence) for sequence in range(2000)], ())
    assert "stalled: the planning process read nothing" in planned(brain).stale_because
    again = planned(brain)
    assert (again.shape.workers, again.stale_because) == (3, "")
    assert planning_process() != stopped


def test_changes_that_did_not_reach_the_planning_process_are_told_to_the_next_one(
    open_brain: MakeBrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    brain, feed = open_brain(), PlanningProcess.feed
    brain.submit(submitted(current=TWO))
    brain.plan_once()
    errors = [OSError(errno.EMFILE, "too many open files")]

    def fail_once(self: PlanningProcess, past: Iterable[PastJob], changes: Iterable[Change], timeout: float) -> None:
        if errors:
            raise errors.pop()
        feed(self, past, changes, timeout)

    monkeypatch.setattr(PlanningProcess, "feed", fail_once)
    brain.report(JOB, [profile(1)], ())
    assert "too many open files" in planned(brain).stale_because
    told = planned(brain)
    assert (told.shape.workers, told.reason, told.stale_because) == (3, "1 profiles", "")


@pytest.mark.parametrize(
    ("planner", "complaint"),
    [
        ("greedy", "beyond its bounds"),
        ("sulking", "has no method plan(cluster, now)"),
        ("missing", "cannot be imported"),
        ("babbling", "raised: UnicodeEncodeError"),
        ("leaving", "crashed: the planning process ended with status 3"),
    ],
)
def test_a_planner_that_is_unusable_is_named_and_nothing_changes(
    open_brain: MakeBrain, planner: str, complaint: str
) -> None:
    brain = open_brain(f"planner.name={planner}")
    first = plan_for(brain, submitted())
    stale = planned(brain)
    assert complaint in stale.stale_because
    assert (stale.version, stale.shape) == (first.version, first.shape)


def test_an_error_of_the_brain_itself_is_told_and_planning_goes_on(
    start_brain: MakeBrain, rounds: Queue[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = start_brain("planning.interval=1h")
    adopt, errors = BrainRuntime.adopt, [ZeroDivisionError("no such luck")]

    def adopt_and_fail_once(*given: Any) -> list[PlanMade]:
        made = adopt(*given)
        if made and errors:
            raise errors.pop()
        return made

    monkeypatch.setattr(BrainRuntime, "adopt", adopt_and_fail_once)
    brain.submit(submitted(current=TWO))
    rounds.get(timeout=60)
    assert 'how="internal"} 1.0' in metrics(brain)
    brain.report(JOB, [profile(1, workers=5)], ())
    brain.submit(submitted(JobId("newcomer"), current=TWO))  # the next round begins at once
    while plan_of(brain).shape.workers != 6:
        rounds.get(timeout=60)
    assert (plan_of(brain).version, plan_of(brain).stale_because) == (2, "")


def test_plans_for_more_than_the_cluster_has_are_refused_whole(open_brain: MakeBrain) -> None:
    brain = open_brain("cluster.cpu=15")
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    assert "16 cores in all, of 15" in planned(brain).stale_because
    assert brain.plan(JOB).version == 0


def test_a_full_cluster_lets_jobs_wait_and_says_so(start_brain: MakeBrain) -> None:
    brain = start_brain("cluster.cpu=35", "planning.interval=1h")
    assert plan_for(brain, submitted()).shape.workers == 6
    waiting = plan_for(brain, submitted(JobId("other")))
    assert (waiting.action, waiting.HasField("shape")) == ("Wait", False)
    assert "12 cores are needed and 7 of 35 are free, for no more than 2 workers" in waiting.reason


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cluster.cpu=11", "12 cores are needed and 11 of 11 are free"),
        ("quotas={ann: {cpu: 11}}", "12 cores are needed and 11 of"),
    ],
)
def test_a_job_that_exceeds_the_empty_cluster_or_its_quota_is_refused(
    start_brain: MakeBrain, setting: str, said: str
) -> None:
    first = plan_for(start_brain(setting, "planning.interval=1h"), submitted())
    assert (first.action, first.HasField("shape")) == ("Refuse", False)
    assert said in first.reason


def test_a_first_plan_is_cut_to_what_is_free_and_says_so(start_brain: MakeBrain) -> None:
    brain = start_brain("cluster.cpu=45", "planning.interval=1h")
    assert plan_for(brain, submitted()).shape.workers == 6
    cut = plan_for(brain, submitted(JobId("other")))
    assert (cut.action, cut.shape.workers) == ("Start", 3)
    assert "cut to 3 workers x 4 cores" in cut.reason
    assert "28 cores are needed and 17 of 45 are free" in cut.reason


def test_a_first_plan_keeps_to_the_owners_quota_and_the_largest_node(start_brain: MakeBrain) -> None:
    brain = start_brain(
        "quotas={ann: {cpu: 3}}", "cluster.largestNodeCpu=2", "bounds.cpuStep=0.5", "planning.interval=1h"
    )
    free = ShapeBounds(cpu_step=0.5, worker_cpu=(0.5, 16), ps_cpu=(0.5, 16))
    shape = plan_for(brain, submitted(bounds=free)).shape
    assert max(shape.worker_cpu, shape.ps_cpu) <= 2
    assert shape.workers * shape.worker_cpu + shape.ps * shape.ps_cpu == 3


def test_memory_is_a_guess_only_where_no_job_was_similar(start_brain: MakeBrain) -> None:
    brain = start_brain("planning.interval=1h", "cluster.memory=14Gi")
    free = replace(BOUNDS, workers=(1, 2), worker_memory=(1 * GIB, 8 * GIB), ps_memory=(1 * GIB, 64 * GIB))
    large = JobShape(1, 1, 4, 4, 4 * GIB, 8 * GIB)
    cold = plan_for(brain, submitted(bounds=replace(free, worker_memory=(8 * GIB, 8 * GIB))))
    assert (cold.action, cold.shape.worker_memory) == ("Start", 8 * GIB)
    assert cold.shape.ps_memory <= 6 * GIB
    brain.end(JobEnded(JOB, "Complete", time.time(), final_shape=large)).result(timeout=60)
    warm = plan_for(brain, submitted(JobId("second"), free))
    assert warm.action == "Start"
    assert warm.shape.ps_memory >= 8 * GIB
    waiting = plan_for(brain, submitted(JobId("third"), free))
    assert waiting.action == "Wait"
    assert "GiB are needed" in waiting.reason


def test_a_restarted_brain_has_the_plan_and_its_reasons(open_brain: MakeBrain) -> None:
    first = open_brain()
    first.submit(submitted(current=TWO))
    first.report(JOB, [profile(1), profile(2)], ())
    plan = planned(first)
    assert plan.shape.workers == 3
    first.stop()
    again = open_brain("planner.name=missing")
    assert plan_of(again).shape == plan.shape
    explained = explain(again)
    assert explained.fit.profiles == 3
    assert [point.profile.samples for point in explained.measured] == [1000, 2000]
    assert again.report(JOB, [profile(2)], ()).accepted == 1
    assert len(explain(again).measured) == 2


def test_a_restarted_brain_says_of_a_plan_that_was_kept_what_it_said_before(
    open_brain: MakeBrain, tmp_path: Path
) -> None:
    brain = open_brain("planner.name=content")
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    plan = planned(brain)
    assert (plan.version, plan.action, plan.reason) == (1, "Scale", "1 profiles")
    brain.report(JOB, [profile(2, workers=3)], ())
    brain.plan_once()
    assert explain(brain).kept == "2 profiles"
    assert written(brain)
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    assert store.plans(JOB, 1)[0].kept == "2 profiles"
    store.close()
    before = explain(brain)
    brain.stop()
    after = explain(open_brain("planner.name=missing"))
    assert (after.plan.version, after.plan.action, after.plan.reason) == (1, "Scale", "1 profiles")
    assert (after.plan.shape, after.kept) == (before.plan.shape, "2 profiles")


def test_an_ended_job_is_history_for_others_and_still_explained(open_brain: MakeBrain) -> None:
    brain = open_brain()
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    assert planned(brain).version == 1
    assert brain.end(JobEnded(JOB, "Complete", time.time())).result(timeout=60)
    with pytest.raises(UnknownJobError):
        brain.plan(JOB)
    with pytest.raises(UnknownJobError):
        brain.end(JobEnded(JOB, "Complete", time.time()))
    assert explain(brain).plan.version == 1
    with pytest.raises(UnknownJobError):
        brain.explain(JobId("never"))
    assert running_jobs(brain) == 0
    warm = plan_for(brain, submitted(JobId("next")))
    assert warm.shape.workers == 2
    assert "warm start" in warm.reason


def test_refused_profiles_change_nothing(start_brain: MakeBrain) -> None:
    brain = start_brain("planning.interval=1h")
    brain.submit(submitted(current=TWO))
    reported = brain.report(JOB, [profile(1, throughput=math.nan), profile(2, throughput=-1.0)], ())
    assert (reported.accepted, [sequence for sequence, _ in reported.refused]) == (0, [1, 2])
    assert brain.explain(JOB).profiles == ()
    assert brain.report(JobId("nobody"), [profile(1)], ()).accepted == 0
    text = metrics(brain)
    for result in ("NotFinite", "Negative", "UnknownJob"):
        assert f'emberscale_brain_profiles_total{{result="{result}"}} 1.0' in text


def test_a_job_that_reports_without_pause_does_not_fill_the_database_of_all(open_brain: MakeBrain) -> None:
    """Each profile may have kilobytes, and old ones are removed once an hour."""
    now = [time.time() + 60.0]
    brain = open_brain("planning.interval=1h", clock=SteadyClock(lambda: now[0], lambda: now[0]))
    for job in (JOB, JobId("other")):
        brain.submit(replace(submitted(current=TWO), job=job))
    accepted, refused = 0, list[tuple[int, Refused]]()
    for first in range(0, 10_000, 1000):
        if first == 5000:  # ended and submitted again, it has no more room
            brain.end(JobEnded(JOB, "Suspended", now[0]))
            brain.submit(submitted(current=TWO))
        reports = [replace(profile(1), sequence=first + place) for place in range(1000)]
        said = brain.report(JOB, reports, [StartUpObserved(JOB, "ps", float(first), 1.0)])
        accepted += said.accepted
        refused += [*said.refused, *said.refused_start_ups]
    assert accepted <= 4096
    assert {problem.reason for _, problem in refused} == {Refusal.TOO_MANY}
    assert brain.report(JobId("other"), [profile(1)], ()).accepted == 1
    now[0] += 600.0
    assert brain.report(JOB, [replace(profile(1), sequence=20_000)], ()).accepted == 1


def test_what_a_job_learns_of_its_own_size_is_what_others_start_from(start_brain: MakeBrain) -> None:
    brain = start_brain("planning.interval=1h")
    brain.submit(submitted(current=TWO))
    counted = profile(1)
    brain.report(JOB, [replace(counted, profile=replace(counted.profile, total_samples=2 * 10**9))], ())
    assert brain.explain(JOB).remaining_samples == 2 * 10**9 - 1000
    assert brain.end(JobEnded(JOB, "Complete", time.time())).result(timeout=60)
    (past,) = brain._store.past_jobs(10)
    assert past.metadata.total_samples == 2 * 10**9


def test_a_job_that_says_nothing_stops_taking_room_and_may_come_back(open_brain: MakeBrain) -> None:
    passed = [0.0]
    clock = SteadyClock(monotonic=lambda: time.monotonic() + passed[0])
    brain = open_brain("planning.silence=1h", clock=clock)
    brain.submit(submitted(current=TWO))
    assert running_jobs(brain) == 1
    passed[0] = 3599.0
    brain.plan_once()
    assert running_jobs(brain) == 1
    passed[0] = 3601.0
    brain.plan_once()
    assert running_jobs(brain) == 0
    assert brain.report(JOB, [profile(1)], ()).refused[0][1].reason.value == "UnknownJob"
    brain.submit(submitted(current=TWO))
    assert brain.report(JOB, [profile(2)], ()).accepted == 1


def test_a_job_that_waits_and_asks_for_its_plan_is_not_silent(open_brain: MakeBrain) -> None:
    """Such a job has nothing to report."""
    passed = [0.0]
    clock = SteadyClock(monotonic=lambda: time.monotonic() + passed[0])
    brain = open_brain("planning.silence=1h", "cluster.cpu=1", clock=clock)
    assert plan_for(brain, submitted()).version == 1
    for hours in (0.9, 1.8):
        passed[0] = hours * 3600
        brain.plan_once()
        assert plan_of(brain).version == 1
    passed[0] = 2.9 * 3600
    brain.plan_once()
    assert running_jobs(brain) == 0


def test_a_brain_beside_a_job_takes_no_other_over(start_brain: MakeBrain) -> None:
    before = start_brain("planning.interval=1h")
    assert before.submit(submitted(current=TWO))[1].result(timeout=60)
    before.stop()
    assert start_brain("planning.interval=1h").plan(JOB).job == JOB
    after = start_brain("planning.interval=1h", "planning.takeOver=false")
    assert running_jobs(after) == 0
    assert after.submit(submitted(current=TWO))[1].result(timeout=60)
    assert running_jobs(after) == 1


def test_a_job_learns_how_it_recovers_best_even_if_its_sizes_are_fixed(open_brain: MakeBrain) -> None:
    brain = open_brain()
    brain.submit(submitted(fixed=True, current=TWO))
    slow, quick = profile(1), profile(2)
    brain.report(JOB, [replace(slow, profile=replace(slow.profile, checkpoint_cost=4.0))], ())
    plan = planned(brain)
    assert (plan.version, plan.fault_tolerance.strategy) == (0, "FullRecovery")
    ways = ["FullRecovery", "PartialRecovery", "PartialRecovery with priority"]
    assert [way.strategy for way in plan.fault_tolerance.ways] == ways
    brain.report(JOB, [replace(quick, profile=replace(quick.profile, checkpoint_cost=0.04))], ())
    rarer = plan.fault_tolerance.checkpoint_interval
    sooner = planned(brain)
    assert sooner.fault_tolerance.checkpoint_interval == pytest.approx(rarer / 10, rel=0.01)


def test_the_advice_outlives_the_job(open_brain: MakeBrain) -> None:
    brain = open_brain()
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    assert planned(brain).HasField("fault_tolerance")
    assert brain.end(JobEnded(JOB, "Complete", time.time())).result(timeout=60)
    assert "FullRecovery is expected to cost" in explain(brain).plan.fault_tolerance.reason


def test_plans_of_a_job_that_comes_back_have_versions_above_those_that_it_followed(open_brain: MakeBrain) -> None:
    brain = open_brain()
    assert brain.submit(submitted(last_plan=6))[0].version == 7
    brain.report(JOB, [profile(1, workers=9)], ())
    plan = planned(brain)
    assert (plan.version, plan.shape.workers) == (8, 10)
    other = JobId("other")
    brain.submit(submitted(other, current=TWO, last_plan=3))
    brain.report(other, [replace(profile(1), job=other)], ())
    brain.plan_once()
    assert brain.plan(other).version == 4


def test_nobody_waits_while_a_newcomer_is_compared_with_past_jobs(
    start_brain: MakeBrain, submission: Callable[..., pb.SubmitJobRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = start_brain("planning.interval=1h")
    brain.submit(submitted(current=TWO))
    answered = threading.Event()

    def compare_for_long(*given: object) -> WarmStart:
        assert answered.wait(timeout=60)
        return warm_start(*given)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr("emberscale_brain.service.brain.warm_start", compare_for_long)

    async def ask() -> pb.SubmitJobReply:
        servicer = BrainServicer(brain, load_settings(None), asyncio.get_running_loop())
        newcomer = asyncio.ensure_future(servicer.SubmitJob(submission("newcomer"), NO_DEADLINE))
        await asyncio.sleep(0)
        assert (await servicer.GetPlan(pb.GetPlanRequest(job_uid=JOB), context=None)).version == 0
        assert brain.report(JOB, [profile(1)], ()).accepted == 1
        assert not newcomer.done()
        answered.set()
        return await newcomer

    reply = asyncio.run(ask())
    assert (reply.plan.version, reply.plan.action) == (1, "Start")


@pytest.mark.parametrize("jump", [7 * 86_400.0, -7 * 86_400.0])
def test_a_clock_that_is_set_neither_ends_a_job_nor_freezes_it(open_brain: MakeBrain, jump: float) -> None:
    set_by = [0.0]
    brain = open_brain("planning.adoption=1h", clock=SteadyClock(wall=lambda: time.time() + set_by[0]))
    brain.submit(submitted(current=TWO))

    def report(sequence: int, workers: int) -> None:
        made = profile(sequence, workers)
        at = replace(made.profile, time=time.time() + set_by[0])
        assert brain.report(JOB, [replace(made, profile=at)], ()).accepted == 1

    report(1, 2)
    assert planned(brain).shape.workers == 3
    set_by[0] = jump
    report(2, 3)  # the job has adopted the shape
    assert planned(brain).shape.workers == 4
    times = [point.profile.time for point in explain(brain).measured]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3600
    assert running_jobs(brain) == 1
