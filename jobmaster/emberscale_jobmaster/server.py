"""The master as a whole: store, runtime, conductor, metrics and the gRPC server, started and stopped in order."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog

from emberscale_api.environment import ProcessIdentity
from emberscale_api.job import RoleSpec, TrainingJob
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import CHANNEL_OPTIONS, TokenCheck
from emberscale_jobmaster.conductor import Conductor
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.service import MasterService
from emberscale_jobmaster.store import JobStore

_SPARE_THREADS = 64
_CALLS_PER_MEMBER = 3
"""A member's heartbeat, its wait for a task or for a routing table, and one more."""
_GRACE_SECONDS = 0.5

_log = structlog.get_logger()


class AddressInUseError(Exception):
    """The master cannot listen where its members look for it."""


class MasterProcess:
    """One running master."""

    def __init__(
        self, identity: ProcessIdentity, job: TrainingJob, store: JobStore, on_deposed: Callable[[], None]
    ) -> None:
        self._runtime = JobRuntime(job, identity.job_uid, store, on_deposed)
        self._conductor = threading.Thread(target=Conductor(self._runtime, identity.token).run, name="conductor")
        members = sum(_most(role) for role in (job.spec.ps, job.spec.worker))
        self._server = grpc.server(
            ThreadPoolExecutor(_SPARE_THREADS + _CALLS_PER_MEMBER * members, thread_name_prefix="call"),
            interceptors=[TokenCheck(identity.token)],
            options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)),
        )
        self._address = f"{identity.listen_host}:{identity.master_address.rpartition(':')[2]}"
        rpc.add_MasterServicer_to_server(MasterService(self._runtime), self._server)

    def start(self) -> None:
        """Takes the job over and serves. Raises StoreUnavailableError and AddressInUseError."""
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise AddressInUseError(f"cannot listen on {self._address}: {error}") from error
        self._runtime.start()
        self._conductor.start()
        self._server.start()
        _log.info(
            "serving", address=self._address, term=self._runtime.store.term, pid=os.getpid(), host=socket.gethostname()
        )

    def stop(self) -> None:
        """Ends all calls and threads, promptly."""
        stopped = self._server.stop(_GRACE_SECONDS)
        self._runtime.close()
        stopped.wait()
        self._conductor.join()


def _most(role: RoleSpec) -> int:
    return role.max_replicas or role.initial_replicas
