"""Assigns buckets and dense pieces to servers: pure, and with as few moves as balance allows.

Scale-out, scale-in, replacing a server and draining it are one problem, given the present owners and the servers'
limits. Things without an owner are placed first, on the server furthest below its share. Then the server furthest above
its share gives to the one furthest below, until no transfer brings the two closer.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

NOBODY = -1
"""Stands for a missing owner: the previous owner may not own the thing any more, or there never was one."""


def placed(owners: Sequence[int], servers: int, limits: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the new owner of each thing, in [0, servers); `owners` are the present ones, or NOBODY.

    * `limits`: the capacity of each server; equal by default. A server's share is the part of all things that is
      proportional to its limit. A server with the limit 0 owns nothing.
    * No two servers differ by more than one thing in how far they are above or below their shares.
    * With equal limits, no placement with numbers that differ by at most one moves fewer things.

    Raises ValueError if no server may own anything, and for negative limits.
    """
    return _placed(tuple(owners), servers, None if limits is None else tuple(limits))


@lru_cache(maxsize=64)  # each event plans a move anew while it waits for a server
def _placed(owners: tuple[int, ...], servers: int, limits: tuple[int, ...] | None) -> tuple[int, ...]:
    limit = [1] * servers if limits is None else list(limits)
    if len(limit) != servers or min(limit, default=0) < 0 or sum(limit) < 1:
        raise ValueError("expected a limit of each server, none negative, and one or more positive")
    takers = [server for server in range(servers) if limit[server]]
    if len(takers) < servers:
        places = {server: place for place, server in enumerate(takers)}
        compact = placed(
            [places.get(owner, NOBODY) for owner in owners], len(takers), [limit[server] for server in takers]
        )
        return tuple(takers[place] for place in compact)
    whole = sum(limit)
    after = [owner if 0 <= owner < servers else NOBODY for owner in owners]
    held = Counter(after)
    above = [held[server] * whole - limit[server] * len(after) for server in range(servers)]  # in things / whole
    taker = 0
    for thing, owner in enumerate(after):
        if owner == NOBODY:
            if above[taker] + whole > 0:  # keeps neighbours together
                taker = above.index(min(above))
            after[thing] = taker
            above[taker] += whole
    owned: list[list[int]] = [[] for _ in range(servers)]  # descending, and without what a server takes: that stays
    for thing in reversed(range(len(after))):
        owned[after[thing]].append(thing)
    while True:
        giver, taker = above.index(max(above)), above.index(min(above))
        if above[giver] - above[taker] <= whole:
            return tuple(after)
        after[owned[giver].pop()] = taker
        above[giver] -= whole
        above[taker] += whole
