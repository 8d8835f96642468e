"""The environment variables that identify a process of a job; the same for pods and local processes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberscale_api.certificates import Certificates, read_certificates
from emberscale_api.errors import InvalidError

JOB_NAME = "EMBERSCALE_JOB_NAME"
JOB_UID = "EMBERSCALE_JOB_UID"
ROLE = "EMBERSCALE_ROLE"
INDEX = "EMBERSCALE_INDEX"
INCARNATION = "EMBERSCALE_INCARNATION"
MASTER_ADDRESS = "EMBERSCALE_MASTER_ADDRESS"
TOKEN_FILE = "EMBERSCALE_TOKEN_FILE"
OPERATOR_TOKEN_FILE = "EMBERSCALE_OPERATOR_TOKEN_FILE"
"""The token with which the operator steers the job. Only the master gets it."""
TLS_FOLDER = "EMBERSCALE_TLS_FOLDER"
"""Names a folder of certificates; if it is set, all servers of a process serve TLS, and all clients expect it."""
REDIS_URL = "EMBERSCALE_REDIS_URL"
FLASH_REDIS_URL = "EMBERSCALE_FLASH_REDIS_URL"
"""Names the Redis for flash checkpoints, with the credentials of the job; master and parameter servers have it."""
MANIFEST_FILE = "EMBERSCALE_MANIFEST_FILE"
LISTEN_HOST = "EMBERSCALE_LISTEN_HOST"
ADVERTISED_HOST = "EMBERSCALE_ADVERTISED_HOST"
SOCKET_DIRECTORY = "EMBERSCALE_SOCKET_DIRECTORY"
CPU_CORES = "EMBERSCALE_CPU_CORES"
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
MEMORY_BYTES = "EMBERSCALE_MEMORY_BYTES"
"""The memory above which the process is killed; only for processes without their own container."""
METRICS_PORT = "EMBERSCALE_METRICS_PORT"
LEAVE_SECONDS = "EMBERSCALE_LEAVE_SECONDS"
"""How long a parameter server that is told to end may take to give its rows away; the kill comes later than that."""
ALONE = "EMBERSCALE_ALONE"
"""Set for a master that starts after all processes of the job have ended, such as the first one of a run."""
BRAIN_ADDRESS = "EMBERSCALE_BRAIN_ADDRESS"
BRAIN_TOKEN = "EMBERSCALE_BRAIN_TOKEN"
BRAIN_CA = "EMBERSCALE_BRAIN_CA"
"""The authority of a brain that serves TLS, in PEM; it differs from the job's own."""

UNUSABLE_EXIT_CODE = 2
"""The exit code of a process that cannot use its environment, or a file that its environment names."""
SUPERSEDED_EXIT_CODE = 3
"""The exit code of a process of a job that another has replaced; it does not count as a failure."""


def cpu_variables(cpu_cores: float) -> dict[str, str]:
    """Returns the variables that limit a process to its cores: whole threads for its libraries, one at least."""
    return {CPU_CORES: f"{cpu_cores:g}", **dict.fromkeys(_THREAD_LIMITS, str(max(1, math.floor(cpu_cores))))}


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of a process, and its master's address.

    `incarnation` is never reused for the same role and index. `cpu_cores` is None if the manifest sets no limit.
    `memory_bytes` is the limit at the start of a process without its own container, None if there is none.
    `socket_directory`, if set, is a folder for data sockets that all processes of the job share. `metrics_port` is 0
    for any free port. `flash_redis_url` is empty without flash checkpoints. `leave_seconds` is how long a
    parameter server may take to give its rows away. Without `certificates` the process neither serves nor expects TLS.
    """

    job_name: str
    job_uid: str
    role: str
    index: int
    incarnation: str
    master_address: str
    token: str
    listen_host: str
    advertised_host: str
    socket_directory: Path | None
    cpu_cores: float | None
    metrics_port: int = 0
    leave_seconds: float = 10.0
    flash_redis_url: str = ""
    certificates: Certificates | None = None
    memory_bytes: int | None = None

    @property
    def authority(self) -> bytes | None:
        """The authority that signs the certificates of the job's processes, in PEM; None without TLS."""
        return self.certificates.authority if self.certificates is not None else None


def read_identity(environment: Mapping[str, str] = os.environ) -> ProcessIdentity:
    """Reads the identity from the environment. Raises InvalidError."""
    listen_host = environment.get(LISTEN_HOST, "127.0.0.1")
    sockets = environment.get(SOCKET_DIRECTORY)
    cores = environment.get(CPU_CORES)
    return ProcessIdentity(
        job_name=required(JOB_NAME, environment),
        job_uid=required(JOB_UID, environment),
        role=required(ROLE, environment),
        index=int(environment.get(INDEX, "0")),
        incarnation=required(INCARNATION, environment),
        master_address=required(MASTER_ADDRESS, environment),
        token=Path(required(TOKEN_FILE, environment)).read_text(encoding="ascii").strip(),
        listen_host=listen_host,
        advertised_host=environment.get(ADVERTISED_HOST, listen_host),
        socket_directory=Path(sockets) if sockets else None,
        cpu_cores=float(cores) if cores else None,
        metrics_port=int(environment.get(METRICS_PORT) or 0),
        leave_seconds=float(environment.get(LEAVE_SECONDS) or 10.0),
        flash_redis_url=environment.get(FLASH_REDIS_URL, ""),
        certificates=mounted_certificates(environment),
        memory_bytes=int(environment.get(MEMORY_BYTES) or 0) or None,
    )


def required(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the value of a required variable. Raises InvalidError if it is missing or empty."""
    value = environment.get(name)
    if not value:
        raise InvalidError(
            f"{name} is not set; the processes of a job are started by `emberscale run` or by the operator"
        )
    return value


def mounted_certificates(environment: Mapping[str, str] = os.environ) -> Certificates | None:
    """Reads the certificates that the environment names; returns None if it names none. Raises InvalidError."""
    folder = environment.get(TLS_FOLDER)
    if not folder:
        return None
    try:
        return read_certificates(Path(folder))
    except InvalidError as error:
        raise InvalidError(f"{TLS_FOLDER}: {error}") from error
