"""How many batches the next shard of a worker has (DLRover-RM section 5.1).

Guided self-scheduling: a shard is a part of what is left, so shards shrink towards the end and all workers end at about
the same time. The part follows the worker's share of the total speed, and its largest size follows the worker's speed
relative to the middle of its peers, so a straggler holds less and pushes stale gradients for a shorter time.
"""

import statistics
from collections.abc import Sequence

LEASES_PER_WORKER = 2
"""A worker may hold the lease that it works on and the next one."""


def shard_batches(
    available: int, speed: float | None, peers: Sequence[float | None], minimum: int, maximum: int
) -> int:
    """The size for a worker of `speed` samples/s, within [minimum, maximum].

    `peers` are the speeds of all live workers, this one included; None means not measured yet, and counts as the
    middle of those that are.
    """
    known = [peer for peer in peers if peer is not None and peer > 0]
    middle = statistics.median(known) if known else 1.0
    own = speed if speed is not None and speed > 0 else middle
    total = sum(peer if peer is not None and peer > 0 else middle for peer in peers) or own
    largest = maximum * min(1.0, own / middle)
    guided = available * min(1.0, own / total) / LEASES_PER_WORKER
    return max(minimum, int(min(largest, guided)))
