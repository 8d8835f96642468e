"""The master's process is killed, its Redis is killed, or it never gets what it needs."""

import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
import redis
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fake_worker import FakeWorker

from emberscale_api import environment
from emberscale_api.rpc import master_pb2 as pb
from eventually import eventually
from ports import free_port
from redis_process import RedisProcess


@pytest.mark.parametrize("seed", range(2))
def test_a_master_killed_at_random_loses_and_repeats_nothing(cluster: Cluster, seed: int) -> None:
    cluster.configure(training={"epochs": 2}, worker={"replicas": 6}, checkpoint={"interval": 0.3})
    generator = random.Random(seed)
    pause = threading.Event()
    cluster.start_master_process()
    eventually(cluster.answers, "the master")
    cluster.start_servers()
    workers = [cluster.start_worker(index, records=2003, pace=0.01) for index in range(6)]
    for samples in sorted(generator.randrange(3200) for _ in range(2)):
        cluster.until(lambda status: status.samples >= samples, f"{samples} samples")  # noqa: B023
        pause.wait(generator.uniform(0, 0.05))
        cluster.kill_master_process()
        cluster.start_master_process()
        eventually(cluster.answers, "the next master")

    status = cluster.until(lambda status: status.phase in (pb.COMPLETE, pb.FAILED), "the end", seconds=60)

    assert status.phase == pb.COMPLETE, status.message
    assert status.samples == status.expected_samples == 4006
    assert status.recoveries == 0
    for worker in workers:
        worker.join()
    for server in cluster.servers:
        assert server.applied == {epoch: set(range(201)) for epoch in range(2)}
        assert len(server.assigned_from) == 1
        assert not server.holds
    master = next(member for member in status.members if member.member.role == pb.MASTER)
    assert master.registrations == 3


def test_sigterm_ends_the_master_at_once_and_costs_nothing(cluster: Cluster) -> None:
    cluster.start_master_process()
    eventually(cluster.answers, "the master")
    cluster.start_servers()
    cluster.start_worker(0, records=1000, pace=0.01)
    cluster.until(lambda status: status.samples > 200, "some progress")
    process = cluster.master_process
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0

    cluster.start_master_process()
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)

    assert (status.phase, status.samples, status.recoveries) == (pb.COMPLETE, 1000, 0)
    assert all(ps.applied == {0: set(range(100))} for ps in cluster.servers)


def last_plan(cluster: Cluster) -> pb.Plan:
    plans = cluster.caller().stub.WatchPlan(pb.WatchPlanRequest(), timeout=60, wait_for_ready=True)
    return next(plan for plan in plans if plan.phase in (pb.COMPLETE, pb.FAILED))


@pytest.mark.parametrize("successor", [False, True])
def test_the_plan_that_tells_of_the_end_says_what_the_job_came_to(cluster: Cluster, successor: bool) -> None:
    """The master may be killed right after it has reported the end, and then nobody starts another."""
    cluster.configure(training={"epochs": 2})
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=57)
    plan = last_plan(cluster)
    if successor:
        cluster.stop_master()
        cluster.start_master()
        plan = last_plan(cluster)
    assert plan.final.phase == plan.phase == pb.COMPLETE
    assert plan.final.samples == plan.final.expected_samples == 114
    assert plan.final.checkpoint


def test_a_job_that_is_over_stays_over_in_the_next_master(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=50)
    before = cluster.until_phase(pb.COMPLETE)
    cluster.stop_master()
    cluster.start_master()
    after = cluster.until_phase(pb.COMPLETE)
    assert (after.phase, after.samples, after.checkpoint) == (pb.COMPLETE, 50, before.checkpoint)


def test_a_barrier_that_the_master_did_not_survive_is_undone(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.3})
    cluster.start_master_process()
    eventually(cluster.answers, "the master")
    cluster.start_servers()
    reached = threading.Event()

    def die() -> None:
        if not reached.is_set():
            cluster.kill_master_process()
            reached.set()

    cluster.servers[1].faults["Snapshot"] = die
    cluster.start_worker(0, records=500, pace=0.01)
    assert reached.wait(60)
    cluster.start_master_process()
    cluster.completes()
    for ps in cluster.servers:
        assert "Resume" in ps.steps, ps.steps
    assert all(ps.applied == {0: set(range(50))} for ps in cluster.servers)
    assert all((folder / "manifest.json").exists() for folder in cluster.checkpoints.iterdir())


