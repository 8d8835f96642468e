"""Assigns buckets and dense pieces to servers: pure, and with as few moves as balance allows.

Scale-out, scale-in, replacing a server and draining it are one problem, given the present owners and the servers'
limits. Things without an owner are placed first, the heaviest first, on the server furthest below its share. Then the
server furthest above its share gives to the one furthest below, until no transfer brings the two closer.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

NOBODY = -1
"""Stands for a missing owner: the previous owner may not own the thing any more, or there never was one."""


def placed(
    owners: Sequence[int], servers: int, weights: Sequence[int] | None = None, limits: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the new owner of each thing, in [0, servers); `owners` are the present ones, or NOBODY.

    * `weights`: the weight of each thing, such as bytes or requests; 1 by default.
    * `limits`: the capacity of each server, such as bytes of memory; equal by default. A server's share is the part of
      the whole weight that is proportional to its limit. A server with the limit 0 owns nothing.
    * No two servers differ by more than the heaviest thing in how far they are above or below their shares.
    * With equal weights and limits, no placement with numbers that differ by at most one moves fewer things.

    Raises ValueError if no server may own anything, for weights that are not positive, and for negative limits.
    """
    weight = [1] * len(owners) if weights is None else list(weights)
    limit = [1] * servers if limits is None else list(limits)
    if len(weight) != len(owners) or len(limit) != servers or min(weight, default=1) < 1:
        raise ValueError("expected a positive weight of each thing, and a limit of each server")
    if min(limit, default=0) < 0 or sum(limit) < 1:
        raise ValueError("expected a server or more with a positive limit, and no negative limit")
    takers = [server for server in range(servers) if limit[server]]
    if len(takers) < servers:
        places = {server: place for place, server in enumerate(takers)}
        compact = placed(
            [places.get(owner, NOBODY) for owner in owners], len(takers), weight, [limit[server] for server in takers]
        )
        return tuple(takers[place] for place in compact)
    whole = sum(limit)
    after = [owner if 0 <= owner < servers else NOBODY for owner in owners]
    above = [-limit[server] * sum(weight) for server in range(servers)]  # in units of weight / whole
    for thing, owner in enumerate(after):
        if owner != NOBODY:
            above[owner] += weight[thing] * whole
    homeless = [thing for thing, owner in enumerate(after) if owner == NOBODY]
    taker = 0
    if weights is not None:  # equal weights are sorted already
        homeless.sort(key=lambda one: (-weight[one], one))
    for thing in homeless:
        if above[taker] + weight[thing] * whole > 0:  # keeps neighbours together
            taker = above.index(min(above))
        after[thing] = taker
        above[taker] += weight[thing] * whole
    owned: list[list[tuple[int, int]]] = [[] for _ in range(servers)]  # (weight, thing) of each server, ascending
    entries = zip(weight, range(len(after)), strict=True)
    for entry in entries if weights is None else sorted(entries):
        owned[after[entry[1]]].append(entry)
    while True:
        giver, taker = above.index(max(above)), above.index(min(above))
        given = _given(owned[giver], above[giver] - above[taker], whole)
        if given is None:
            return tuple(after)
        owned[giver].remove(given)
        insort(owned[taker], given)
        above[giver] -= given[0] * whole
        above[taker] += given[0] * whole
        after[given[1]] = taker


def _given(owned: Sequence[tuple[int, int]], gap: int, whole: int) -> tuple[int, int] | None:
    """Returns the (weight, thing) that best narrows a gap between two servers, the first of equals; None if none."""
    place = bisect_left(owned, (-(-gap // (2 * whole)), 0))  # the first that weighs at least half of the gap
    at_least = owned[place : place + 1]
    below = owned[bisect_left(owned, (owned[place - 1][0], 0)) : place][:1] if place else []
    useful = [entry for entry in (*below, *at_least) if entry[0] * whole < gap]
    return min(useful, key=lambda entry: (abs(gap - 2 * entry[0] * whole), entry[1]), default=None)
