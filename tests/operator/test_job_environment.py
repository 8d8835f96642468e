"""The environment of a job's processes on this machine."""

from pathlib import Path

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
