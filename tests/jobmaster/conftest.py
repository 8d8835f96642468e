import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from tests.jobmaster.caller import Caller, heartbeats
from tests.jobmaster.fake_ps import FakePs
from tests.jobmaster.fake_worker import FakeWorker
from tests.jobmaster.small_job import TOKEN, job

from emberscale_api import environment
from emberscale_api.compatibility import StateKeys
from emberscale_api.environment import ProcessIdentity
from emberscale_api.job import TrainingJob
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.server import MasterProcess
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.status import job_status
from emberscale_jobmaster.store import JobStore, StoreUnavailableError
from eventually import eventually
from identities import identity_of
from ports import free_port
from redis_process import RedisProcess


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with _durable(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis that the test may kill."""
    with _durable(tmp_path / "redis") as server:
        yield server


def _durable(folder: Path) -> RedisProcess:
    """Returns a redis-server whose data survives a kill."""
    return RedisProcess(folder, "--appendonly", "yes", "--appendfsync", "always", has_port=True)


class Cluster:
    """One job: a master, in this process or its own, and fakes of everything else. Ends all it has started."""

    def __init__(self, folder: Path, redis_server: RedisProcess) -> None:
        self.folder = folder
        self.redis = redis_server
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.uid = uuid.uuid4().hex
        self.job = job()
        self.servers: list[FakePs] = []
        self.deposed = threading.Event()
        self.asked_to_end = threading.Event()
        self.brain_address = ""
        self.operator_token = ""
        self.variables: dict[str, str] = {}
        self.workers: list[FakeWorker] = []
        self._stack = ExitStack()
        self._beats: dict[int, ExitStack] = {}
        self._master: MasterProcess | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def configure(self, **sections: Any) -> TrainingJob:
        """Sets the manifest; checkpoints go to a folder of the test unless it says otherwise."""
        sections["checkpoint"] = {"uri": str(self.checkpoints), "interval": 1000, **sections.get("checkpoint", {})}
        self.job = job(**sections)
        return self.job

    def start_master(self) -> None:
        store = JobStore(self.redis.url, self.uid)
        self._master = MasterProcess(
            self._identity(),
            self.job,
            store,
            on_deposed=self.deposed.set,
            on_shutdown=self.asked_to_end.set,
            brain_address=self.brain_address,
            brain_token=TOKEN,
            operator_token=self.operator_token,
        )
        self._master.start()

    def stop_master(self) -> None:
        if self._master is not None:
            self._master.stop()
            self._master = None

    def start_master_process(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "emberscale_jobmaster"],
            env=self.environment(),
            stderr=(self.folder / "master.log").open("ab"),
        )
        return self._process

    def kill_master_process(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def environment(self) -> dict[str, str]:
        token, manifest = self.folder / "token", self.folder / "job.json"
        token.write_text(TOKEN)
        manifest.write_text(self.job.to_json())
        return {
            environment.JOB_NAME: "fake",
            environment.JOB_UID: self.uid,
            environment.ROLE: "master",
            environment.INCARNATION: uuid.uuid4().hex,
            environment.MASTER_ADDRESS: self.address,
            environment.TOKEN_FILE: str(token),
            environment.REDIS_URL: self.redis.url,
            environment.MANIFEST_FILE: str(manifest),
            **self.variables,
        }

    def caller(self, role: pb.Role.ValueType = pb.WORKER, index: int = 0, incarnation: str | None = None) -> Caller:
        caller = Caller(self.address, role, index, incarnation)
        self._stack.callback(caller.close)
        return caller

    @property
    def master_process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def answers(self) -> bool:
        """Whether a master answers."""
        try:
            self.status()
        except grpc.RpcError:
            return False
        return True

    def registers(self, index: int) -> bool:
        """Whether a worker can join."""
        try:
            self.caller(pb.WORKER, index).register()
        except grpc.RpcError:
            return False
        return True

    def redis_is_empty(self) -> None:
        """Deletes the job's data in Redis, so that the next master finds nothing."""
        client = redis.Redis.from_url(self.redis.url)
        client.delete(*astuple(StateKeys.of(self.uid)))
        client.close()

    def start_ps(self, index: int, faults: Mapping[str, Callable[[], None]] | None = None) -> FakePs:
        """Starts and registers a parameter server in place of any predecessor, and keeps it alive."""
        server = FakePs(index)
        server.faults.update(faults or {})
        self._stack.callback(server.stop)
        caller = self.caller(pb.PS, index, server.incarnation)
        caller.register(data_address=f"tcp://127.0.0.1:{server.port}", control_address=server.address)
        beats = self._beats[index] = ExitStack()
        self._stack.callback(beats.close)
        beats.enter_context(heartbeats(caller, server=server))
        self.servers = sorted(
            [*(other for other in self.servers if other.index != index), server], key=lambda ps: ps.index
        )
        return server

    def start_servers(self) -> None:
        for index in range(self.job.spec.ps.initial_replicas):
            self.start_ps(index)

    def kill_ps(self, index: int) -> pb.Member:
        """Stops a parameter server without notice; returns its member."""
        self._beats.pop(index).close()
        server = next(ps for ps in self.servers if ps.index == index)
        server.stop()
        return pb.Member(role=pb.PS, index=index, incarnation=server.incarnation)

    def start_worker(
        self,
        index: int,
        records: int = 400,
        evaluation: int = 0,
        pace: float = 0.0,
        last: threading.Event | None = None,
    ) -> FakeWorker:
        epochs = self.job.spec.training.epochs
        worker = FakeWorker(self.address, index, lambda: self.servers, records, evaluation, pace, epochs, last).start()
        self.workers.append(worker)
        return worker

    def status(self) -> pb.JobStatus:
        return self.caller().status()

    def until(self, condition: Callable[[pb.JobStatus], Any], what: str, seconds: float = 60.0) -> pb.JobStatus:
        """Waits until the status meets a condition, and returns it, without the master as a member.

        Looks at every change of the job, and a condition depends on no more. Polls a master of another process.
        """
        if self._master is None:
            return self._poll(condition, what, seconds)
        runtime, met = self._master.runtime, list[pb.JobStatus]()

        def note(_: JobState) -> bool | None:
            status = job_status(*runtime.view(), runtime.now())
            if condition(status):
                met.append(status)
            return bool(met) or None

        with suppress(StoreUnavailableError):  # the job has changed, and the change is not durable yet
            runtime.wait_until(note, seconds)
        assert met, f"not within {seconds:g} s: {what}"
        return met[0]

    def _poll(self, condition: Callable[[pb.JobStatus], Any], what: str, seconds: float) -> pb.JobStatus:
        caller = self.caller()

        def look() -> pb.JobStatus | None:
            with suppress(grpc.RpcError):
                status = caller.status()
                return status if condition(status) else None
            return None

        found: pb.JobStatus = eventually(look, what, seconds)
        return found

    def until_phase(self, *phases: pb.Phase.ValueType) -> pb.JobStatus:
        return self.until(lambda status: status.phase in phases, f"phase {[pb.Phase.Name(p) for p in phases]}")

    def completes(self) -> pb.JobStatus:
        """Waits for the end of a job that must not fail, and returns the status."""
        status = self.until_phase(pb.COMPLETE, pb.FAILED)
        assert status.phase == pb.COMPLETE, status.message
        return status

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._stack.close()
        self.stop_master()
        if self._process is not None and self._process.poll() is None:
            self.kill_master_process()

    def _identity(self) -> ProcessIdentity:
        return identity_of(
            "master", self.address, job_name="fake", job_uid=self.uid, incarnation=uuid.uuid4().hex, token=TOKEN
        )


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisProcess) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, redis_server)
    cluster.configure()
    yield cluster
    cluster.close()
