"""The environment of a job's processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberscale_api import environment as names
from emberscale_api.job.roles import Role
from emberscale_api.start import KERNEL_CACHE
from emberscale_operator.local.brain import NO_BRAIN, BrainAddress
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.machine import InstanceId, Resources

_OF_ONE_PROCESS = frozenset(
    {
        names.ALONE,
        names.BRAIN_ADDRESS,
        names.BRAIN_CA,
        names.BRAIN_TOKEN,
        names.CPU_CORES,
        names.FLASH_REDIS_URL,
        names.LEAVE_SECONDS,
        names.MANIFEST_FILE,
        names.MEMORY_BYTES,
        names.METRICS_PORT,
        names.OPERATOR_TOKEN_FILE,
        names.REDIS_URL,
    }
)
"""Variables that not every process has. None is inherited: a run may begin within a process of another job."""


@dataclass(frozen=True)
class JobEnvironment:
    """The environment that all processes of a job share, and secrets for some of them. `folder` is absolute."""

    job_name: str
    job_uid: str
    launch: str
    master_address: str
    folder: RunFolder
    redis_url: str
    socket_folder: Path
    kernel_cache: Path
    brain: BrainAddress = NO_BRAIN
    flash_redis_url: str = ""

    def incarnation(self, instance: InstanceId) -> str:
        """The name under which an instance joins; `launch` differs from one start of the job to the next."""
        return f"{instance.incarnation}-{self.launch}"

    def of_fork_server(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that libraries read when imported, and so must be set before a process is forked."""
        variables = {**inherited, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        variables.setdefault(KERNEL_CACHE, str(self.kernel_cache))
        variables.setdefault("GRPC_VERBOSITY", "ERROR")  # not each stranger whose TLS handshake fails
        return variables

    def of(self, instance: InstanceId, resources: Resources, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of one instance."""
        variables = {
            **{name: value for name, value in self.of_fork_server(inherited).items() if name not in _OF_ONE_PROCESS},
            names.JOB_NAME: self.job_name,
            names.JOB_UID: self.job_uid,
            names.ROLE: str(instance.role),
            names.INDEX: str(instance.index),
            names.INCARNATION: self.incarnation(instance),
            names.MASTER_ADDRESS: self.master_address,
            names.TOKEN_FILE: str(self.folder.token),
            names.LISTEN_HOST: "127.0.0.1",
            names.ADVERTISED_HOST: "127.0.0.1",
            names.SOCKET_DIRECTORY: str(self.socket_folder),
        }
        if self.flash_redis_url and instance.role in (Role.MASTER, Role.PS):
            variables[names.FLASH_REDIS_URL] = self.flash_redis_url
        if instance.role is Role.MASTER:
            variables[names.MANIFEST_FILE] = str(self.folder.manifest)
            variables[names.REDIS_URL] = self.redis_url
            variables[names.OPERATOR_TOKEN_FILE] = str(self.folder.operator_token)
            if instance.incarnation == 1:  # whatever ran in an earlier launch died with it
                variables[names.ALONE] = "1"
            if self.brain.authority is not None:
                variables[names.BRAIN_CA] = self.brain.authority.decode("ascii")
            if self.brain.address:
                variables[names.BRAIN_ADDRESS] = self.brain.address
                variables[names.BRAIN_TOKEN] = self.brain.token
        if resources.cpu_cores is not None:
            variables |= names.cpu_variables(resources.cpu_cores)
        if resources.memory_bytes is not None:
            variables[names.MEMORY_BYTES] = str(resources.memory_bytes)
        return variables
