"""From the instances that are wanted and those that are observed to what is to be done.

Level-triggered: nothing here knows what changed, only what is. Run on every event and on a timer, it gives the same
answer to the same question.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from emberscale_api.job.roles import Role
from emberscale_operator.machine.actions import (
    Action,
    Create,
    Delete,
    Forget,
    Kill,
    ReportExit,
    Resize,
    ShutDown,
    WaitUntil,
)
from emberscale_operator.machine.instances import ExitReason, Instance, InstanceId, InstanceState, Resources
from emberscale_operator.machine.intent import Demand, JobIntent, Policy
from emberscale_operator.machine.restarts import History
from emberscale_operator.machine.standing import ENDED, JobStanding, MasterReport

_MEMBERS = frozenset({Role.PS, Role.WORKER})
_ENDING_SECONDS = 30.0
"""A master that was told to end may seem to run for a while after it has gone."""
# The order in which the instances of a job that has ended go: a role ends when those before it are gone.
_WIND_DOWN: tuple[frozenset[Role], ...] = (
    _MEMBERS,
    frozenset({Role.MASTER}),
    frozenset({Role.REDIS, Role.BRAIN}),
)


def converge(
    demands: Iterable[Demand], observed: Sequence[Instance], history: History, plan_heard: bool, now: float
) -> Iterable[Action]:
    """Keeps at most one live instance of a role and index, creates none that is not wanted, and restarts what ended
    after its back-off.

    Members that are done are not replaced before the master was heard to want any: they may be done because the job is.
    """
    live: defaultdict[tuple[Role, int], list[Instance]] = defaultdict(list)
    done: set[tuple[Role, int]] = set()
    for instance in sorted(observed, key=lambda instance: instance.id, reverse=True):
        slot = (instance.id.role, instance.id.index)
        if instance.live:
            live[slot].append(instance)
        elif instance.exit is not None and instance.exit.reason is ExitReason.COMPLETED and slot[0] in _MEMBERS:
            done.add(slot)
    wanted = {(demand.role, index): demand.resources for demand in demands for index in range(demand.replicas)}
    for slot in sorted(live.keys() - wanted.keys()):
        yield from _delete(live[slot])
    for slot, resources in wanted.items():
        past = history.of(*slot)
        if slot in live:
            newest, *older = live[slot]
            yield from _delete(older)
            if newest.state is InstanceState.RUNNING and _differs(newest.resources, resources):
                yield Resize(newest.id, resources)
        elif now < past.ready_at:
            yield WaitUntil(past.ready_at)
        elif plan_heard or slot not in done:
            yield Create(InstanceId(*slot, past.last_incarnation + 1), resources)


def report_exits(observed: Sequence[Instance], history: History) -> Iterable[Action]:
    """Forgets exits once the master knows of them; its own, its store's and its brain's are nobody's news."""
    master_lives = any(instance.live and instance.id.role is Role.MASTER for instance in observed)
    for instance in observed:
        if instance.exit is None:
            continue
        if instance.id.role not in _MEMBERS or instance.id in history.reported:
            yield Forget(instance.id)
        elif master_lives:
            yield ReportExit(instance.id, instance.exit)


def replace_outdated(job: JobIntent, observed: Sequence[Instance]) -> Iterable[Action]:
    """Replaces instances for which the manifest was edited since.

    A master reads the manifest when it starts, and its state is durable. Of the others those that do not run yet may
    wait for what the edit has mended, such as an image; those that run are left alone.
    """
    for instance in observed:
        replaceable = instance.id.role is Role.MASTER or instance.state is InstanceState.PENDING
        revision = job.revisions.get(instance.id.role, instance.revision)
        if replaceable and not instance.ending and instance.revision and instance.revision != revision:
            yield Delete(instance.id)


