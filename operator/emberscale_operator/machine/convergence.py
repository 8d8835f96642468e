"""Computes the actions that lead from the observed instances to the wanted ones.

The functions are level-triggered: they see the present state, not what changed. They run on every event and on a timer,
and return the same actions for the same state.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from emberscale_api.job.roles import Role
from emberscale_api.job.status import ENDED
from emberscale_api.readable import duration_text
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
from emberscale_operator.machine.instances import Instance, InstanceId, InstanceState, Resources
from emberscale_operator.machine.intent import Demand, JobIntent, Policy
from emberscale_operator.machine.restarts import History
from emberscale_operator.machine.standing import JobStanding, MasterReport

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
    """Creates and restarts wanted instances, and deletes all others, with at most one live for a role and index.

    What ended starts again after its back-off. `observed` is ascending by id.

    Completed members may be done because the job is. They are not replaced until the master knows of their end and its
    plan is heard: an earlier plan may be from before the end of the job.
    """
    live: defaultdict[tuple[Role, int], list[Instance]] = defaultdict(list)
    done: set[tuple[Role, int]] = set()
    for instance in reversed(observed):
        slot = (instance.id.role, instance.id.index)
        if instance.live:
            live[slot].append(instance)
        elif _may_be_through(instance, history, plan_heard):
            done.add(slot)
    wanted = {(demand.role, index): demand.resources for demand in demands for index in range(demand.replicas)}
    for slot in sorted(live.keys() - wanted.keys()):
        yield from _delete(live[slot])
    for slot, resources in wanted.items():
        past = history.of(*slot)
        if slot in live:
            newest, *older = live[slot]
            yield from _delete(older)
            if _differs(newest.resources, resources):
                yield from _resize(newest, resources)
        elif now < past.ready_at:
            yield WaitUntil(past.ready_at)
        elif slot not in done:
            yield Create(InstanceId(*slot, past.last_incarnation + 1), resources)


def _may_be_through(instance: Instance, history: History, plan_heard: bool) -> bool:
    """Whether a member may have completed because the job has ended, as far as the master has told."""
    deleted = instance.exit is not None and instance.exit.deleted
    goes_on = plan_heard and (deleted or instance.id in history.reported)
    return instance.has_completed and not goes_on


def report_exits(observed: Sequence[Instance], history: History) -> Iterable[Action]:
    """Forgets exits once the master knows of them. The exits of the master, its store and its brain need no report."""
    master_lives = any(instance.live and instance.id.role is Role.MASTER for instance in observed)
    for instance in observed:
        if instance.exit is None:
            continue
        if instance.id.role not in _MEMBERS or instance.id in history.reported:
            yield Forget(instance.id)
        elif master_lives:
            yield ReportExit(instance.id, instance.exit)


def replace_outdated(job: JobIntent, observed: Sequence[Instance]) -> Iterable[Action]:
    """Replaces instances that an edit of the manifest has made outdated.

    A master reads the manifest when it starts, and its state is durable, so it is replaced. Other instances are
    replaced only while they do not run yet: the edit may have fixed what they wait for, such as an image.
    """
    for instance in observed:
        replaceable = instance.id.role is Role.MASTER or instance.state is InstanceState.PENDING
        revision = job.revisions.get(instance.id.role, instance.revision)
        if replaceable and not instance.ending and instance.revision and instance.revision != revision:
            yield Delete(instance.id)


def end_given_up(policy: Policy, observed: Sequence[Instance], master: MasterReport, now: float) -> Iterable[Action]:
    """Ends instances that run but do not answer, and drained servers that others are to replace.

    A master is not killed while the job's own store does not answer, since the master then cannot answer either.
    """
    running = [instance for instance in observed if instance.state is InstanceState.RUNNING]
    for instance in running:
        if instance.unanswered_since is not None:
            yield _kill_or_wait(instance, instance.unanswered_since, policy.silence, "answered", now)
        elif master.silent and instance.as_member in master.silent & master.drained:
            yield Delete(instance.id, at_once=True)
        elif master.silent and instance.as_member in master.silent:
            yield Kill(instance.id, f"the master has not heard of {instance.id.member} for too long")
        elif policy.join_silence is not None and (since := _unheard_since(instance, master)) is not None:
            yield _kill_or_wait(instance, since, policy.join_silence, "joined the job", now)
    masters = [instance for instance in running if instance.id.role is Role.MASTER]
    if not masters or any(instance.unanswered_since is not None for instance in running):
        return
    newest = max(masters, key=lambda instance: instance.id)
    if master.refuses and master.unanswered_since is not None:
        yield from _end_strangers(running, master.unanswered_since + policy.silence, now)
    elif master.heard_at is None:
        if policy.start_silence:
            yield _kill_or_wait(newest, newest.started_at, policy.start_silence, "answered", now)
    elif master.unanswered_since is not None:
        yield _kill_or_wait(newest, master.unanswered_since, policy.silence, "answered", now)


def _end_strangers(running: Iterable[Instance], at: float, now: float) -> Iterable[Action]:
    """Ends a master that can never answer again, and members that no later master will know."""
    if now < at:
        yield WaitUntil(at)
        return
    for instance in running:
        if instance.id.role is Role.MASTER or instance.id.role in _MEMBERS:
            yield Kill(instance.id, "it has the tokens of a Secret that was deleted, and the job has others now")


def _kill_or_wait(instance: Instance, since: float, patience: float, what: str, now: float) -> Action:
    """Kills an instance that has not done `what` since `since`, once `patience` seconds are over; waits until then."""
    if now < since + patience:
        return WaitUntil(since + patience)
    who = "the master" if instance.id.role is Role.MASTER else instance.id.member
    return Kill(instance.id, f"{who} has not {what} for {duration_text(now - since)}")


def _unheard_since(instance: Instance, master: MasterReport) -> float | None:
    """Returns since when the master could have heard from a member but has not; None if it has, or cannot be asked.

    The master cannot give up a member that it has never heard from.
    """
    if instance.id.role not in _MEMBERS or not master.answers or master.joined is None or master.answers_since is None:
        return None
    if instance.as_member in master.joined:
        return None
    return max(instance.started_at, master.answers_since)


def wind_down(
    job: JobIntent, standing: JobStanding, observed: Sequence[Instance], master: MasterReport, now: float
) -> Iterable[Action]:
    """Removes everything: first the members, which the master tells to exit, then the master, then its store."""
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
            yield from _delete(present, at_once=True)
        return


def _end_master(
    standing: JobStanding, instance: Instance, master: MasterReport, grace_ends: float, now: float
) -> Iterable[Action]:
    """Tells a master that knows of the end to exit by itself, so that its last report is sent and its log complete."""
    if instance.state is not InstanceState.RUNNING or not standing.told or master.cannot_be_told:
        yield from _delete([instance], at_once=True)
    elif master.told_to_end_at is not None and now < master.told_to_end_at + _ENDING_SECONDS:
        yield WaitUntil(master.told_to_end_at + _ENDING_SECONDS)
    elif master.told_to_end_at is None and master.answers:
        yield ShutDown(instance.id)
    elif master.told_to_end_at is None and now < grace_ends:
        yield WaitUntil(grace_ends)
    else:
        yield from _delete([instance], at_once=True)


def _resize(instance: Instance, resources: Resources) -> Iterable[Action]:
    """Resizes what runs, and deletes what no node takes, so that its successor gets the resources.

    What is being prepared on a node keeps its resources until it runs.
    """
    if instance.state is InstanceState.RUNNING:
        yield Resize(instance.id, resources)
    elif instance.unplaced:
        yield from _delete([instance])


def _delete(instances: Iterable[Instance], at_once: bool = False) -> Iterable[Action]:
    for instance in instances:
        if not instance.ending:
            yield Delete(instance.id, at_once)


def _differs(seen: Resources, wanted: Resources) -> bool:
    """Returns whether an instance's limits differ from the wanted ones. Limits that no one set stay as they are."""
    cpu, memory = wanted.cpu_cores, wanted.memory_bytes
    return cpu not in (None, seen.cpu_cores) or memory not in (None, seen.memory_bytes)
