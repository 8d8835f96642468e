"""From what is wanted and what is observed to what is to be done.

Level-triggered: nothing here knows what changed, only what is. Run on every event and on a timer, it gives the same
answer to the same question, and its actions may be applied in part, late, or twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from emberscale_operator.machine.instances import (
    ExitReason,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Resources,
    Role,
)
from emberscale_operator.machine.restarts import Backoff, History


@dataclass(frozen=True)
class Policy:
    """What of a job's manifest concerns its instances, in seconds and counts.

    `stop_grace` is how long members may take to end by themselves once the job has ended. `backoff_limit` bounds the
    errors of each role and index. The master, which knows more, is mostly first to give up on its members, but it
    cannot count its own errors.
    """

    backoff: Backoff = field(default_factory=Backoff)
    backoff_limit: int = 6
    stop_grace: float = 10.0


@dataclass(frozen=True)
class Demand:
    """Instances `0 .. replicas - 1` of a role are wanted, each with these resources."""

    role: Role
    replicas: int
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True)
class Desired:
    """The plan. `ended_at` is set once the job needs no instance any more: when that became known."""

    demands: tuple[Demand, ...]
    ended_at: float | None = None


@dataclass(frozen=True)
class Create:
    """Start this incarnation; a no-op for one that was started before, whatever became of it."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Resize:
    """Give a running instance other limits."""

    id: InstanceId
    resources: Resources


@dataclass(frozen=True)
class Delete:
    """Ask a live instance to end, or forget one that has ended."""

    id: InstanceId


@dataclass(frozen=True)
class ReportExit:
    """Tell the master that a member is gone."""

    id: InstanceId
    exit: InstanceExit


@dataclass(frozen=True)
class Fail:
    """The job cannot go on."""

    reason: str
    message: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do before this time, unless something happens."""

    until: float


Action = Create | Resize | Delete | ReportExit | Fail | Wait

_MEMBERS = frozenset({Role.PS, Role.WORKER})
# The order in which the instances of a job that has ended go: a role ends when those before it are gone.
_WIND_DOWN: tuple[frozenset[Role], ...] = (
    _MEMBERS,
    frozenset({Role.MASTER}),
    frozenset({Role.REDIS, Role.BRAIN}),
)


def reconcile(
    policy: Policy, desired: Desired, observed: Sequence[Instance], history: History, now: float
) -> tuple[Action, ...]:
    """What to do now. `history` must have been advanced over `observed`.

    Keeps at most one live instance of a role and index, creates none that is not wanted, restarts what ended after its
    back-off, and leaves nothing behind once the job has ended: first the members, which the master tells to stop, then
    the master, then its store.
    """
    if desired.ended_at is not None:
        return _earliest_wait(_wind_down(policy, desired.ended_at, observed, now))
    return _earliest_wait(
        [
            *_exceeded(policy, history),
            *_reports(observed, history),
            *_converge(desired.demands, observed, history, now),
        ]
    )


def _converge(
    demands: Iterable[Demand], observed: Sequence[Instance], history: History, now: float
) -> Iterable[Action]:
    live: defaultdict[tuple[Role, int], list[Instance]] = defaultdict(list)
    for instance in sorted(observed, key=lambda instance: instance.id, reverse=True):
        if instance.live:
            live[instance.id.role, instance.id.index].append(instance)
    wanted = {(demand.role, index): demand.resources for demand in demands for index in range(demand.replicas)}
    for slot in sorted(live.keys() - wanted.keys()):
        yield from _delete_live(live[slot])
    for slot, resources in wanted.items():
        if slot in live:
            running, *older = live[slot]
            yield from _delete_live(older)
            if running.state is InstanceState.RUNNING and running.resources != resources:
                yield Resize(running.id, resources)
            continue
        past = history.of(*slot)
        if now < past.ready_at:
            yield Wait(past.ready_at)
        else:
            yield Create(InstanceId(*slot, past.last_incarnation + 1), resources)


def _delete_live(instances: Iterable[Instance]) -> Iterable[Action]:
    for instance in instances:
        if instance.state is InstanceState.RUNNING:
            yield Delete(instance.id)


def _reports(observed: Sequence[Instance], history: History) -> Iterable[Action]:
    """Exits are forgotten once the master knows of them; its own, its store's and its brain's are nobody's news."""
    master_lives = any(instance.live and instance.id.role is Role.MASTER for instance in observed)
    for instance in observed:
        if instance.exit is None:
            continue
        if instance.id.role not in _MEMBERS or instance.id in history.reported:
            yield Delete(instance.id)
        elif master_lives:
            yield ReportExit(instance.id, instance.exit)


def _exceeded(policy: Policy, history: History) -> Iterable[Action]:
    for (role, index), lives in sorted(history.lives.items()):
        if role is not Role.BRAIN and lives.faults > policy.backoff_limit and lives.last_exit is not None:
            last = lives.last_exit
            how = "for want of memory" if last.reason is ExitReason.OOM_KILLED else f"with exit code {last.code}"
            yield Fail(
                "BackoffLimitExceeded",
                f"{role}-{index} ended {lives.faults} times by errors of its own, the last time {how}; "
                f"spec.runPolicy.backoffLimit allows {policy.backoff_limit}",
            )
            return


def _wind_down(policy: Policy, ended_at: float, observed: Sequence[Instance], now: float) -> Iterable[Action]:
    for instance in observed:
        if not instance.live:
            yield Delete(instance.id)
    for tier, roles in enumerate(_WIND_DOWN):
        present = [instance for instance in observed if instance.live and instance.id.role in roles]
        if not present:
            continue
        if tier == 0 and now < ended_at + policy.stop_grace:
            yield Wait(ended_at + policy.stop_grace)
        else:
            yield from _delete_live(present)
        return


def _earliest_wait(actions: Iterable[Action]) -> tuple[Action, ...]:
    waits: list[float] = []
    others: list[Action] = []
    for action in actions:
        if isinstance(action, Wait):
            waits.append(action.until)
        else:
            others.append(action)
    return (*others, Wait(min(waits))) if waits else tuple(others)
