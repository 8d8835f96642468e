"""The master over real sockets: who may call, what it refuses, and with which messages."""

import math
import uuid
from threading import Event
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tests.jobmaster.caller import Caller
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fake_ps import FakePs
from tests.jobmaster.small_job import BINS, TOKEN, discovered, indexed

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import open_channel
from eventually import eventually


@pytest.fixture
def worker(cluster: Cluster) -> Caller:
    cluster.start_master()
    caller = cluster.caller(pb.WORKER)
    caller.register()
    return caller


def refusal(call: Any, *arguments: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, **fields)
    return raised.value.code(), raised.value.details() or ""


def train(cluster: Cluster, worker: Caller, records: int = 100) -> None:
    """Prepares the data and assigns servers: from here on, tasks are TRAIN."""
    cluster.start_servers()
    discover = worker.acquire()
    index = worker.acquire(discovered(discover.task))
    worker.acquire(indexed(index.task, records), wait=0)
    cluster.until_phase(pb.TRAINING)


def test_a_call_without_the_jobs_token_is_refused(cluster: Cluster) -> None:
    cluster.start_master()
    with open_channel(cluster.address, "another-token") as channel:
        code, _ = refusal(rpc.MasterStub(channel).GetStatus, pb.GetStatusRequest(), timeout=60)
    assert code is grpc.StatusCode.UNAUTHENTICATED


STEERING = [
    ("Scale", pb.ScaleRequest(ps=7)),
    ("Suspend", pb.SuspendRequest()),
    ("Shutdown", pb.ShutdownRequest()),
    ("ReportExit", pb.ReportExitRequest(member=pb.Member(role=pb.WORKER, incarnation="i"), exit_code=1)),
]


@pytest.mark.parametrize(("name", "request_"), STEERING, ids=[name for name, _ in STEERING])
def test_a_member_cannot_steer_its_job(cluster: Cluster, name: str, request_: Any) -> None:
    cluster.operator_token = "the-operators"
    cluster.start_master()
    with open_channel(cluster.address, TOKEN) as channel:
        code, words = refusal(getattr(rpc.MasterStub(channel), name), request_, timeout=60)
    assert (code, words) == (grpc.StatusCode.PERMISSION_DENIED, f"only the operator may call {name}")
    assert not cluster.asked_to_end.is_set()
    with open_channel(cluster.address, "the-operators") as channel:
        status = rpc.MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=60)
    assert status.phase == pb.PENDING


def test_the_operator_steers_a_job_with_a_token_of_its_own(cluster: Cluster) -> None:
    cluster.operator_token = "the-operators"
    cluster.start_master()
    cluster.caller().register()
    with open_channel(cluster.address, "the-operators") as channel:
        rpc.MasterStub(channel).Scale(pb.ScaleRequest(ps=3, workers=1), timeout=60)
        plan = next(iter(rpc.MasterStub(channel).WatchPlan(pb.WatchPlanRequest(), timeout=60)))
    assert plan.asked.ps == 3


def test_registration_brings_the_whole_manifest(cluster: Cluster) -> None:
    cluster.start_master()
    reply = cluster.caller().register()
    assert type(cluster.job).from_json(reply.manifest_json) == cluster.job
    assert reply.heartbeat_seconds == 0.05


def test_who_never_registered_is_told_to(cluster: Cluster, worker: Caller) -> None:
    stranger = cluster.caller(pb.WORKER, index=5)
    for call in (stranger.heartbeat, stranger.acquire):
        code, words = refusal(call)
        assert code is grpc.StatusCode.NOT_FOUND
        assert "register first" in words


