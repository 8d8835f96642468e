"""What runs: instances of a job's roles, whether they are processes or pods."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The parts of a job. `REDIS` and `BRAIN` belong to this job alone, where there are none to share."""

    REDIS = "redis"
    BRAIN = "brain"
    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


@dataclass(frozen=True, order=True)
class InstanceId:
    """One life of one member: `incarnation` counts from 1 for each role and index, and is never used twice."""

    role: Role
    index: int
    incarnation: int

    @property
    def member(self) -> str:
        """The name that outlives an incarnation, such as `worker-0`."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        return f"{self.member} (incarnation {self.incarnation})"


@dataclass(frozen=True)
class Resources:
    """Limits of one instance: cores, and bytes of memory. None means that there is no limit."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None


class InstanceState(StrEnum):
    """`TERMINATING`: it was deleted and has not ended yet."""

    RUNNING = "Running"
    TERMINATING = "Terminating"
    EXITED = "Exited"


class ExitReason(StrEnum):
    """Why an instance ended, in the words of Kubernetes. `KILLED`: by a signal that somebody else sent."""

    COMPLETED = "Completed"
    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    KILLED = "Killed"


@dataclass(frozen=True)
class InstanceExit:
    """How and when (seconds) an instance ended; `code` is negative for a signal, as in `subprocess`.

    `deleted` says that its end was asked for.
    """

    reason: ExitReason
    code: int
    at: float
    deleted: bool = False


@dataclass(frozen=True)
class Instance:
    """One observed instance; `exit` is set exactly when its state is `EXITED`. It is seen until it is deleted."""

    id: InstanceId
    state: InstanceState
    resources: Resources
    started_at: float
    exit: InstanceExit | None = None

    @property
    def live(self) -> bool:
        """Whether something of it still runs."""
        return self.state is not InstanceState.EXITED
