"""Decides when an instance that ended may restart, and keeps the history that this needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_operator.machine.instances import ExitReason, Instance, InstanceExit, InstanceId

_FAULTS = frozenset({ExitReason.ERROR, ExitReason.OOM_KILLED})


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off in seconds, like the kubelet's: it resets after an instance has lived for `reset_after`.

    The first restart is immediate, the second waits `base`, the third `base * factor`, up to `limit`. An instance that
    completed while its job continues waits at least `base`, because the job is usually about to end.
    """

    base: float = 1.0
    factor: float = 2.0
    limit: float = 300.0
    reset_after: float = 60.0

    def delay(self, streak: int, reason: ExitReason) -> float:
        """Seconds to wait after the `streak`-th exit in a row, counted from 1."""
        # the exponent is bounded so that a streak of thousands cannot overflow a float
        delay = 0.0 if streak <= 1 else min(self.limit, self.base * self.factor ** min(streak - 2, 64))
        return max(delay, self.base) if reason is ExitReason.COMPLETED else delay


@dataclass(frozen=True)
class Lives:
    """The history of all incarnations of one role and index.

    * `last_incarnation`: the newest that was seen; 0 before the first.
    * `counted`: the newest whose exit is in the numbers below.
    * `restarts`: exits that were not requested, completions excluded.
    * `streak`: consecutive exits, each after a short life.
    * `ready_at`: when the next may start, in seconds.
    * `faults`: errors of the job itself, as opposed to kills from outside.
    """

    last_incarnation: int = 0
    counted: int = 0
    restarts: int = 0
    streak: int = 0
    ready_at: float = 0.0
    faults: int = 0
    last_exit: InstanceExit | None = None


_UNLIVED = Lives()


@dataclass(frozen=True)
class History:
    """The state that outlives the instances: their past lives, and the exits that were reported to the master."""

    lives: Mapping[tuple[Role, int], Lives] = field(default_factory=lambda: MappingProxyType({}))
    reported: frozenset[InstanceId] = frozenset()

    def of(self, role: Role, index: int) -> Lives:
        """The past of one role and index."""
        return self.lives.get((role, index), _UNLIVED)

    def with_reported(self, instance: InstanceId) -> "History":
        """Returns this history after an exit was reported to the master."""
        return replace(self, reported=self.reported | {instance})

    def restarts(self, role: Role) -> int:
        """Returns how often an instance of the role ended while it was wanted, completions excluded."""
        return sum(lives.restarts for (of, _), lives in self.lives.items() if of is role)


def advance(history: History, observed: Sequence[Instance], backoff: Backoff, wanted: bool = True) -> History:
    """Folds an observation, ascending by id, into the history; folding the same observation again changes nothing.

    While a job rests, no instance is `wanted`, and no exit counts.
    """
    lives = dict(history.lives)
    for instance in observed:
        slot = (instance.id.role, instance.id.index)
        past = lives.get(slot, _UNLIVED)
        if instance.id.incarnation > past.last_incarnation:
            past = replace(past, last_incarnation=instance.id.incarnation)
        if instance.exit is not None and instance.id.incarnation > past.counted:
            past = _count_exit(past, instance, instance.exit, backoff, wanted)
        lives[slot] = past
    seen = frozenset(instance.id for instance in observed)
    return History(MappingProxyType(lives), history.reported & seen)


def _count_exit(past: Lives, instance: Instance, ended: InstanceExit, backoff: Backoff, wanted: bool) -> Lives:
    counted = replace(past, counted=instance.id.incarnation, last_exit=ended)
    if ended.deleted or not wanted:
        return counted
    streak = 1 if ended.at - instance.started_at >= backoff.reset_after else past.streak + 1
    return replace(
        counted,
        restarts=past.restarts + (ended.reason is not ExitReason.COMPLETED),
        streak=streak,
        ready_at=ended.at + backoff.delay(streak, ended.reason),
        faults=past.faults + (ended.reason in _FAULTS),
    )
