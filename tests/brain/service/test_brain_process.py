import math
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from brain_process import BrainProcess
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import brain_pb2_grpc
from emberscale_api.rpc.token import open_channel
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId
from ports import free_port

Submission = Callable[..., pb.SubmitJobRequest]
RunBrain = Callable[..., BrainProcess]
PLAN = pb.GetPlanRequest(job_uid="job-1")


def profile(sequence: int, workers: int = 2, **changes: float) -> pb.Profile:
    made = pb.Profile(
        sequence=sequence,
        time=time.time(),
        shape=pb.Shape(workers=workers, ps=1, worker_cpu=4, ps_cpu=4, worker_memory=4 << 30, ps_memory=8 << 30),
        batch_size=512,
        iteration_seconds=0.1,
        throughput=workers * 5120,
        samples=1000 * min(sequence, 1 << 40),
    )
    made.MergeFrom(pb.Profile(**changes))  # type: ignore[arg-type]  # fields by keyword
    return made


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details() or ""


def test_a_job_from_submission_to_history(run_brain: RunBrain, submission: Submission) -> None:
    metrics_port = free_port()
    brain = run_brain(f"metrics=127.0.0.1:{metrics_port}")
    stub = brain.stub

    # invalid requests, and callers without the right
    assert refusal(lambda: stub.SubmitJob(pb.SubmitJobRequest())) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "job_uid: is required",
    )
    code, details = refusal(lambda: stub.SubmitJob(pb.SubmitJobRequest(job_uid="a")))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "description: batch_size must be at least 1, not 0")
    assert refusal(lambda: stub.GetPlan(PLAN))[0] is grpc.StatusCode.NOT_FOUND
    with open_channel(brain.address, "another") as channel:
        stranger = brain_pb2_grpc.BrainStub(channel)
        assert refusal(lambda: stranger.SubmitJob(submission()))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert refusal(lambda: stranger.GetPlan(PLAN))[0] is grpc.StatusCode.UNAUTHENTICATED

    # a job and its plans
    first = stub.SubmitJob(submission())
    assert first.durable
    assert (first.plan.version, first.plan.action) == (1, "Start")
    assert "cold start" in first.plan.reason
    assert brain.report("job-1", profile(1), profile(2)).accepted == 2
    plan = brain.later_plan("job-1", 1)
    assert plan.shape.workers == 3
    explained = stub.ExplainPlan(pb.ExplainPlanRequest(job_uid="job-1"))
    assert explained.fit.profiles == 3
    assert explained.measured[1].predicted > 0
    assert [before.version for before in explained.earlier][-1] == 1
    assert stub.SubmitJob(submission()).plan.version >= plan.version

    # invalid profiles
    reply = brain.report(
        "job-1",
        profile(3, throughput=math.nan),
        profile(4, iteration_seconds=-1.0),
        profile(5, time=time.time() + 3600),
        profile(6, batch_size=17),
        profile(1 << 63),
        profile(7),
    )
    assert reply.accepted == 1
    assert {(item.sequence, item.reason) for item in reply.refused} == {
        (3, "NotFinite"),
        (4, "Negative"),
        (5, "FromTheFuture"),
        (6, "Inconsistent"),
        (1 << 63, "Inconsistent"),
    }
    assert all(item.message for item in reply.refused)
    start_up = pb.StartUp(role="ps", seconds=20)
    mixed = stub.ReportProfile(
        pb.ReportProfileRequest(
            job_uid="job-1",
            profiles=[profile(8)],
            start_ups=[start_up, pb.StartUp(role="ps", seconds=math.nan), pb.StartUp(role="cook", seconds=1)],
        )
    )
    assert (mixed.accepted, mixed.durable) == (1, True)
    assert [(item.place, item.reason, item.message) for item in mixed.refused_start_ups] == [
        (1, "NotFinite", "seconds is nan"),
        (2, "Inconsistent", "role: must be worker or ps"),
    ]
    unknown = brain.report("nobody", profile(1))
    assert (unknown.accepted, unknown.refused[0].reason) == (0, "UnknownJob")
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics").read().decode()
    assert "emberscale_brain_jobs 1.0" in metrics
    assert 'emberscale_brain_profiles_total{result="Accepted"} 4.0' in metrics
    assert 'emberscale_brain_profiles_total{result="Inconsistent"} 2.0' in metrics
    assert 'emberscale_brain_profiles_total{result="UnknownJob"} 1.0' in metrics
    for result in ("Accepted", "NotFinite", "Inconsistent"):
        assert f'emberscale_brain_start_ups_total{{result="{result}"}} 1.0' in metrics

    # the end of the job
    assert refusal(lambda: stub.ReportOutcome(pb.ReportOutcomeRequest(job_uid="job-1", phase="Done")))[1].startswith(
        "phase: must be Complete, Failed, Suspended"
    )
    assert stub.ReportOutcome(pb.ReportOutcomeRequest(job_uid="job-1", phase="Complete")).durable
    assert refusal(lambda: stub.GetPlan(PLAN))[0] is grpc.StatusCode.NOT_FOUND
    assert stub.ExplainPlan(pb.ExplainPlanRequest(job_uid="job-1")).fit.profiles == 3
    warm = stub.SubmitJob(submission("job-2")).plan
    assert "warm start" in warm.reason
    assert warm.shape.workers == 2


