"""Instances of a job's roles, whether processes or pods."""

from dataclasses import dataclass
from enum import StrEnum

from emberscale_api.job import memory_quantity
from emberscale_api.job.roles import MemberId, Role, slot_name


@dataclass(frozen=True, order=True)
class InstanceId:
    """One incarnation of a member: `incarnation` counts from 1 for each role and index, and is never reused."""

    role: Role
    index: int
    incarnation: int

    @property
    def member(self) -> str:
        """The name that all incarnations share, such as `worker-0`."""
        return slot_name(self.role, self.index)

    def __str__(self) -> str:
        return f"{self.member} (incarnation {self.incarnation})"


@dataclass(frozen=True)
class Resources:
    """Limits of one instance: cores, and bytes of memory. None means unlimited."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None

    @property
    def quantities(self) -> tuple[str, str]:
        """Cores and memory as people write them: `1.5`, `1536Mi`; empty where there is no limit."""
        cpu, memory = self.cpu_cores, self.memory_bytes
        return "" if cpu is None else f"{cpu:g}", "" if memory is None else memory_quantity(memory)


class InstanceState(StrEnum):
    """`PENDING`: created, but not running yet. `TERMINATING`: asked to end, but not ended yet."""

    PENDING = "Pending"
    RUNNING = "Running"
    TERMINATING = "Terminating"
    EXITED = "Exited"


class ExitReason(StrEnum):
    """Why an instance ended, in Kubernetes' terms. `KILLED`: by a signal that the job itself did not cause."""

    COMPLETED = "Completed"
    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    KILLED = "Killed"
    NODE_LOST = "NodeLost"


@dataclass(frozen=True)
class InstanceExit:
    """The end of an instance, and its time in seconds; `code` is negative for a signal, as in `subprocess`.

    `deleted` says that its end was asked for.
    """

    reason: ExitReason
    code: int
    at: float
    deleted: bool = False


@dataclass(frozen=True)
class Instance:
    """One observed instance, seen until it is forgotten. Times are in seconds, on the clock of the decision.

    * `resources`: the limits that it was given, or runs with.
    * `exit`: set exactly when the state is `EXITED`.
    * `name`: the incarnation's name, as the master knows it.
    * `revision`: identifies the parts of the manifest that it was created from; empty if no edit outdates it.
    * `ready`: it serves.
    * `unanswered_since`: when it first left a call unanswered, if it has not answered one since; None if it answers or
      is not called.
    * `holds_log`: forgetting it deletes its log.
    * `unplaced`: it is pending because no node takes it: nothing of it has begun.
    """

    id: InstanceId
    state: InstanceState
    resources: Resources
    started_at: float
    exit: InstanceExit | None = None
    name: str = ""
    revision: str = ""
    ready: bool = False
    unanswered_since: float | None = None
    holds_log: bool = False
    unplaced: bool = False

    @property
    def has_completed(self) -> bool:
        """Whether this is a member that ended because its work is done."""
        ended = self.exit
        return self.id.role in (Role.PS, Role.WORKER) and ended is not None and ended.reason is ExitReason.COMPLETED

    @property
    def as_member(self) -> MemberId:
        """Returns how the master names it."""
        return MemberId(self.id.role, self.id.index, self.name)

    @property
    def live(self) -> bool:
        """Whether any part of it runs or will run."""
        return self.state is not InstanceState.EXITED

    @property
    def ending(self) -> bool:
        """Whether it has ended or was asked to."""
        return self.state in (InstanceState.TERMINATING, InstanceState.EXITED)