def test_a_superseded_incarnation_is_refused_for_ever(cluster: Cluster, worker: Caller) -> None:
    cluster.caller(pb.WORKER).register()
    for call in (worker.heartbeat, worker.acquire, worker.register):
        code, words = refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "superseded" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"member": pb.Member(role=pb.MASTER, incarnation="x")}, "member.role: expected ps or worker"),
        ({"member": pb.Member(role=99, incarnation="x")}, "member.role: expected ps or worker"),  # type: ignore[arg-type]
        ({"member": pb.Member(role=pb.PS, incarnation="x", index=1024)}, "member.index: 1024 is above 1023"),
        ({"member": pb.Member(role=pb.PS)}, "member.incarnation: is required"),
        ({"member": pb.Member(role=pb.PS, incarnation="x")}, "data_address and control_address"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(
    cluster: Cluster, worker: Caller, fields: dict[str, Any], words: str
) -> None:
    code, found = refusal(worker.stub.Register, pb.RegisterRequest(**fields), timeout=60)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in found


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (pb.WorkerDelta(loss_sum=math.nan), "worker.loss_sum"),
        (pb.WorkerDelta(positives=[1], negatives=[]), "worker.positives"),
        (pb.WorkerDelta(positives=[1] * (BINS + 1), negatives=[1] * (BINS + 1)), "at most 16384"),
        (pb.WorkerDelta(stage_seconds={"pull": -1.0}), "worker.stage_seconds"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(worker: Caller, delta: pb.WorkerDelta, words: str) -> None:
    code, found = refusal(worker.heartbeat, worker=delta, delta_sequence=1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in found


HUGE = (1 << 64) - 1
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"memory_bytes": HUGE}, "memory_bytes: 18446744073709551615 is not between 0 and"),
    ({"cpu_seconds": math.inf}, "cpu_seconds: inf is not between 0 and"),
    ({"worker": pb.WorkerDelta(truncated_records=HUGE)}, "worker.truncated_records"),
    ({"worker": pb.WorkerDelta(traffic=pb.WorkerTraffic(bytes=HUGE))}, "worker.traffic.bytes"),
    ({"worker": pb.WorkerDelta(stage_seconds={"pull": math.nan})}, "worker.stage_seconds"),
    ({"ps": pb.PsReport(rows={"a": HUGE})}, "ps.rows"),
    ({"ps": pb.PsReport(rows={str(table): 1 for table in range(5000)})}, "ps.rows: at most 4096 names"),
    ({"ps": pb.PsReport(admission={"a": pb.AdmissionCounts(evicted=HUGE)})}, "ps.admission.evicted"),
    ({"ps": pb.PsReport(generation=HUGE)}, "ps.generation"),
    ({"ps": pb.PsReport(parity_trouble=pb.ParityTrouble(seconds=-1.0))}, "ps.parity_trouble.seconds"),
    ({"bad_records": [pb.BadRecord(file="/data/day_0", line=HUGE)]}, "bad_records.line"),
    ({"leases": [pb.LeaseProgress(token=1, committed=HUGE)]}, "leases.committed"),
]


def test_the_status_goes_on_whatever_a_member_reports(cluster: Cluster, worker: Caller) -> None:
    train(cluster, worker)
    before = cluster.status()
    with capture_logs() as told:
        for sequence, (fields, words) in enumerate(NONSENSE, 1):
            code, found = refusal(worker.heartbeat, delta_sequence=sequence, **fields)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert words in found
        code, found = refusal(worker.acquire, wait=math.nan)
        assert (code, found) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_wait_seconds: nan is not between 0 and 1e+15",
        )
    refused = [entry for entry in told if entry["event"] == "report_refused"]
    assert [entry["call"] for entry in refused] == [*["Heartbeat"] * len(NONSENSE), "AcquireTask"]
    assert {entry["member"] for entry in refused} == {"worker-0"}
    after = cluster.status()
    assert (after.phase, after.generation, after.bad_records) == (pb.TRAINING, before.generation, 0)


def test_sums_over_all_lives_of_a_member_fit_into_the_status(cluster: Cluster) -> None:
    cluster.start_master()
    for _ in range(3):  # each is as large as one report may be
        worker, server = (cluster.caller(role, 0, uuid.uuid4().hex) for role in (pb.WORKER, pb.PS))
        worker.register()
        server.register(data_address="tcp://a:1", control_address="a:2")
        traffic = pb.WorkerTraffic(bytes=1 << 53, rounds=1 << 53)
        worker.heartbeat(delta_sequence=1, worker=pb.WorkerDelta(truncated_records=1 << 53, traffic=traffic))
        counts = {"a": pb.AdmissionCounts(evicted=1 << 53)}
        server.heartbeat(ps=pb.PsReport(repeated_batches=1 << 53, admission=counts))
    status = cluster.status()
    assert status.truncated_records == status.traffic.bytes == status.traffic.rounds == 1 << 53
    assert status.repeated_batches == status.admission["a"].evicted == 1 << 53