def test_a_killed_brain_has_every_profile_that_it_confirmed(
    run_brain: RunBrain, submission: Submission, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    brain = run_brain("planning.interval=1h")
    jobs = [f"job-{number}" for number in range(6)]
    for job in jobs:
        while not brain.stub.SubmitJob(submission(job)).durable:  # an answer waits only so long for a busy disk
            pass
    confirmed: dict[str, int] = dict.fromkeys(jobs, 0)
    enough = threading.Barrier(len(jobs) + 1)

    def keep_reporting(job: str) -> None:
        told = 0
        for sequence in range(1, 100_000):
            try:
                durable = brain.report(job, profile(sequence)).durable
            except grpc.RpcError:
                return
            if durable:
                confirmed[job], told = sequence, told + 1
                if told == 20:
                    enough.wait(timeout=600)

    reporters = [threads.submit(keep_reporting, job) for job in jobs]
    enough.wait(timeout=600)
    brain.kill()
    for reporter in reporters:
        reporter.result(timeout=60)
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    for job in jobs:
        assert confirmed[job] >= 20
        kept = store.profiles(JobId(job), 100_000)
        assert [item.samples for item in kept][: confirmed[job]] == [1000 * n for n in range(1, confirmed[job] + 1)]
    store.close()

    again = run_brain()
    assert [again.stub.GetPlan(pb.GetPlanRequest(job_uid=job)).job_uid for job in jobs] == jobs
    resent = again.report(jobs[0], *(profile(n) for n in range(1, confirmed[jobs[0]] + 1)))
    assert resent.accepted == confirmed[jobs[0]]
    assert again.later_plan(jobs[0], 1).shape.workers == 3


def test_of_two_brains_on_one_database_the_later_goes_on_and_the_other_says_why_it_ends(
    run_brain: RunBrain, submission: Submission
) -> None:
    first = run_brain("planning.interval=1h")
    assert first.stub.SubmitJob(submission()).durable
    second = run_brain("planning.interval=1h")
    assert not first.report("job-1", profile(1)).durable
    assert first.end() == 3
    (why,) = [line for line in first.log.read_text().splitlines() if '"superseded"' in line]
    assert f"another brain has the database now, process {second.pid} on " in why
    assert "end one of the two, or give each a database of its own" in why
    assert second.report("job-1", profile(1)).durable
    assert second.stub.GetPlan(PLAN).version >= 1, "it has the plan of the first, unless it has planned since"


def test_a_brain_that_is_started_twice_at_one_address_leaves_the_first_alone(
    run_brain: RunBrain, submission: Submission
) -> None:
    metrics = f"metrics=127.0.0.1:{free_port()}"
    first = run_brain(metrics)
    with pytest.raises(RuntimeError, match="address_unavailable"):
        run_brain(metrics)
    assert first.stub.SubmitJob(submission()).durable


def test_a_database_that_is_none_is_said_at_the_start(run_brain: RunBrain, tmp_path: Path) -> None:
    (tmp_path / "brain.db").write_text("This is no database.\n" * 100)
    with pytest.raises(RuntimeError, match=r'"problem": "file is not a database", "database": "sqlite:.*brain\.db"'):
        run_brain()


def test_brains_beside_jobs_on_one_machine_share_a_database(
    run_brain: RunBrain, submission: Submission, tmp_path: Path
) -> None:
    brains = {job: run_brain("planning.takeOver=false", "planning.interval=1h") for job in ("job-1", "job-2")}
    for job, brain in brains.items():
        assert brain.stub.SubmitJob(submission(job)).durable
    for job, brain in brains.items():
        assert brain.report(job, profile(1)).durable
        assert brain.stub.ReportOutcome(pb.ReportOutcomeRequest(job_uid=job, phase="Complete")).durable
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    assert [len(store.profiles(JobId(job), 10)) for job in brains] == [1, 1]
    store.close()


def test_everything_is_answered_while_the_planner_hangs_and_it_ends_with_the_brain(
    run_brain: RunBrain, submission: Submission, trouble: Path
) -> None:
    trouble.touch()
    brain = run_brain("planner.name=stalling", "planning.timeout=1h", "cluster.cpu=10000")
    for number in range(20):
        assert brain.stub.SubmitJob(submission(f"job-{number}"), timeout=60).plan.version == 1
    brain.report("job-1", profile(1))
    assert brain.stub.GetPlan(PLAN, timeout=60).version == 1
    assert len(brain.stub.ExplainPlan(pb.ExplainPlanRequest(job_uid="job-1"), timeout=60).earlier) == 0
    planners = psutil.Process(brain.pid).children()
    assert planners
    brain.stop()
    assert "stopped" in brain.log.read_text()
    assert psutil.wait_procs(planners, timeout=60)[1] == []
