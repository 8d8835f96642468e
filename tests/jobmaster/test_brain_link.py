"""The conversation with the brain: what it is told, which plans are followed, and that nothing waits for it."""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.small_job import FILE, TOKEN, job

from emberscale_api.rpc import brain_pb2 as brain
from emberscale_api.rpc import brain_pb2_grpc
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.token import TokenCheck
from emberscale_jobmaster import brain_link, scaling
from emberscale_jobmaster.brain_link import BrainLink
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.store import JobStore, StoreUnavailableError
from ports import free_port
from redis_process import RedisProcess

GIB = 1 << 30
OPEN = {
    "ps": {"replicas": None, "maxReplicas": 4},
    "worker": {"replicas": None, "maxReplicas": 4},
    "scaling": {"profileInterval": "100ms", "cooldown": "0s"},
}
SIZED = {"replicas": 1, "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}


class PlanningBrain(brain_pb2_grpc.BrainServicer):
    """Answers with the plan that the test sets, and remembers what it was told."""

    def __init__(self) -> None:
        self.plan = brain.BrainPlan()
        self.known: set[str] = set()
        self.submitted: list[brain.SubmitJobRequest] = []
        self.profiles: list[brain.Profile] = []
        self.start_ups: list[brain.StartUp] = []
        self.outcomes: list[brain.ReportOutcomeRequest] = []
        self.reports: list[brain.ReportProfileRequest] = []
        self.durable = True
        self.away = self.forgetful = False
        self.missed: list[brain.StartUp] = []
        self.asked = 0
        self._told = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(8), interceptors=[TokenCheck(TOKEN)])
        brain_pb2_grpc.add_BrainServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def until(self, look: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Waits until `look` finds something true after a call of a master."""
        with self._told:
            assert self._told.wait_for(look, seconds), f"not within {seconds:g} s: {what}"

    def plans(self, workers: int, ps: int) -> None:
        shape = brain.Shape(workers=workers, ps=ps, worker_cpu=1, ps_cpu=1, worker_memory=GIB, ps_memory=GIB)
        self.plan = brain.BrainPlan(
            version=self.plan.version + 1, action="Scale", shape=shape, reason=f"{workers} and {ps} are best"
        )

    def has_no_room(self) -> None:
        self.plan = brain.BrainPlan(version=self.plan.version + 1, action="Wait", reason="1 core of 8 is free")

    def forget(self) -> None:
        self.known.clear()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def SubmitJob(self, request: brain.SubmitJobRequest, context: grpc.ServicerContext) -> brain.SubmitJobReply:
        with self._told:
            self.known.add(request.job_uid)
            self.submitted.append(request)
            self._told.notify_all()
        return brain.SubmitJobReply(plan=self.plan, durable=True)

    def ReportProfile(
        self, request: brain.ReportProfileRequest, context: grpc.ServicerContext
    ) -> brain.ReportProfileReply:
        if self.away:
            self._miss(request.start_ups)
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if self.forgetful or request.job_uid not in self.known:
            self._miss(request.start_ups)
            refused = [
                brain.RefusedProfile(sequence=profile.sequence, reason="UnknownJob") for profile in request.profiles
            ]
            start_ups = [
                brain.RefusedStartUp(place=place, reason="UnknownJob") for place in range(len(request.start_ups))
            ]
            return brain.ReportProfileReply(refused=refused, refused_start_ups=start_ups)
        with self._told:
            self.profiles.extend(request.profiles)
            self.start_ups.extend(request.start_ups)
            self.reports.append(request)
            self._told.notify_all()
            return brain.ReportProfileReply(accepted=len(request.profiles), durable=self.durable)

    def _miss(self, start_ups: Iterable[brain.StartUp]) -> None:
        with self._told:
            self.missed.extend(start_ups)
            self._told.notify_all()

    def GetPlan(self, request: brain.GetPlanRequest, context: grpc.ServicerContext) -> brain.BrainPlan:
        if request.job_uid not in self.known:
            context.abort(grpc.StatusCode.NOT_FOUND, "not known")
        with self._told:
            self.asked += 1
            self._told.notify_all()
            return self.plan

    def ReportOutcome(
        self, request: brain.ReportOutcomeRequest, context: grpc.ServicerContext
    ) -> brain.ReportOutcomeReply:
        with self._told:
            self.outcomes.append(request)
            self._told.notify_all()
        return brain.ReportOutcomeReply(durable=True)


@pytest.fixture
def advisor() -> Iterator[PlanningBrain]:
    planning = PlanningBrain()  # type: ignore[abstract]  # masters ask for no more
    yield planning
    planning.stop()


def plans_of(cluster: Cluster) -> Iterator[dict[int, int]]:
    """Yields the numbers of processes of every plan of the master, from the newest on."""
    for plan in cluster.caller().stub.WatchPlan(pb.WatchPlanRequest(), timeout=60):
        yield {role.role: role.replicas for role in plan.roles}


def wanted(cluster: Cluster) -> dict[int, int]:
    return next(plans_of(cluster))


def wait_for_workers(cluster: Cluster, number: int) -> None:
    next(plan for plan in plans_of(cluster) if plan[pb.WORKER] == number)


def test_a_job_without_sizes_starts_nobody_until_the_brain_has_answered(
    cluster: Cluster, advisor: PlanningBrain
) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    cluster.start_master()
    advisor.until(lambda: advisor.submitted, "the submission")
    assert wanted(cluster)[pb.PS] == wanted(cluster)[pb.WORKER] == 0
    assert cluster.status().reason == "WaitingForPlan"
    (submitted, *_) = advisor.submitted
    assert not submitted.fixed
    assert not submitted.HasField("current")
    assert (submitted.limits.most.workers, submitted.limits.most.ps) == (4, 4)
    advisor.plans(workers=3, ps=2)
    wait_for_workers(cluster, 3)
    assert wanted(cluster)[pb.PS] == 2
    assert "3 and 2 are best" in cluster.status().sizing.message


def test_profiles_are_reported_plans_followed_and_the_end_told(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=1, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan")
    cluster.start_ps(0)
    last = threading.Event()
    first = cluster.start_worker(0, pace=0.05, last=last)
    cluster.until_phase(pb.TRAINING)
    advisor.until(lambda: any(not profile.restarted for profile in advisor.profiles), "a measurement in steady state")
    advisor.plans(workers=2, ps=2)
    cluster.until(lambda status: status.sizing.scalings == 1, "a change of shape")
    cluster.start_worker(1, last=last)
    cluster.start_ps(1)
    first.pace = 0.0
    last.set()
    ended = cluster.completes()
    assert ended.recoveries == 0
    advisor.until(lambda: advisor.outcomes, "the outcome")
    (outcome,) = advisor.outcomes
    assert (outcome.phase, outcome.final_shape.workers, outcome.final_shape.ps) == ("Complete", 2, 2)
    steady = [profile for profile in advisor.profiles if not profile.restarted]
    assert {profile.shape.workers for profile in steady} >= {1}
    assert all(profile.total_samples == 400 and profile.throughput > 0 for profile in steady)
    sequences = [profile.sequence for profile in advisor.profiles]
    assert sequences == sorted(set(sequences))
    assert "worker" in {start_up.role for start_up in advisor.start_ups}


def test_without_a_brain_the_job_starts_as_the_manifest_says(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "FIRST_PLAN_SECONDS", 0.2)
    cluster.configure(**OPEN)
    cluster.brain_address = f"127.0.0.1:{free_port()}"
    cluster.start_master()
    waited = cluster.until(lambda status: status.sizing.reason == "NoPlan", "the end of the wait")
    assert "gave no plan within" in waited.sizing.message
    cluster.start_ps(0)
    cluster.start_worker(0)
    cluster.completes()


@pytest.mark.parametrize("ends", ["room", "silence"])
def test_a_job_waits_for_room_while_the_brain_answers(
    cluster: Cluster, advisor: PlanningBrain, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(scaling, "FIRST_PLAN_SECONDS", 0.2)
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.has_no_room()
    cluster.start_master()
    advisor.until(lambda: advisor.asked > 5, "questions for longer than a job waits for a brain")
    waiting = cluster.status()
    assert (waiting.reason, waiting.message) == ("WaitingForRoom", "waits at most 10m for room: 1 core of 8 is free")
    assert wanted(cluster)[pb.PS] == wanted(cluster)[pb.WORKER] == 0
    if ends == "room":
        advisor.plans(workers=3, ps=2)
        wait_for_workers(cluster, 3)
    else:
        advisor.stop()
        told = cluster.until(lambda status: status.sizing.reason == "NoPlan", "the end of the wait")
        assert "gave no plan within" in told.sizing.message


class EndpointConnectionError(Exception):
    """As that of botocore, which is no OSError."""


@pytest.fixture
def defects(monkeypatch: pytest.MonkeyPatch) -> list[threading.ExceptHookArgs]:
    """What threads have died of, each of which ends a master."""
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    return died


@pytest.fixture(params=["fails", "hangs"])
def broken_storage(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Storage of the training data, not of the checkpoints, of which nothing can be learned."""
    released, reachable = threading.Event(), fsspec.core.url_to_fs

    def url_to_fs(uri: str) -> Any:
        if uri != FILE:
            return reachable(uri)
        if request.param == "hangs":
            released.wait()
        raise EndpointConnectionError("no route to the endpoint")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    yield
    released.set()


@pytest.mark.usefixtures("broken_storage")
def test_storage_that_tells_no_size_keeps_no_job_from_starting(
    cluster: Cluster,
    advisor: PlanningBrain,
    monkeypatch: pytest.MonkeyPatch,
    defects: list[threading.ExceptHookArgs],
) -> None:
    monkeypatch.setattr(scaling, "FIRST_PLAN_SECONDS", 0.2)
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    cluster.start_master()
    cluster.until(lambda status: status.sizing.reason == "NoPlan", "the end of the wait", seconds=20)
    assert not defects


@pytest.mark.usefixtures("broken_storage")
def test_a_job_is_submitted_without_the_size_of_its_data_if_storage_does_not_tell(
    cluster: Cluster, advisor: PlanningBrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brain_link, "_SIZE_SECONDS", 0.2)
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=2, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan", seconds=20)
    assert [submitted.description.data_bytes for submitted in advisor.submitted] == [0]


def test_a_brain_that_dies_takes_nothing_with_it(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=1, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan")
    advisor.stop()
    cluster.start_ps(0)
    cluster.start_worker(0)
    cluster.completes()


def test_the_outcome_is_told_although_the_store_refuses_the_end_at_first(
    cluster: Cluster,
    advisor: PlanningBrain,
    monkeypatch: pytest.MonkeyPatch,
    defects: list[threading.ExceptHookArgs],
) -> None:
    refused: list[JobState] = []
    save = JobStore.save

    def refuse_the_end_once(store: JobStore, state: JobState) -> None:
        if state.over and not refused:
            refused.append(state)
            assert link_waits.wait(60)
            raise StoreUnavailableError(store.url, "away")
        save(store, state)

    link_waits = threading.Event()
    wait_until = JobRuntime.wait_until

    def note_the_link(runtime: JobRuntime, look: Callable[[JobState], Any], seconds: float | None) -> Any:
        def looked(state: JobState) -> Any:
            if state.over and threading.current_thread().name == "brain-link":
                link_waits.set()
            return look(state)

        return wait_until(runtime, looked, seconds)

    monkeypatch.setattr(JobStore, "save", refuse_the_end_once)
    monkeypatch.setattr(JobRuntime, "wait_until", note_the_link)
    cluster.configure(ps=SIZED, worker=SIZED, scaling={"profileInterval": "100ms"})
    cluster.brain_address = advisor.address
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0)
    advisor.until(lambda: advisor.outcomes, "the outcome", seconds=20)
    assert refused
    assert not defects
    cluster.completes()


def test_a_master_that_finds_its_job_over_tells_the_outcome(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(ps=SIZED, worker=SIZED)
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0)
    cluster.completes()
    cluster.stop_master()  # as if it had ended before the brain heard of it
    cluster.brain_address = advisor.address
    cluster.start_master()
    advisor.until(lambda: advisor.outcomes, "the outcome", seconds=20)
    assert [outcome.phase for outcome in advisor.outcomes] == ["Complete"]


def test_a_brain_that_has_forgotten_the_job_gets_to_know_it_again(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=1, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan")
    advisor.forget()
    advisor.until(lambda: len(advisor.submitted) > 1, "another submission")
    assert advisor.submitted[-1].current.workers == 1


def test_a_job_with_sizes_is_told_of_and_never_planned(cluster: Cluster, advisor: PlanningBrain) -> None:
    sized = {"replicas": 1, "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}
    cluster.configure(ps=sized, worker=sized, scaling={"profileInterval": "100ms"})
    cluster.brain_address = advisor.address
    advisor.plans(workers=4, ps=4)
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0)
    cluster.completes()
    advisor.until(lambda: advisor.outcomes, "the outcome")
    assert advisor.submitted[0].fixed
    assert cluster.status().sizing.scalings == 0


ADVICE = brain.FaultToleranceAdvice(strategy="FullRecovery", checkpoint_interval=0.2)


def test_the_advised_interval_of_checkpoints_is_applied_and_their_standstill_reported(
    cluster: Cluster, advisor: PlanningBrain
) -> None:
    cluster.configure(ps=SIZED, worker=SIZED, scaling={"profileInterval": "100ms"}, checkpoint={"interval": None})
    cluster.brain_address = advisor.address
    advisor.plan = brain.BrainPlan(fault_tolerance=ADVICE)
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, pace=0.02, last=threading.Event())
    advisor.until(lambda: any(profile.checkpoint_cost > 0 for profile in advisor.profiles), "a checkpoint in a profile")
    assert cluster.status().phase == pb.TRAINING


@pytest.mark.parametrize(
    "stated", [{"checkpoint": {"interval": 1000}}, {"faultTolerance": {"strategy": "FullRecovery"}}]
)
def test_what_the_manifest_says_of_recovery_stands(
    cluster: Cluster, advisor: PlanningBrain, stated: dict[str, object]
) -> None:
    cluster.configure(
        **{"ps": SIZED, "worker": SIZED, "scaling": {"profileInterval": "50ms"}, "checkpoint": {"interval": None}}
        | stated
    )
    cluster.brain_address = advisor.address
    advisor.plan = brain.BrainPlan(fault_tolerance=ADVICE)
    cluster.start_master()
    cluster.start_servers()
    advisor.until(lambda: advisor.asked > 2, "the advice")
    cluster.start_worker(0, pace=0.02)
    cluster.completes()
    assert [folder.name for folder in cluster.checkpoints.iterdir()] == ["00000001"]  # the final one


def test_a_job_that_comes_back_says_which_plan_it_followed_last(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    for workers in (1, 2, 3):
        advisor.plans(workers=workers, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan")
    advisor.forget()
    advisor.until(lambda: len(advisor.submitted) > 1, "another submission")
    assert [submitted.last_plan for submitted in advisor.submitted[:2]] == [0, 3]


def test_profiles_are_told_again_until_the_brains_database_has_them(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=1, ps=1)
    advisor.durable = False
    cluster.start_master()
    advisor.until(lambda: len(advisor.reports) > 3, "reports")
    grown = [len(report.profiles) for report in advisor.reports[:4]]
    assert grown == [1, 2, 3, 4]
    advisor.forget()
    advisor.until(lambda: len(advisor.submitted) > 1, "another submission")
    before = len(advisor.reports)
    advisor.until(lambda: len(advisor.reports) > before, "what the brain has forgotten")
    assert advisor.reports[before].profiles[0] == advisor.reports[0].profiles[0]
    advisor.durable = True
    advisor.until(lambda: len(advisor.reports[-1].profiles) == 1, "a report of what is new")


def test_profiles_count_on_when_the_clock_is_set_back(redis_server: RedisProcess, advisor: PlanningBrain) -> None:
    training = job(ps=SIZED, worker=SIZED, scaling={"profileInterval": "100ms"})
    store = JobStore(redis_server.url, uuid.uuid4().hex)
    runtime = JobRuntime(training, uuid.uuid4().hex, store, on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    link = BrainLink(runtime, advisor.address, TOKEN, clock=lambda: 1e9 if advisor.profiles else 2e9)
    link.start()
    try:
        advisor.until(lambda: len(advisor.profiles) > 2, "profiles")
    finally:
        runtime.close()
        link.close()
    assert [profile.time for profile in advisor.profiles[:3]] == [2e9, 1e9, 1e9]
    assert [profile.sequence for profile in advisor.profiles[:3]] == [2 * 10**12 + step for step in range(3)]


def test_a_master_that_closes_between_two_calls_to_the_brain_makes_no_other(
    redis_server: RedisProcess, advisor: PlanningBrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would end the process."""
    store = JobStore(redis_server.url, uuid.uuid4().hex)
    runtime = JobRuntime(job(ps=SIZED, worker=SIZED), uuid.uuid4().hex, store, on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    link = BrainLink(runtime, advisor.address, TOKEN)
    closing = threading.Thread(target=link.close)

    def close(_: brain.BrainPlan) -> None:
        runtime.close()
        closed, close_channel = threading.Event(), link._channel.close

        def close_it() -> None:
            close_channel()
            closed.set()

        monkeypatch.setattr(link._channel, "close", close_it)
        closing.start()
        closed.wait()

    monkeypatch.setattr(link, "_take", close)
    link.start()
    link._thread.join()
    closing.join()
    assert advisor.submitted
    assert not advisor.asked


@pytest.mark.parametrize("trouble", ["away", "forgetful"])
def test_start_ups_are_told_once_the_brain_hears_of_them_and_no_more(
    cluster: Cluster, advisor: PlanningBrain, trouble: str
) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    advisor.plans(workers=1, ps=1)
    cluster.start_master()
    cluster.until(lambda status: status.reason != "WaitingForPlan", "the first plan")
    setattr(advisor, trouble, True)
    cluster.start_ps(0)
    cluster.start_worker(0, pace=0.05, last=threading.Event())
    advisor.until(lambda: len(advisor.missed) > 1, "a start-up that the brain does not take, twice")
    advisor.away = advisor.forgetful = advisor.durable = False
    advisor.until(lambda: advisor.start_ups, "the start-up")
    before = len(advisor.reports)
    advisor.until(lambda: len(advisor.reports) > before + 2, "more reports")
    assert [told.role for told in advisor.start_ups] == ["worker"]


def test_a_job_that_waits_for_its_first_plan_has_no_shape_to_tell_of(cluster: Cluster, advisor: PlanningBrain) -> None:
    cluster.configure(**OPEN)
    cluster.brain_address = advisor.address
    cluster.start_master()
    advisor.until(lambda: advisor.asked > 3, "several looks for a plan")
    assert advisor.reports == []
    advisor.plans(workers=1, ps=1)
    advisor.until(lambda: advisor.reports, "a report")
    assert advisor.profiles[0].shape.worker_cpu == 1
