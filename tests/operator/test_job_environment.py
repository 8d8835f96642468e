"""The environment of a job's processes on this machine."""

import os
import subprocess
import sys
from pathlib import Path

from certificates import certificate_folder
from emberscale_api import environment as names
from emberscale_api.job.roles import Role
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.machine import InstanceId, Resources

ENVIRONMENT = JobEnvironment(
    job_name="toy",
    job_uid="uid-1",
    launch="first",
    master_address="127.0.0.1:1",
    folder=RunFolder(Path("/run")),
    redis_url="redis://",
    socket_folder=Path("sockets"),
    kernel_cache=Path("kernels"),
)


KNOCK = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from emberscale_api.certificates import read_certificates
from emberscale_api.rpc import tls

server = grpc.server(ThreadPoolExecutor(1))
port = tls.bind(server, "127.0.0.1:0", read_certificates(Path(sys.argv[1])))
server.start()
with socket.create_connection(("127.0.0.1", port), 60) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while stranger.recv(4096):
        pass
print("refused")
"""


def test_only_the_first_master_of_a_launch_is_told_that_no_other_process_lives() -> None:
    told = {
        instance: names.ALONE in ENVIRONMENT.of(instance, Resources(None, None), {names.ALONE: "1"})
        for instance in (InstanceId(Role.MASTER, 0, 1), InstanceId(Role.MASTER, 0, 2))
    }
    assert list(told.values()) == [True, False]


def test_only_the_master_gets_the_token_that_steers_the_job() -> None:
    inherited = {names.OPERATOR_TOKEN_FILE: "another job's"}
    told = {
        role: ENVIRONMENT.of(InstanceId(role, 0, 1), Resources(None, None), inherited).get(names.OPERATOR_TOKEN_FILE)
        for role in (Role.MASTER, Role.PS, Role.WORKER)
    }
    assert told == {Role.MASTER: "/run/state/operator-token", Role.PS: None, Role.WORKER: None}


def test_strangers_do_not_fill_the_logs_with_handshakes_that_fail(tmp_path: Path) -> None:
    given = ENVIRONMENT.of(InstanceId(Role.MASTER, 0, 1), Resources(None, None), os.environ)
    ended = subprocess.run(
        [sys.executable, "-c", KNOCK, str(certificate_folder(tmp_path / "tls"))],
        env={**given, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


def test_a_run_within_a_process_of_another_job_inherits_nothing_of_that_job() -> None:
    others = {
        names.BRAIN_ADDRESS: "brain:7080",
        names.BRAIN_TOKEN: "secret",
        names.BRAIN_CA: "an authority",
        names.CPU_CORES: "8",
        names.LEAVE_SECONDS: "60",
        names.MEMORY_BYTES: "1",
        names.METRICS_PORT: "9090",
        names.REDIS_URL: "redis://another",
        names.FLASH_REDIS_URL: "redis://another",
        names.MANIFEST_FILE: "/another/manifest.json",
    }
    for role in (Role.MASTER, Role.PS, Role.WORKER):
        given = ENVIRONMENT.of(InstanceId(role, 0, 1), Resources(None, None), {**others, names.TLS_FOLDER: "/tls"})
        assert not others.items() & given.items()
        assert given[names.TLS_FOLDER] == "/tls"
