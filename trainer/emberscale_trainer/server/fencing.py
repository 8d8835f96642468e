"""One server's side of leases: it decides which of the master's leases may still train.

A lease is dead once the master omits it from those in force, or once a request under a later lease of the same shard
has arrived, which needs no word from the master. Requests under a dead lease are refused.
"""

from collections.abc import Iterable

from emberscale_api.wire import Header


class LeaseFence:
    """The leases of one generation, as far as this server knows them.

    `next_token` is the smallest that the master had not given yet when it last listed the leases in force.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        self._live: frozenset[int] = frozenset()
        self.next_token = 0

    def update(self, live: Iterable[int], next_token: int) -> bool:
        """Takes the tokens in force; all others below `next_token` are dead. Returns False for outdated news."""
        if next_token < self.next_token:
            return False
        self._live, self.next_token = frozenset(live), next_token
        self._newest = {shard: token for shard, token in self._newest.items() if not self.is_dead(token)}
        return True

    def is_dead(self, token: int) -> bool:
        """Returns whether the master has ended this lease."""
        return token < self.next_token and token not in self._live

    def refuses(self, header: Header) -> bool:
        """Returns whether a request comes under a dead lease; if not, its lease ends earlier ones of the shard."""
        shard = (header.epoch, header.shard)
        if self.is_dead(header.token) or header.token < self._newest.get(shard, 0):
            return True
        self._newest[shard] = header.token
        return False