def test_an_answer_of_a_server_without_sense_fails_its_call_alone(cluster: Cluster, worker: Caller) -> None:
    """Its answer becomes part of the state that the next master reads."""
    train(cluster, worker, records=1000)
    leaving = cluster.servers[0]
    said = iter([1 << 54, 7])

    def speak() -> None:
        leaving.copied_bytes = next(said, 7)

    leaving.faults["Copy"] = speak
    eventually(lambda: drained(worker, leaving), "the rows to move, at the second attempt")
    assert cluster.status().phase == pb.TRAINING
    assert not list(said), "there were two attempts"


def test_blocks_that_do_not_follow_each_other_are_refused(worker: Caller) -> None:
    index = worker.acquire(discovered(worker.acquire().task)).task
    hole = [
        pb.Block(offset=0, length=10, first_record=0, records=5),
        pb.Block(offset=10, length=10, first_record=6, records=5),
    ]
    code, words = refusal(worker.acquire, pb.TaskResult(token=index.token, blocks=hole))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "the block at byte 10 with record 6 does not follow" in words
    backwards = [pb.Block(offset=10, length=10, records=5), pb.Block(offset=0, length=10, first_record=5, records=5)]
    _, words = refusal(worker.acquire, pb.TaskResult(token=index.token, blocks=backwards))
    assert "the block at byte 0 with record 5 does not follow" in words