def test_an_assignment_that_the_master_did_not_survive_is_made_again(cluster: Cluster) -> None:
    cluster.start_master_process()
    eventually(cluster.answers, "the master")
    reached = threading.Event()

    def die() -> None:
        if not reached.is_set():
            cluster.kill_master_process()
            reached.set()

    cluster.start_ps(0)
    cluster.start_ps(1, faults={"Assign": die})
    assert reached.wait(60)
    cluster.start_master_process()
    cluster.start_worker(0, records=100)
    status = cluster.completes()
    assert status.recoveries == 0
    assert all(ps.applied == {0: set(range(10))} for ps in cluster.servers)


def train_on(cluster: Cluster, own_redis: RedisProcess) -> FakeWorker:
    """Starts a job that stores its state in this Redis; returns its worker once it has trained some samples."""
    cluster.redis = own_redis
    cluster.start_master()
    cluster.start_servers()
    worker = cluster.start_worker(0, records=1500, pace=0.005)
    cluster.until(lambda status: status.samples > 200, "some progress")
    return worker


def test_a_redis_that_is_away_for_a_while_costs_only_time(cluster: Cluster, own_redis: RedisProcess) -> None:
    worker = train_on(cluster, own_redis)
    own_redis.kill()
    own_redis.start()
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.samples, status.recoveries) == (pb.COMPLETE, 1500, 0)
    worker.join()
    assert all(ps.applied == {0: set(range(150))} for ps in cluster.servers)


def test_while_redis_is_away_calls_are_told_to_come_again(cluster: Cluster, own_redis: RedisProcess) -> None:
    cluster.redis = own_redis
    cluster.start_master()
    caller = cluster.caller()
    caller.register()
    own_redis.kill()
    try:
        with pytest.raises(grpc.RpcError) as raised:
            caller.acquire(wait=0)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert own_redis.url in (raised.value.details() or "")
        with pytest.raises(grpc.RpcError) as raised:
            cluster.caller(index=7).register()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        own_redis.start()
    eventually(lambda: cluster.answers() and cluster.registers(index=7), "the master after the outage")


def test_while_redis_is_away_the_status_says_what_the_job_waits_for(cluster: Cluster, own_redis: RedisProcess) -> None:
    worker = train_on(cluster, own_redis)
    caller = cluster.caller()
    assert caller.status().reason == "Training"
    own_redis.kill()
    try:
        eventually(lambda: caller.status().reason == "StateNotWritable" or None, "the status says so")
        assert own_redis.url in caller.status().message
        assert caller.status().phase == pb.TRAINING
    finally:
        own_redis.start()
    assert cluster.completes().reason == "Completed"
    worker.join()


def test_a_lease_whose_reply_could_not_be_made_is_free_again(cluster: Cluster, own_redis: RedisProcess) -> None:
    cluster.configure(sharding={"leaseTimeout": 1000, "heartbeatInterval": 400})
    cluster.redis = own_redis
    cluster.start_master()
    caller = cluster.caller()
    caller.register()
    own_redis.kill()
    with pytest.raises(grpc.RpcError):
        caller.acquire(wait=0)
    own_redis.start()

    def acquire() -> pb.Task | None:
        try:
            reply = caller.acquire(wait=0)
        except grpc.RpcError:
            return None
        return reply.task if reply.HasField("task") else None

    assert eventually(acquire, "the task that nobody got").kind == pb.DISCOVER


def run_master(cluster: Cluster, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "emberscale_jobmaster"],
        env={**cluster.environment(), **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_without_redis_the_master_ends_with_one_line_that_names_it(cluster: Cluster) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    ended = run_master(cluster, **{environment.REDIS_URL: url})
    assert ended.returncode == 2
    assert url in ended.stderr.splitlines()[-1]


def test_an_address_that_is_taken_is_named(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", cluster.port))
        taken.listen()
        ended = run_master(cluster)
    assert ended.returncode == 2
    assert f"cannot listen on {cluster.address}" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (environment.REDIS_URL, "", "EMBERSCALE_REDIS_URL is not set"),
        (environment.REDIS_URL, "http://nowhere", "EMBERSCALE_REDIS_URL"),
        (environment.MANIFEST_FILE, "/no/such/job.yaml", "/no/such/job.yaml"),
        (environment.TOKEN_FILE, "/no/such/token", "/no/such/token"),
    ],
)
def test_what_a_master_is_started_with_must_make_sense(cluster: Cluster, variable: str, value: str, words: str) -> None:
    ended = run_master(cluster, **{variable: value})
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_place_for_checkpoints_that_nothing_serves_is_named(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"uri": "nosuch://bucket/x"})
    ended = run_master(cluster)
    assert ended.returncode == 2
    assert "spec.checkpoint.uri (nosuch://bucket/x)" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_an_older_master_goes_when_a_newer_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    old = cluster.start_master_process()
    eventually(cluster.answers, "the master")
    redis.Redis.from_url(cluster.redis.url).incr(f"emberscale:{cluster.uid}:term")
    assert old.wait(60) == 3
