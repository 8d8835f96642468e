"""Takes buckets away from a parameter server that is much slower than its peers, and gives them back later.

A server's time for a batch follows the buckets that it owns. One that is slow for long gets the share that brings its
time to that of its peers, and a live move takes the rest away. What a request costs whatever its size stays, so a
share is no measure of health: a server gets more on trial, four times as much at once, after a pause that doubles with
each trial. So a noisy cluster does not move rows for ever.
"""

from dataclasses import replace

from emberscale_api.job.roles import Role
from emberscale_jobmaster.effects import LogEvent
from emberscale_jobmaster.membership import slot_name
from emberscale_jobmaster.observations import Observations, Relief
from emberscale_jobmaster.scaling import may_move
from emberscale_jobmaster.state import JobState, wanted_shares

LEAST_SHARE = 0.02
"""No server is relieved of more; one that is still slow then does not gain by losing more buckets."""
SETTLED_SECONDS = 10.0
"""How long the table must have been in force before paces say something about it."""
TRIAL_SECONDS, LONGEST_PAUSE_SECONDS = 120.0, 3600.0
TRIAL_FACTOR = 4.0
"""By how much a share grows at once."""


def relieve(state: JobState, seen: Observations, now: float) -> tuple[JobState, Observations, tuple[LogEvent, ...]]:
    """Changes the shares of slow servers, and of those that may be fast again; `now` is the clock of events.

    A share of 0 is that of a server that is drained, and stays.
    """
    servers = state.routing.table.servers
    if not may_move(state):
        return state, seen, ()
    reliefs = {name: relief for name, relief in seen.reliefs.items() if name in map(_name, range(len(servers)))}
    settled = state.move is None and wanted_shares(state, len(servers)) == state.routing.shares
    # a server that joins later under the index of one that left is another one
    shares = {index: share for index, share in state.shares.items() if index < len(servers) or share == 0.0}
    notes = []
    for index in range(len(servers)):
        name, share = _name(index), shares.get(index, 1.0)
        process = state.members.process(Role.PS, index)
        if share == 0.0 or process is None:
            continue
        relief = reliefs.get(name)
        if relief is None or (share == 1.0 and relief.incarnation != process.incarnation):
            relief = Relief(process.incarnation, now, now, TRIAL_SECONDS, 1 / share)
        elif relief.incarnation != process.incarnation:  # the slow one is gone
            relief = Relief(process.incarnation, now, now, TRIAL_SECONDS, 1.0)
            shares[index] = 1.0
        slowness = seen.slowness(name)
        is_slow = slowness is not None and slowness.calm_since is None
        if not settled:
            relief = replace(relief, changed_at=now)
        elif slowness is not None and is_slow and now - max(relief.changed_at, slowness.since) >= SETTLED_SECONDS:
            after = max(LEAST_SHARE, share / slowness.factor)
            if after < share:
                shares[index] = after
                if share == 1.0:
                    relief = replace(relief, since=slowness.since, factor=slowness.told)
                relief = replace(relief, changed_at=now)
                notes.append(LogEvent("server_is_relieved", name, f"its share goes from {share:.3g} to {after:.3g}"))
        elif slowness is None and share < 1.0 and now - relief.changed_at >= relief.pause:
            shares[index] = min(1.0, share * TRIAL_FACTOR)
            relief = replace(relief, changed_at=now, pause=min(LONGEST_PAUSE_SECONDS, 2 * relief.pause))
            notes.append(LogEvent("server_is_tried", name, f"its share goes from {share:.3g} to {shares[index]:.3g}"))
        reliefs[name] = relief
    shares = {index: share for index, share in shares.items() if share != 1.0}
    if shares != state.shares:
        state = replace(state, shares=shares)
    return state, seen if reliefs == seen.reliefs else replace(seen, reliefs=reliefs), tuple(notes)


def remedy(state: JobState, index: int) -> str:
    """What is done about a slow server, as the end of a sentence; empty: nothing yet."""
    share = state.shares.get(index, 1.0)
    if share == 1.0:
        return ""
    if share == 0.0:
        return "its rows move away"
    owned = state.routing.table.bucket_owners.count(index)
    return f"it owns {owned} of {len(state.routing.table.bucket_owners)} buckets"


def _name(index: int) -> str:
    return slot_name(Role.PS, index)
