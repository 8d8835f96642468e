"""The actions of a decision, for a backend and the master's link. Each may be carried out late, in part, or twice."""

from dataclasses import dataclass

from emberscale_api.job.running import Scale
from emberscale_operator.machine.instances import InstanceExit, InstanceId, Resources


@dataclass(frozen=True)
class Create:
    """Starts this incarnation; a no-op if it was started before, whatever its state."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Resize:
    """Gives a running instance other limits."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Delete:
    """Asks a live instance to end. With `at_once`, a server gets no time to give rows away: none matter any more."""

    id: InstanceId
    at_once: bool = False


@dataclass(frozen=True)
class Kill:
    """Ends an instance that does not answer; `why` is a sentence."""

    id: InstanceId
    why: str


@dataclass(frozen=True)
class Forget:
    """Removes the remains of an instance that has ended."""

    id: InstanceId


@dataclass(frozen=True)
class ReportExit:
    """Tells the master that a member is gone."""

    id: InstanceId
    exit: InstanceExit


@dataclass(frozen=True)
class Suspend:
    """Asks the master to take a checkpoint and end the run, unless it is already doing so."""


@dataclass(frozen=True)
class ShutDown:
    """Tells the master of an ended job to exit by itself, after its last report."""

    id: InstanceId


@dataclass(frozen=True)
class DeleteJob:
    """Deletes the job itself, and with it everything that belongs to it."""


@dataclass(frozen=True)
class WaitUntil:
    """Decides again at this time, unless something happens before."""

    until: float


Action = Create | Resize | Delete | Kill | Forget | ReportExit | Scale | Suspend | ShutDown | DeleteJob | WaitUntil
"""`Scale` tells the master what the manifest says now."""
