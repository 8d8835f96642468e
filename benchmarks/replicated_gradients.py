"""The `emberscale` command, with workers that send each gradient to two parameter servers (PS): a baseline of ECRM.

With replication (ECRM, section 2.3.1), two servers have each row, and both apply its gradients. With gradient
propagation (section 3.3.2), the server that has a row's parity gets its gradients and applies the optimizer's rule too,
and then has yet to change the parity, so that costs at least as much. Here the second server of a row is the next one
after its owner. It keeps the replica as one more row of the same table, under another key; nobody reads it. Rows are
not replicated that no gradient has changed, nor are dense parameters, of which workers have copies in the paper.

`parity.py --baseline` measures such a job. Rows must not move while it trains.
"""

import sys
from dataclasses import replace
from functools import wraps
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from emberscale._cli import main as run_command
from emberscale_operator.local import runner
from emberscale_trainer import fork_server
from emberscale_trainer.jit import typed_kernel
from emberscale_trainer.table.index import BUCKET_MASK, mix64, unmix64
from emberscale_trainer.worker.keys import KeyPlan
from emberscale_trainer.worker.servers import BatchName, Lookups, ParameterServers

REPLICATING = (sys.executable, __file__)
"""The command line that takes the place of `emberscale`."""

_FORK_SERVER = "fork-server"
"""As the first argument: to be the program of which workers are forks, instead of the command."""

_REPLICA_BIT = 1 << 62
"""Of the hash of a key; flipped in the hash of the replica's key."""

Keys = NDArray[np.int64]
Values = NDArray[np.float32]


@typed_kernel("i8[::1](i8[::1], i8[::1])")
def replica_keys(keys, buckets):  # type: ignore[no-untyped-def]  # Numba infers the types
    """The keys of replicas, int64 [n], in these buckets: a server keeps no rows of others' buckets."""
    found = np.empty_like(keys)
    for number in range(len(keys)):
        key_hash = mix64(keys[number])
        bucket = buckets[(key_hash & BUCKET_MASK) % len(buckets)]
        found[number] = unmix64((key_hash & ~BUCKET_MASK | bucket) ^ _REPLICA_BIT)
    return found


def replicated(plan: KeyPlan, rows: Values) -> tuple[KeyPlan, Values]:
    """Returns the plan of a push that has each row's gradient twice, and its rows; both as a push takes them."""
    of_servers = [_by_table(plan, rows, server) for server in range(len(plan.counts))]
    owners = np.array(plan.routing.bucket_owners)
    counts, keys, values, edges = [], [], [], [0]
    for server, own in enumerate(of_servers):
        buckets = np.flatnonzero(owners == server)
        replicas = [(replica_keys(others, buckets), floats) for others, floats in of_servers[server - 1]]
        both = [part for pair in zip(own, replicas, strict=True) for part in pair]
        pieces = plan.keys[server][len(plan.keys[server]) - int(plan.counts[server][-1]) :]
        keys.append(np.concatenate([*(part for part, _ in both), pieces]))
        values += [floats for _, floats in both]
        counts.append(plan.counts[server] + np.append(plan.counts[server - 1][:-1], np.uint32(0)))
        edges.append(edges[-1] + sum(len(floats) for _, floats in both))
    return replace(plan, counts=tuple(counts), keys=tuple(keys), value_edges=tuple(edges)), np.concatenate(values)


def _by_table(plan: KeyPlan, rows: Values, server: int) -> list[tuple[Keys, Values]]:
    """Returns the keys and the values of a server's rows in a push, by table."""
    counts = [int(count) for count in plan.counts[server][:-1]]
    floats = [count * int(width) for count, width in zip(counts, plan.floats, strict=True)]
    keys = np.split(plan.keys[server][: sum(counts)], list(accumulate(counts))[:-1])
    return list(zip(keys, np.split(rows[plan.values_of(server)], list(accumulate(floats))[:-1]), strict=True))


def _replicate_pushes() -> None:
    """Lets the workers that are forked from this process send each gradient twice."""
    push = ParameterServers.push

    @wraps(push)
    def push_twice(
        self: ParameterServers, plan: KeyPlan, lookups: Lookups, name: BatchName, rows: Values, dense: Values
    ) -> None:
        doubled, both = replicated(plan, rows)
        push(self, doubled, lookups, name, both, dense)

    ParameterServers.push = push_twice  # type: ignore[method-assign]  # the product has no such option


def main() -> None:
    """Runs the command, or what it forks workers from."""
    if sys.argv[1:] == [_FORK_SERVER]:
        _replicate_pushes()
        fork_server.main()
        return
    runner._FORK_SERVER = (sys.executable, "-P", __file__, _FORK_SERVER)
    sys.argv[0] = "emberscale"
    run_command()


if __name__ == "__main__":
    main()
