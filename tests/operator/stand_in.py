"""Stand-ins for a job's processes, in one file, that speak the real protocol and train nothing.

Run as a script with the role as its argument. Once all members have registered, the master counts samples up to
STAND_IN_SAMPLES, STAND_IN_RATE per second, and stores them in a real Redis; it is not through before members have
registered STAND_IN_REGISTRATIONS times. Members do what the replies to their heartbeats say.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from emberscale_api.environment import MANIFEST_FILE, OPERATOR_TOKEN_FILE, REDIS_URL, ProcessIdentity, read_identity
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterServicer, MasterStub, add_MasterServicer_to_server
from emberscale_api.rpc.token import TokenCheck, open_channel

if TYPE_CHECKING:
    import redis

    from emberscale_api.job import TrainingJob

_Reply = TypeVar("_Reply")
_ENDED = (pb.COMPLETE, pb.FAILED, pb.SUSPENDED)


class StandInMaster(MasterServicer):
    def __init__(self, job: "TrainingJob", store: "redis.Redis") -> None:
        self.job = job
        self.store = store
        self.total = int(os.environ.get("STAND_IN_SAMPLES", "100000"))
        self.rate = int(os.environ.get("STAND_IN_RATE", "100000"))
        self.members = job.spec.ps.initial_replicas + job.spec.worker.initial_replicas
        self.registrations = int(os.environ.get("STAND_IN_REGISTRATIONS", "0"))
        self.step = 0.05

    @property
    def phase(self) -> "pb.Phase.ValueType":
        return pb.Phase.Value(str(self.store.get("phase") or "TRAINING"))

    def train(self) -> None:
        if os.environ.get("STAND_IN_RESUME"):
            self.store.set("phase", "TRAINING")
        while True:
            threading.Event().wait(self.step)
            if self.phase == pb.TRAINING and int(self.store.scard("members")) >= self.members:
                samples = int(self.store.incrby("samples", int(self.rate * self.step)))
                self.store.incrbyfloat("seconds", self.step)
                if samples >= self.total and self._registered() >= self.registrations:
                    self.store.set("samples", self.total)
                    self.store.set("phase", "COMPLETE")

    def _registered(self) -> int:
        return sum(map(int, self.store.hvals("registrations")))

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        member = request.member
        self.store.sadd("members", f"{member.role}/{member.index}")
        self.store.hincrby("registrations", f"{member.role}/{member.index}", 1)
        return pb.RegisterReply(manifest_json=self.job.to_json(), heartbeat_seconds=0.1)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        return pb.HeartbeatReply(stop=self.phase in _ENDED)

    def ReportExit(self, request: pb.ReportExitRequest, context: grpc.ServicerContext) -> pb.ReportExitReply:
        role = pb.Role.Name(request.member.role).lower()
        if told := os.environ.get("STAND_IN_EXITS"):
            with Path(told).open("a", encoding="utf-8") as file:
                file.write(f"{role}-{request.member.index} {request.reason} {request.exit_code}\n")
        return pb.ReportExitReply()

    def Suspend(self, request: pb.SuspendRequest, context: grpc.ServicerContext) -> pb.SuspendReply:
        threading.Event().wait(float(os.environ.get("STAND_IN_SUSPEND_SECONDS", "0")))
        self.store.set("phase", "SUSPENDED")
        return pb.SuspendReply(checkpoint="1")

    def WatchPlan(self, request, context):  # type: ignore[no-untyped-def]  # streams have no stub type
        phase = None
        while context.is_active():
            if phase != self.phase:
                phase = self.phase
                plan = pb.Plan(version=1, phase=phase)
                plan.roles.add(role=pb.PS, replicas=self.job.spec.ps.initial_replicas)
                plan.roles.add(
                    role=pb.WORKER,
                    replicas=int(os.environ.get("STAND_IN_WORKERS", self.job.spec.worker.initial_replicas)),
                    cpu_cores=self.job.spec.worker.resources.cpu_limit or 0,
                    memory_bytes=self.job.spec.worker.resources.memory_limit or 0,
                )
                yield plan
            threading.Event().wait(self.step)

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        samples = int(self.store.get("samples") or 0)
        phase = self.phase
        status = pb.JobStatus(
            phase=phase,
            reason="Completed" if phase == pb.COMPLETE else "",
            samples=samples,
            expected_samples=self.total,
            samples_per_second=self.rate,
            training_seconds=float(self.store.get("seconds") or 0),
            loss=0.5,
            auc=0.75,
            eta_seconds=(self.total - samples) / self.rate,
            epochs=1,
            rows={"C1": 10, "C2": 20},
        )
        if phase == pb.COMPLETE:
            status.evaluations.add(epoch=1, samples=1000, auc=0.78, logloss=0.45)
        for index in range(self.job.spec.worker.initial_replicas):
            status.members.add(
                member=pb.Member(role=pb.WORKER, index=index), stage_seconds={"read": 1.0, "compute": 2.0}
            )
        return status


def serve_master(identity: ProcessIdentity) -> None:
    # only the master needs these, and importing them takes longer than importing all that members need
    import redis
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    from emberscale_api.job import TrainingJob

    job = TrainingJob.from_json(Path(os.environ[MANIFEST_FILE]).read_text(encoding="utf-8"))
    patient = Retry(ConstantBackoff(0.1), 100)
    store = redis.Redis.from_url(os.environ[REDIS_URL], decode_responses=True, retry=patient)
    master = StandInMaster(job, store)  # type: ignore[abstract] # nobody asks for tasks
    operator_token = Path(os.environ[OPERATOR_TOKEN_FILE]).read_text(encoding="ascii")
    server = grpc.server(ThreadPoolExecutor(16), interceptors=[TokenCheck(identity.token, operator_token)])
    add_MasterServicer_to_server(master, server)
    server.add_insecure_port(identity.master_address)
    server.start()
    master.train()


def be_a_member(identity: ProcessIdentity) -> None:
    stub = MasterStub(open_channel(identity.master_address, identity.token))
    number = {"ps": pb.PS, "worker": pb.WORKER}[identity.role]
    member = pb.Member(role=number, index=identity.index, incarnation=identity.incarnation)
    _asking(lambda: stub.Register(pb.RegisterRequest(member=member), wait_for_ready=True, timeout=60))
    eaten = _eat() if identity.role == "worker" else b""
    if os.environ.get("STAND_IN_DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        reply = _asking(lambda: stub.Heartbeat(pb.HeartbeatRequest(member=member), wait_for_ready=True, timeout=60))
        if reply.stop and not os.environ.get("STAND_IN_DEAF"):
            sys.exit(0 if eaten is not None else 1)
        threading.Event().wait(0.1)


def _asking(ask: Callable[[], _Reply]) -> _Reply:
    """Asks until there is an answer, since the master may be killed while it is asked."""
    while True:
        try:
            return ask()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


def _eat() -> bytes:
    """Takes STAND_IN_EAT_BYTES of memory, and touches all of it."""
    return b"\1" * int(os.environ.get("STAND_IN_EAT_BYTES", "0"))


if __name__ == "__main__":
    if sys.argv[1] == "master":
        serve_master(read_identity())
    else:
        be_a_member(read_identity())
