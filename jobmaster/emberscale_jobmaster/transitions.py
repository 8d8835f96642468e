"""The allowed transitions between the phases of each operation, and of the job as people see it.

The machine checks every step of an operation against its table, so that a defect ends the master before its effect is
durable. `deploy/site/state_diagrams.py` draws the tables into docs/architecture.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.operations import (
    CheckpointPhase,
    Move,
    MovePhase,
    Operation,
    Pruning,
    ReloadPhase,
    RestorePhase,
)


class TransitionError(AssertionError):
    """An operation took a step that its table does not have. This is a defect."""


@dataclass(frozen=True)
class Transition:
    """One step from a phase to another. `before` is empty at the beginning, `after` at the end."""

    before: str
    after: str
    why: str


RESTORE = (
    Transition("", RestorePhase.FIND, "all servers are there"),
    Transition("", RestorePhase.LOAD, "all servers are there, and the job has no checkpoints"),
    Transition(RestorePhase.FIND, RestorePhase.LOAD, "the newest sound checkpoint is found"),
    Transition(RestorePhase.FIND, "", "the storage is out of reach, or a server is lost"),
    Transition(RestorePhase.LOAD, "", "all servers have loaded, or one failed"),
)

RELOAD = (
    Transition("", ReloadPhase.WAIT, "a server is lost, and the others may keep their rows"),
    Transition("", ReloadPhase.FIND, "a server is lost, and has a successor already"),
    Transition(ReloadPhase.WAIT, ReloadPhase.FIND, "the lost servers have successors"),
    Transition(ReloadPhase.FIND, ReloadPhase.LOAD, "the newest sound checkpoint is found"),
    Transition(ReloadPhase.LOAD, ReloadPhase.BARRIER, "the successors have loaded"),
    Transition(ReloadPhase.BARRIER, ReloadPhase.SWITCH, "the survivors hold pushes"),
    Transition(ReloadPhase.BARRIER, ReloadPhase.LOAD, "the barrier failed"),
    Transition(ReloadPhase.FIND, ReloadPhase.WAIT, "another server is lost, the master, or the storage"),
    Transition(ReloadPhase.LOAD, ReloadPhase.WAIT, "another server is lost, the master, or the checkpoint is damaged"),
    Transition(ReloadPhase.BARRIER, ReloadPhase.WAIT, "another server is lost, or the master"),
    Transition(ReloadPhase.LOAD, ReloadPhase.FIND, "another successor is there already, or the checkpoint is damaged"),
    Transition(ReloadPhase.BARRIER, ReloadPhase.FIND, "another successor is there already"),
    Transition(ReloadPhase.SWITCH, "", "all servers have switched, or the job rolls back"),
    Transition(ReloadPhase.WAIT, "", "no server is lost after all, or the job rolls back"),
    Transition(ReloadPhase.FIND, "", "the job rolls back"),
    Transition(ReloadPhase.LOAD, "", "the job rolls back"),
    Transition(ReloadPhase.BARRIER, "", "the job rolls back"),
)

CHECKPOINTING = (
    Transition("", CheckpointPhase.BARRIER, "the interval is over, or the job ends"),
    Transition(CheckpointPhase.BARRIER, CheckpointPhase.SAVE, "all servers agree, and have snapshots"),
    Transition(CheckpointPhase.SAVE, CheckpointPhase.WRITE, "all files are written"),
    Transition(CheckpointPhase.BARRIER, "", "the servers differ, or one failed"),
    Transition(CheckpointPhase.SAVE, "", "a server failed"),
    Transition(CheckpointPhase.WRITE, "", "the manifest is written"),
)

MOVE = (
    Transition("", MovePhase.PREPARE, "all servers of the new shape are there"),
    Transition(MovePhase.PREPARE, MovePhase.COPY, "all servers have room"),
    Transition(MovePhase.COPY, MovePhase.BARRIER, "little is left, and no checkpoint is in the way"),
    Transition(MovePhase.BARRIER, MovePhase.COPY, "the barrier failed"),
    Transition(MovePhase.BARRIER, MovePhase.SWITCH, "the last changes are handed over"),
    Transition(MovePhase.PREPARE, "", "not wanted any more, or failed"),
    Transition(MovePhase.COPY, "", "not wanted any more, or failed"),
    Transition(MovePhase.BARRIER, "", "a server is lost, or the master"),
    Transition(MovePhase.SWITCH, "", "all servers have switched, or the job rolls back"),
)

REBUILD = (
    Transition("", MovePhase.PREPARE, "the lost server has a successor, or has had none for seconds"),
    Transition(MovePhase.PREPARE, MovePhase.COPY, "the new owners have room"),
    Transition(MovePhase.COPY, MovePhase.SWITCH, "the new owners have all rows, or the keys of one server's rows"),
    Transition(MovePhase.PREPARE, "", "a new owner is lost, or it failed"),
    Transition(MovePhase.COPY, "", "a new owner is lost, or it failed"),
    Transition(MovePhase.SWITCH, "", "all servers have switched, or the job rolls back"),
)

JOB = (
    Transition("", JobPhase.PENDING, "submitted"),
    Transition(JobPhase.PENDING, JobPhase.PREPARING, "all servers are there"),
    Transition(JobPhase.PENDING, JobPhase.RESTORING, "all servers are there, and the data is indexed"),
    Transition(JobPhase.PREPARING, JobPhase.PENDING, "a server is lost"),
    Transition(JobPhase.PREPARING, JobPhase.RESTORING, "the data is indexed"),
    Transition(JobPhase.RESTORING, JobPhase.PENDING, "a server is lost before training"),
    Transition(JobPhase.RESTORING, JobPhase.TRAINING, "all servers have loaded"),
    Transition(JobPhase.RESTORING, JobPhase.EVALUATING, "the lost server alone has loaded"),
    Transition(JobPhase.RESTORING, JobPhase.SAVING, "the checkpoint holds all epochs"),
    Transition(JobPhase.TRAINING, JobPhase.EVALUATING, "the epoch is trained"),
    Transition(JobPhase.TRAINING, JobPhase.SAVING, "all epochs are trained"),
    Transition(JobPhase.TRAINING, JobPhase.RESTORING, "a server is lost"),
    Transition(JobPhase.EVALUATING, JobPhase.TRAINING, "the next epoch begins"),
    Transition(JobPhase.EVALUATING, JobPhase.SAVING, "all epochs are evaluated"),
    Transition(JobPhase.EVALUATING, JobPhase.RESTORING, "a server is lost"),
    Transition(JobPhase.SAVING, JobPhase.RESTORING, "a server is lost"),
    Transition(JobPhase.SAVING, JobPhase.COMPLETE, "the last checkpoint is complete"),
    Transition(JobPhase.COMPLETE, "", ""),
)
"""In addition, an unfinished job can be suspended or fail in any phase; a suspended job resumes as Pending."""

_TABLES: Mapping[str, tuple[Transition, ...]] = {
    "Restore": RESTORE,
    "Reload": RELOAD,
    "Checkpointing": CHECKPOINTING,
    "Move": MOVE,
    "Rebuild": REBUILD,
}
_ALLOWED = {
    kind: frozenset((transition.before, transition.after) for transition in table) for kind, table in _TABLES.items()
}


def check(before: Iterable[Operation], after: Iterable[Operation]) -> None:
    """Raises TransitionError if an operation's phase does not follow from its previous phase."""
    left = {operation.id: operation for operation in before}
    steps: list[tuple[Operation, str, str]] = []
    for operation in after:
        earlier = left.pop(operation.id, None)
        if earlier is not operation:
            steps.append((operation, "" if earlier is None else _phase(earlier), _phase(operation)))
    steps += [(operation, _phase(operation), "") for operation in left.values()]
    for operation, was, now in steps:
        name = _name(operation)
        if was != now and (was, now) not in _ALLOWED[name]:
            raise TransitionError(f"{name} {operation.id}: {now or 'its end'} does not follow {was or 'its beginning'}")


def _name(operation: Operation) -> str:
    """Returns the name that people use: a move of lost servers' rows is a rebuild."""
    if isinstance(operation, Move) and operation.lost:
        return "Rebuild"
    return type(operation).__name__


def _phase(operation: Operation) -> str:
    return "" if isinstance(operation, Pruning) else operation.phase