def kill_silent(policy: Policy, observed: Sequence[Instance], master: MasterReport, now: float) -> Iterable[Action]:
    """Kills what runs and does not answer, so that another takes its place.

    A master is not judged while the job's own store leaves it without answers of its own.
    """
    running = [instance for instance in observed if instance.state is InstanceState.RUNNING]
    for instance in running:
        since = instance.unanswered_since
        if since is not None:
            if now >= since + policy.silence:
                yield Kill(instance.id, f"{instance.id.member} has not answered for {now - since:.0f}s")
            else:
                yield WaitUntil(since + policy.silence)
        elif (instance.id.role, instance.id.index, instance.name) in master.silent:
            yield Kill(instance.id, f"the master has not heard of {instance.id.member} for too long")
        elif policy.join_silence is not None and (since := _unheard_since(instance, master)) is not None:
            if now >= since + policy.join_silence:
                yield Kill(instance.id, f"{instance.id.member} has not joined the job for {now - since:.0f}s")
            else:
                yield WaitUntil(since + policy.join_silence)
    masters = [instance for instance in running if instance.id.role is Role.MASTER]
    if not masters or any(instance.unanswered_since is not None for instance in running):
        return
    newest = max(masters, key=lambda instance: instance.id)
    if master.heard_at is not None:
        since, patience = master.unanswered_since, policy.silence
    else:
        since, patience = newest.started_at, policy.start_silence or float("inf")
    if since is None:
        return
    if now >= since + patience:
        yield Kill(newest.id, f"the master has not answered for {now - since:.0f}s")
    elif patience < float("inf"):
        yield WaitUntil(since + patience)


def _unheard_since(instance: Instance, master: MasterReport) -> float | None:
    """Since when the master could have heard of a member and has not; None where it has, or cannot be asked.

    Whom it never heard of it cannot give up.
    """
    if instance.id.role not in _MEMBERS or not master.answers or master.joined is None or master.answers_since is None:
        return None
    if (instance.id.role, instance.id.index, instance.name) in master.joined:
        return None
    return max(instance.started_at, master.answers_since)


def wind_down(
    job: JobIntent, standing: JobStanding, observed: Sequence[Instance], master: MasterReport, now: float
) -> Iterable[Action]:
    """Leaves nothing behind: first the members go, which the master tells to, then the master, then its store."""
    keeps = job.keeps_ended and standing.phase in ENDED
    for instance in observed:
        if not instance.live and not (keeps and instance.holds_log):
            yield Forget(instance.id)
    grace_ends = (standing.rested_at or 0.0) + (job.policy.stop_grace if standing.told else 0.0)
    for roles in _WIND_DOWN:
        present = [instance for instance in observed if instance.live and instance.id.role in roles]
        if not present:
            continue
        if roles is _WIND_DOWN[0] and now < grace_ends:
            yield WaitUntil(grace_ends)
        elif Role.MASTER in roles:
            for instance in present:
                yield from _end_master(standing, instance, master, grace_ends, now)
        else:
            yield from _delete(present)
        return


def _end_master(
    standing: JobStanding, instance: Instance, master: MasterReport, grace_ends: float, now: float
) -> Iterable[Action]:
    """A master that knows of the end is told to end by itself: it says its last before, and its log is whole."""
    if instance.state is not InstanceState.RUNNING or not standing.told or master.cannot_be_told:
        yield from _delete([instance])
    elif master.told_to_end_at is not None and now < master.told_to_end_at + _ENDING_SECONDS:
        yield WaitUntil(master.told_to_end_at + _ENDING_SECONDS)
    elif master.told_to_end_at is None and master.answers:
        yield ShutDown(instance.id)
    elif master.told_to_end_at is None and now < grace_ends:
        yield WaitUntil(grace_ends)
    else:
        yield from _delete([instance])


def _delete(instances: Iterable[Instance]) -> Iterable[Action]:
    for instance in instances:
        if not instance.ending:
            yield Delete(instance.id)


def _differs(seen: Resources, wanted: Resources) -> bool:
    """Whether an instance has other limits than it is to have. Limits that nobody asked for are not ours to change."""
    return any(
        limit is not None and limit != present
        for limit, present in ((wanted.cpu_cores, seen.cpu_cores), (wanted.memory_bytes, seen.memory_bytes))
    )
