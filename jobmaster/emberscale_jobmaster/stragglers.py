"""Handles workers that are much slower than their peers (DLRover-RM section 5.1).

Shard sizes always follow speed (`tasks.shard_batches`). A worker that is slow for long loses its leases, whose
remaining batches go to others. From then on it holds one lease at a time, down to a single batch, so the end of an
epoch waits for at most one of its batches.

Smaller shards do not suffice if the staleness bound limits the others: while a slow worker computes a gradient, all
others together may push `bound` batches, but could push `factor` times their number. Such a worker rests. It gets a
lease on trial from time to time, with growing pauses, and is replaced, since another process may run elsewhere or
undisturbed. If its replacement is slow too, that is not replaced soon.
"""

import math

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId, Role
from emberscale_jobmaster.observations import Observations, Rest
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.tasks import LEASES_PER_WORKER, shard_batches

TRIAL_SECONDS = 10.0
"""How long a worker that delays the others rests before its first trial; later rests double."""
LONGEST_REST_SECONDS = 160.0
TRIAL_BATCHES = 2
REPLACE_SECONDS = 20.0
"""How long a worker that delays the others is slow before it is replaced."""
LATE_REPLACE_SECONDS = 1200.0
"""The same for a worker that delays nobody, and only does little work itself."""
AGAIN_SECONDS = 600.0
"""How long the replacement of a slow worker is kept, slow or not."""


def leases_for(
    state: JobState, seen: Observations, spec: TrainingJobSpec, member: MemberId, now: float
) -> tuple[int, int]:
    """Returns how many leases a worker may hold now, and the batches of the next one; (0, 0): it rests."""
    bounds = spec.sharding
    peers = [seen.speed(name) for name in state.members.live_slots(Role.WORKER)]
    speed = seen.speed(member.slot)
    if state.stage is Stage.EVALUATE and seen.slowness(member.slot) is not None:
        return 1, 1
    if seen.slowness(member.slot) is None:
        return LEASES_PER_WORKER, shard_batches(
            state.ledger.available, speed, peers, bounds.min_batches, bounds.max_batches
        )
    rest = seen.rests.get(member.slot)
    if rest is None or not holds_up(state, seen, spec, member.slot):
        return 1, shard_batches(state.ledger.available, speed, peers, 1, bounds.max_batches)
    return (0, 0) if now < rest.until else (1, min(TRIAL_BATCHES, bounds.max_batches))


def leased(seen: Observations, member: MemberId, batches: int, now: float) -> Observations:
    """Notes that a worker got a lease of batches: a resting worker gets its next trial later."""
    seen = seen.granted(member, batches)
    rest = seen.rests.get(member.slot)
    if rest is None or seen.slowness(member.slot) is None:
        return seen
    pause = min(LONGEST_REST_SECONDS, 2 * rest.pause)
    return replace(seen, rests={**seen.rests, member.slot: replace(rest, until=now + pause, pause=pause)})


def newly_slow(before: Observations, after: Observations) -> list[str]:
    """Slots that are slow now, and were not before."""
    return [name for name in after.slow if after.slowness(name) is not None and before.slowness(name) is None]


def resting(state: JobState, seen: Observations, spec: TrainingJobSpec, now: float) -> Observations:
    """Rests workers that delay the others, and ends the rest of workers that are fast again."""
    if not seen.slow and not seen.rests:
        return seen
    rests = dict(seen.rests)
    for name in state.members.live_slots(Role.WORKER):
        rest = rests.get(name, Rest())
        if seen.slowness(name) is None:
            rests[name] = replace(rest, until=0.0, pause=0.0)
        elif not rest.pause and holds_up(state, seen, spec, name):
            rests[name] = replace(rest, until=now + TRIAL_SECONDS, pause=TRIAL_SECONDS)
    rests = {name: rest for name, rest in rests.items() if rest != Rest()}
    return seen if rests == seen.rests else replace(seen, rests=rests)


def replaceable(state: JobState, seen: Observations, spec: TrainingJobSpec, now: float) -> list[MemberId]:
    """The workers to replace now."""
    found = []
    for name, slot in state.members.slots.items():
        slowness, process = seen.slowness(name), slot.process
        if slot.role is not Role.WORKER or slowness is None or process is None or slowness.calm_since is not None:
            continue
        patience = REPLACE_SECONDS if holds_up(state, seen, spec, name) else LATE_REPLACE_SECONDS
        replaced_at = seen.rests.get(name, Rest()).replaced_at
        rested = replaced_at is None or now - replaced_at >= AGAIN_SECONDS
        if now - slowness.since >= patience and rested:
            found.append(MemberId(slot.role, slot.index, process.incarnation))
    return found


def replaced(seen: Observations, members: list[MemberId], now: float) -> Observations:
    """Notes that these workers are being replaced."""
    if not members:
        return seen
    slots = {member.slot for member in members}
    slow = {name: slowness for name, slowness in seen.slow.items() if name not in slots}
    return replace(seen, slow=slow, rests={**seen.rests, **{slot: Rest(replaced_at=now) for slot in slots}})


def holds_up(state: JobState, seen: Observations, spec: TrainingJobSpec, slot: str) -> bool:
    """Whether the others would push more than the bound on staleness allows during a batch of this slow worker."""
    slowness = seen.slowness(slot)
    if slowness is None:  # as nearly always, and what follows looks at all members
        return False
    others = len(state.members.live_slots(Role.WORKER)) - 1
    return slowness.factor * others > _staleness_bound(seen, spec)


def remedy(state: JobState, seen: Observations, spec: TrainingJobSpec, slot: str) -> str:
    """What is done about a slow worker, as the end of a sentence."""
    again = seen.rests.get(slot, Rest()).replaced_at is not None
    which = "replaced before, and slow again: " if again else ""
    return f"{which}it rests but for trials" if holds_up(state, seen, spec, slot) else f"{which}it gets smaller shards"


def _staleness_bound(seen: Observations, spec: TrainingJobSpec) -> int:
    """The bound in force, as the servers compute it."""
    training = spec.training
    reports = (sighting.server for sighting in seen.sightings.values())
    applied = max((report.applied_batches for report in reports if report is not None), default=0)
    if not training.staleness_warmup:
        return training.max_staleness
    return min(training.max_staleness, math.isqrt(applied // training.staleness_warmup))
