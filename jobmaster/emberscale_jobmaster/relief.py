"""Takes buckets away from a parameter server that is much slower than its peers, and has it replaced.

A server's time per batch grows with the buckets that it owns. A server that is slow for long gets the share at which
its time equals that of its peers, and a live move takes the rest away. Every batch asks each server that owns anything,
so a server that is slow even for its few buckets still delays all batches; it is drained and replaced.

Copying rows costs a slow server the CPU that it lacks. An extremely slow server is replaced at once if the job can go
back to a fresh checkpoint, such as a flash checkpoint; otherwise it is drained first.

A server that replaced a slow one recently is kept. The fixed cost of a request does not shrink with the share, so the
share does not measure health: a server that is no longer slow gets four times its share on trial, after a pause that
doubles with each trial. So a noisy cluster does not move rows for ever.
"""

import math

from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_jobmaster import draining
from emberscale_jobmaster.effects import LogEvent
from emberscale_jobmaster.figures import wanted_shares
from emberscale_jobmaster.observations import Observations, Relief
from emberscale_jobmaster.scaling import may_move
from emberscale_jobmaster.slowness import SLOW_FACTOR
from emberscale_jobmaster.state import JobState

LEAST_SHARE = 0.02
"""The smallest share of a slow server; one that is still slow with it gains nothing by losing more buckets."""
STEADY_SECONDS = 10.0
"""How long the table must have been in force before paces reflect it."""
TRIAL_SECONDS, LONGEST_PAUSE_SECONDS = 120.0, 3600.0
TRIAL_FACTOR = 4.0
"""The factor by which a trial grows a share."""
REPLACE_SECONDS = 20.0
"""How long a server keeps fewer buckets before it is drained and replaced."""
EXTREME_FACTOR = 8.0
"""A server that is at least this much slower is replaced without first trying fewer buckets."""
FRESH_SECONDS = 60.0
"""How many seconds of training may be repeated to spare such a server the copying."""
AGAIN_SECONDS = 1800.0
"""How long the successor of a slow server is kept, slow or not."""


def relieve(
    state: JobState, seen: Observations, now: float, clock: float
) -> tuple[JobState, Observations, tuple[MemberId, ...], tuple[LogEvent, ...]]:
    """Changes the shares of slow servers and of recovered ones, and begins drains.

    `now` is on the clock of events, `clock` on the job's. A share of 0 stays. The returned members must be replaced at
    once.
    """
    servers = state.routing.table.servers
    if not may_move(state) or len(servers) == 1:  # a lone server's only peers are leaving
        return state, seen, (), ()
    names = [slot_name(Role.PS, index) for index in range(len(servers))]
    reliefs = {name: relief for name, relief in seen.reliefs.items() if name in names}
    is_placed = state.move is None and wanted_shares(state, len(servers)) == state.routing.shares
    factors = seen.slower(state.members)
    # a server that later joins under the same index starts with a full share
    shares = {index: share for index, share in state.shares.items() if index < len(servers) or share == 0.0}
    notes: list[LogEvent] = []
    lost: list[MemberId] = []
    for index in range(len(servers)):
        name, share = names[index], shares.get(index, 1.0)
        process = state.members.process(Role.PS, index)
        if share == 0.0 or process is None or index in state.drains:
            continue
        relief = reliefs.get(name)
        if relief is None:
            relief = Relief(process.incarnation, now, now, TRIAL_SECONDS, 1 / share)
        elif relief.incarnation != process.incarnation:  # a successor of the slow process
            relief = Relief(process.incarnation, now, now, TRIAL_SECONDS, 1.0)
            shares[index] = share = 1.0
        slowness, is_kept = seen.slowness(name), _is_kept(state, index, clock)
        slow = slowness if slowness is not None and slowness.calm_since is None else None
        if not is_placed:
            relief = replace(relief, changed_at=now)
        elif slow is not None and not lost and not is_kept and _is_extreme(relief, share, slow.factor, now):
            relief = replace(relief, since=slow.since, factor=slow.reported)
            if _redone_seconds(state, clock) <= FRESH_SECONDS:
                state = _noted(state, index, clock)
                lost.append(MemberId(Role.PS, index, process.incarnation))
                notes.append(LogEvent("server_is_replaced", {"member": name, "reason": "CheckpointIsCheaper"}))
            else:
                state = _drained(state, index, process.incarnation, clock)
        elif (
            slow is not None
            and now - max(relief.changed_at, slow.since) >= STEADY_SECONDS
            and (after := max(LEAST_SHARE, share / slow.factor)) < share
        ):
            shares[index] = after
            if share == 1.0:
                relief = replace(relief, since=slow.since, factor=slow.reported)
            relief = replace(relief, changed_at=now)
            notes.append(LogEvent("server_is_relieved", {"member": name, "share": round(after, 3)}))
        elif not is_kept and _is_replaceable(relief, share, factors.get(name, 0.0), now):
            state = _drained(state, index, process.incarnation, clock)
        elif slowness is None and share < 1.0 and now - relief.changed_at >= relief.pause:
            shares[index] = min(1.0, share * TRIAL_FACTOR)
            relief = replace(relief, changed_at=now, pause=min(LONGEST_PAUSE_SECONDS, 2 * relief.pause))
            notes.append(LogEvent("server_is_tried", {"member": name, "share": round(shares[index], 3)}))
        reliefs[name] = relief
    shares = {index: share for index, share in shares.items() if share != 1.0}
    if shares != state.shares:
        state = replace(state, shares=shares)
    seen = seen if reliefs == seen.reliefs else replace(seen, reliefs=reliefs)
    return state, seen, tuple(lost), tuple(notes)


def _is_kept(state: JobState, index: int, clock: float) -> bool:
    """Whether a server recently replaced a slow one."""
    replaced_at = state.replaced_at.get(index)
    return replaced_at is not None and clock - replaced_at < AGAIN_SECONDS


def _is_extreme(relief: Relief, share: float, factor: float, now: float) -> bool:
    """Whether a server is too slow to try fewer buckets."""
    return share == 1.0 and factor >= EXTREME_FACTOR and now - relief.changed_at >= STEADY_SECONDS


def _drained(state: JobState, index: int, incarnation: str, clock: float) -> JobState:
    """Begins to drain a slow server. The drain cannot begin while all others leave; the next call tries again."""
    state = draining.begin(state, index, incarnation, _WHY, clock, replaced=True)
    return _noted(state, index, clock) if index in state.drains else state


def _noted(state: JobState, index: int, clock: float) -> JobState:
    return replace(state, replaced_at={**state.replaced_at, index: clock})


def _redone_seconds(state: JobState, clock: float) -> float:
    """Returns the seconds of training that a roll-back would repeat now."""
    taken = [state.cut_at] if state.checkpoint else []
    taken += [state.flash.taken_at] if state.flash.checkpoint else []
    return clock - max(taken, default=-math.inf)


def _is_replaceable(relief: Relief, share: float, factor: float, now: float) -> bool:
    """Whether a server has had fewer buckets for long enough, and is still slow for its share."""
    return share < 1.0 and now - relief.changed_at >= REPLACE_SECONDS and factor >= SLOW_FACTOR * share


def remedy(state: JobState, index: int) -> str:
    """What is done about a slow server, as the end of a sentence; empty: nothing yet."""
    share = state.shares.get(index, 1.0)
    if share == 1.0:
        return ""
    if share == 0.0 or index in state.drains:
        return "its rows move away, and it is replaced"
    owned = state.routing.table.bucket_owners.count(index)
    return f"it owns {owned} of {len(state.routing.table.bucket_owners)} buckets"


_WHY = "it is much slower than its peers"
