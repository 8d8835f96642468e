"""The view of a running job, and the outcome of one that has ended."""

from collections.abc import Mapping
from dataclasses import dataclass

from emberscale_api.job.running import JobPlan, JobStatus
from emberscale_api.job.status import JobPhase
from emberscale_operator.local.processes import ProcessView
from emberscale_operator.machine import ExitReason


@dataclass(frozen=True)
class MemberExit:
    """A process that ended while it was wanted.

    `grown` is the limit that its successors get for want of memory. `disk_is_full`: nothing could be written then.
    """

    name: str
    reason: ExitReason
    code: int
    memory_limit: int | None
    grown: int | None = None
    disk_is_full: bool = False


@dataclass(frozen=True)
class RunView:
    """What is known of the running job, `seconds` after its start.

    `status` is None until the master was reached; `exits` are all since the start, `restarts` by role. `unforked` names
    the members that have waited long for the fork server, which first imports what they need, and compiles it if that
    is new. Later it forks at once.
    """

    seconds: float
    status: JobStatus | None
    processes: tuple[ProcessView, ...]
    restarts: Mapping[str, int]
    exits: tuple[MemberExit, ...]
    suspending: bool
    unforked: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    `phase` is None for a run that was cut short. `peak_memory` is in bytes by member, `restarts` by role.
    `plan` is the last that asked for processes.
    """

    phase: JobPhase | None
    reason: str
    message: str
    status: JobStatus | None
    peak_memory: Mapping[str, int]
    restarts: Mapping[str, int]
    plan: JobPlan | None = None
