"""Chooses the checkpoint on which the next one builds (Check-N-Run, section 4.1): a pure function of past sizes."""

from collections.abc import Iterable
from dataclasses import dataclass

from emberscale_api.checkpoint import CheckpointFile, fewest_weight_bits
from emberscale_api.frozen import replace
from emberscale_api.job import IncrementalMode

LONGEST = 100
"""Increments of a consecutive chain: each adds files to all later manifests."""

MOST_BASES = 4
"""A consecutive chain ends once it is this many times as large as its base; the chain of figure 9 grows to almost 4."""

COSTS_KEPT = 50
"""The number of checkpoints whose cost is remembered."""


@dataclass(frozen=True)
class Chain:
    """The last checkpoint with all rows, and the checkpoints that build on it.

    * `base`: the id of the checkpoint with all rows; empty: the next checkpoint has all rows. `newest`: the id of the
      newest checkpoint of the chain.
    * `base_bytes`: the bytes written for the base. `increments`: the bytes written for each later checkpoint, S_1 to
      S_i of the paper, which gives them as fractions of the base.
    * `weight_bits`: the fewest bits of a weight in the files of `newest`; 0: all weights are exact.
    """

    base: str = ""
    newest: str = ""
    base_bytes: int = 0
    increments: tuple[int, ...] = ()
    weight_bits: int = 0

    def followed_by(self, checkpoint: str, files: Iterable[CheckpointFile]) -> "Chain":
        """Returns the chain once this checkpoint is complete. A checkpoint that needs no earlier file is a new base."""
        listed = tuple(files)
        written = sum(file.bytes for file in listed if not file.checkpoint)
        bits = fewest_weight_bits(file.path for file in listed)
        if all(not file.checkpoint for file in listed):
            return Chain(checkpoint, checkpoint, written, weight_bits=bits)
        return replace(self, newest=checkpoint, increments=(*self.increments, written), weight_bits=bits)


def builds_on(chain: Chain, mode: IncrementalMode, weight_bits: int = 0) -> str:
    """Returns the id of the checkpoint on which the next one builds; empty: the next one has all rows.

    `weight_bits` is the number of bits of a weight in the next checkpoint, 0 for float32. The next checkpoint does not
    build on one with fewer bits, since most of its rows would then have that precision.
    """
    if chain.weight_bits and not chain.weight_bits >= weight_bits > 0:
        return ""
    match mode:
        case IncrementalMode.FULL:
            return ""
        case IncrementalMode.ONE_SHOT:
            return chain.base
        case IncrementalMode.CONSECUTIVE:
            return "" if is_long(chain) else chain.newest
        case IncrementalMode.INTERMITTENT | IncrementalMode.AUTO:
            return "" if begins_anew(chain) else chain.base


def is_long(chain: Chain) -> bool:
    """Whether a restore of a consecutive chain would read so much that the next checkpoint should have all rows.

    Merging the chain's files instead would read all of them and write as much as a checkpoint with all rows does, in
    addition to the next increment rather than in place of it.
    """
    size = chain.base_bytes + sum(chain.increments)
    return bool(chain.increments) and (len(chain.increments) >= LONGEST or size >= MOST_BASES * chain.base_bytes)


def begins_anew(chain: Chain) -> bool:
    """Whether a checkpoint with all rows is expected to cost no more than another increment (section 4.1.1).

    After a checkpoint with all rows, the next i + 1 checkpoints should cost what the last i + 1 did:
    F_c = 1 + S_1 + ... + S_i. Otherwise each costs at least as much as the last increment: I_c = (i + 1) * S_i.
    """
    if not chain.increments:
        return False
    future = chain.base_bytes + sum(chain.increments)
    return future <= (len(chain.increments) + 1) * chain.increments[-1]
