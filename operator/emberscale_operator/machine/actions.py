"""What a decision asks of a backend and of the master's link. Each may be carried out late, in part, or twice."""

from dataclasses import dataclass

from emberscale_operator.machine.instances import InstanceExit, InstanceId, Resources


@dataclass(frozen=True)
class Create:
    """Starts this incarnation; a no-op for one that was started before, whatever became of it."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Resize:
    """Gives a running instance other limits."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Delete:
    """Asks a live instance to end."""

    id: InstanceId


@dataclass(frozen=True)
class Kill:
    """Ends an instance that does not answer; `why` is a sentence for people."""

    id: InstanceId
    why: str


@dataclass(frozen=True)
class Forget:
    """Removes what is left of an instance that has ended."""

    id: InstanceId


@dataclass(frozen=True)
class ReportExit:
    """Tells the master that a member is gone."""

    id: InstanceId
    exit: InstanceExit


@dataclass(frozen=True)
class Suspend:
    """Asks the master for a checkpoint and the end of the run, unless that is under way."""


@dataclass(frozen=True)
class ShutDown:
    """Tells the master of a job that is over to end by itself, after it has said its last."""

    id: InstanceId


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the job itself, and so all that belongs to it."""


@dataclass(frozen=True)
class WaitUntil:
    """Decides again at this time, unless something happens before."""

    until: float


Action = Create | Resize | Delete | Kill | Forget | ReportExit | Suspend | ShutDown | DeleteJob | WaitUntil