def test_an_evaluation_whose_counts_do_not_add_up_is_refused(cluster: Cluster) -> None:
    cluster.configure(evaluation=20)
    cluster.start_master()
    worker = cluster.caller(pb.WORKER)
    worker.register()
    cluster.start_servers()
    index = worker.acquire(discovered(worker.acquire().task, evaluation=20))
    index = worker.acquire(indexed(index.task, 10))
    train = worker.acquire(indexed(index.task, 20))
    evaluate = worker.acquire(pb.TaskResult(token=train.task.token))
    assert evaluate.task.kind == pb.EVALUATE
    bins = bytes(4 * BINS)
    wrong = pb.Evaluation(samples=20, positives=bins, negatives=bins)
    code, words = refusal(worker.acquire, pb.TaskResult(token=evaluate.task.token, evaluation=wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "do not add up" in words


def test_the_dataset_is_what_the_workers_indexed(cluster: Cluster, worker: Caller) -> None:
    request = pb.GetDatasetRequest(member=worker.member)
    code, words = refusal(worker.stub.GetDataset, request, timeout=60)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "not indexed yet" in words
    train(cluster, worker, records=77)
    dataset = worker.stub.GetDataset(request, timeout=60)
    assert [file.uri for file in dataset.training_files] == ["/data/day_0"]
    assert [(block.first_record, block.records) for block in dataset.training_blocks] == [(0, 77)]
    assert (dataset.training_records, dataset.evaluation_records) == (77, 0)


def test_a_task_is_waited_for(cluster: Cluster, worker: Caller) -> None:
    """The second worker asks before there is anything to do, and gets it the moment there is."""
    other = cluster.caller(pb.WORKER, index=1)
    other.register()
    discover = worker.acquire()
    waiting = other.stub.AcquireTask.future(pb.AcquireTaskRequest(member=other.member, max_wait_seconds=10), timeout=60)
    index = worker.acquire(discovered(discover.task, evaluation=10))
    assert {index.task.file.uri, waiting.result().task.file.uri} == {"/data/day_0", "/data/test"}


def test_a_lease_that_the_master_does_not_know_is_revoked(cluster: Cluster, worker: Caller) -> None:
    reply = worker.heartbeat(leases=[pb.LeaseProgress(token=77, committed=3)])
    assert list(reply.revoked_tokens) == [77]
    assert not reply.stop


def test_routing_is_waited_for_until_every_server_has_adopted_it(cluster: Cluster, worker: Caller) -> None:
    request = pb.GetRoutingRequest(member=worker.member, max_wait_seconds=0)
    assert not worker.stub.GetRouting(request, timeout=60).ready
    waiting = worker.stub.GetRouting.future(pb.GetRoutingRequest(member=worker.member, max_wait_seconds=10), timeout=60)
    cluster.start_servers()
    routing = waiting.result()
    assert routing.ready
    assert [server.control_address for server in routing.servers] == [ps.address for ps in cluster.servers]
    assert set(routing.bucket_owners) == {0, 1}
    assert len(routing.bucket_owners) == 1024


def drained(caller: Caller, server: FakePs, wait: float = 5.0) -> bool:
    request = pb.DrainRequest(index=server.index, incarnation=server.incarnation, reason="a test", wait_seconds=wait)
    return caller.stub.Drain(request, timeout=60).may_go


def test_a_server_may_go_once_another_one_owns_all(cluster: Cluster, worker: Caller) -> None:
    train(cluster, worker, records=1000)
    leaving, staying = cluster.servers
    entered, go_on = Event(), Event()

    def copy_for_long() -> None:
        entered.set()
        go_on.wait(30)

    leaving.faults["Copy"] = copy_for_long
    assert not drained(worker, leaving, wait=0)
    assert entered.wait(30)
    go_on.set()
    eventually(lambda: drained(worker, leaving), "the rows to move")
    routing = worker.stub.GetRouting(pb.GetRoutingRequest(member=worker.member), timeout=60)
    assert set(routing.bucket_owners) == set(routing.piece_owners) == {staying.index}
    assert not drained(worker, staying, wait=0)
    assert drained(worker, leaving)
    assert cluster.status().recoveries == 0


def test_a_process_that_is_nobodys_may_go_and_one_without_a_name_is_refused(cluster: Cluster, worker: Caller) -> None:
    train(cluster, worker)
    assert worker.stub.Drain(pb.DrainRequest(index=1, incarnation="another"), timeout=60).may_go
    assert worker.stub.Drain(pb.DrainRequest(index=7, incarnation="another"), timeout=60).may_go
    code, words = refusal(worker.stub.Drain, pb.DrainRequest(index=1), timeout=60)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "incarnation: is required" in words


def test_a_bad_record_counts_once_however_often_it_is_reported(cluster: Cluster) -> None:
    cluster.configure(data={"maxBadRecords": 2})
    cluster.start_master()
    worker = cluster.caller(pb.WORKER)
    worker.register()
    bad = [pb.BadRecord(file="/data/day_0", line=line, problem="no label") for line in (3, 8)]
    for _ in range(3):
        worker.heartbeat(bad_records=bad)
    status = worker.status()
    assert status.bad_records == 2
    assert list(status.bad_record_samples) == bad

    reply = worker.heartbeat(bad_records=[pb.BadRecord(file="/data/day_0", line=9, problem="no label")])

    assert reply.stop
    status = worker.status()
    assert (status.phase, status.reason) == (pb.FAILED, "BadRecords")
    assert "/data/day_0:3: no label" in status.message


def test_a_fatal_failure_ends_the_job_for_everybody(cluster: Cluster, worker: Caller) -> None:
    request = pb.ReportFailureRequest(
        member=worker.member, reason="NonFiniteLoss", message="loss is nan in batch 7", fatal=True
    )
    worker.stub.ReportFailure(request, timeout=60)
    assert worker.heartbeat().stop
    assert worker.acquire().stop
    status = worker.status()
    assert (status.phase, status.reason) == (pb.FAILED, "NonFiniteLoss")
    assert "loss is nan in batch 7" in status.message


def test_a_reason_that_is_no_reason_is_refused(worker: Caller) -> None:
    request = pb.ReportFailureRequest(member=worker.member, reason="it broke", fatal=True)
    code, _ = refusal(worker.stub.ReportFailure, request, timeout=60)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_plans_say_what_is_wanted_until_nothing_is(cluster: Cluster) -> None:
    limits = {"limits": {"cpu": "500m", "memory": "1Gi"}}
    cluster.configure(ps={"replicas": 3, "resources": limits})
    cluster.start_master()
    caller = cluster.caller(pb.WORKER)
    caller.register()
    plans = iter(caller.stub.WatchPlan(pb.WatchPlanRequest(), timeout=60))
    first = next(plans)
    roles = {plan.role: plan for plan in first.roles}
    assert (roles[pb.MASTER].replicas, roles[pb.PS].replicas, roles[pb.WORKER].replicas) == (1, 3, 2)
    assert (roles[pb.PS].cpu_cores, roles[pb.PS].memory_bytes) == (0.5, 1 << 30)

    caller.stub.ReportFailure(
        pb.ReportFailureRequest(member=caller.member, reason="Broken", message="m", fatal=True), timeout=60
    )

    last = next(plan for plan in plans if plan.phase == pb.FAILED)
    assert last.version > first.version
    assert [plan.replicas for plan in last.roles] == [0, 0, 0]
    assert last.reason == "Broken"


def test_status_names_what_the_job_waits_for(cluster: Cluster, worker: Caller) -> None:
    cluster.start_ps(0)
    status = worker.status()
    assert (status.phase, status.reason, status.message) == (
        pb.PENDING,
        "WaitingForParameterServers",
        "waiting for ps-1",
    )


def test_status_shows_members_and_their_restarts(cluster: Cluster, worker: Caller) -> None:
    again = cluster.caller(pb.WORKER)
    again.register(metrics_address="127.0.0.1:9")
    again.heartbeat(memory_bytes=5, peak_memory_bytes=9, cpu_seconds=1.5)
    members = {(status.member.role, status.member.index): status for status in again.status().members}
    found = members[pb.WORKER, 0]
    assert found.alive
    assert (found.registrations, found.memory_bytes, found.peak_memory_bytes, found.cpu_seconds) == (2, 5, 9, 1.5)
    master = members[pb.MASTER, 0]
    assert master.registrations == 1
    assert master.memory_bytes > 0


def test_status_adds_up_what_servers_hold_and_ignored(cluster: Cluster, worker: Caller) -> None:
    for index in range(2):
        server = FakePs(index)
        caller = cluster.caller(pb.PS, index, server.incarnation)
        caller.register(data_address="tcp://a", control_address=server.address)
        counts = pb.AdmissionCounts(admitted=index, refused=10, evicted=1 + index)
        rows = {"C1": 5 + index, "C2": 1, "C3": 1 << 52}
        caller.heartbeat(ps=pb.PsReport(rows=rows, repeated_batches=3, admission={"C1": counts}))
        server.stop()
    status = worker.status()
    assert dict(status.rows) == {"C1": 11, "C2": 2, "C3": 1 << 53}
    assert dict(status.admission) == {"C1": pb.AdmissionCounts(admitted=1, refused=20, evicted=3)}
    assert status.repeated_batches == 6


def test_what_workers_exchanged_survives_the_master(cluster: Cluster, worker: Caller) -> None:
    told = pb.WorkerTraffic(
        bytes=500,
        rounds=2,
        round_batches=16,
        round_bytes=300,
        single_bytes=700,
        batches=20,
        round_rows=50,
        single_rows=90,
    )
    for sequence in (1, 2):
        worker.heartbeat(delta_sequence=sequence, worker=pb.WorkerDelta(traffic=told))
    cluster.stop_master()
    cluster.start_master()
    worker.heartbeat(delta_sequence=3, worker=pb.WorkerDelta(traffic=told))
    assert cluster.status().traffic == told


def test_status_tells_why_a_worker_trains_rounds_or_not(cluster: Cluster, worker: Caller) -> None:
    decision = pb.RoundsDecision(reason="BudgetTooSmall", message="two batches take 3 GiB", memory_bytes=3 << 30)
    worker.heartbeat(delta_sequence=1, worker=pb.WorkerDelta(rounds=decision))
    told = {one.member.role: one.rounds for one in cluster.status().members if one.HasField("rounds")}
    assert told == {pb.WORKER: decision}
    (warning,) = [text for text in cluster.status().warnings if "rounds" in text]
    assert "workers train without rounds of batches: two batches take 3 GiB;" in warning
    worker.heartbeat(delta_sequence=2, worker=pb.WorkerDelta())
    assert not any(one.HasField("rounds") for one in cluster.status().members)
    assert not any("rounds" in text for text in cluster.status().warnings)


def test_lists_that_were_cut_survive_the_master_and_a_repeated_report_counts_once(
    cluster: Cluster, worker: Caller
) -> None:
    for sequence in (1, 1, 2):
        worker.heartbeat(delta_sequence=sequence, worker=pb.WorkerDelta(truncated_records=3))
    cluster.stop_master()
    cluster.start_master()
    assert cluster.status().truncated_records == 6
