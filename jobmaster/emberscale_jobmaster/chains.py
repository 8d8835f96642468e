"""On which earlier checkpoint the next one builds (Check-N-Run, section 4.1): a pure function of the sizes so far."""

from collections.abc import Iterable
from dataclasses import dataclass

from emberscale_api.checkpoint import CheckpointFile, fewest_weight_bits
from emberscale_api.frozen import replace
from emberscale_api.job import IncrementalMode

LONGEST = 100
"""Increments of a consecutive chain: each adds files to all later manifests."""

MOST_BASES = 4
"""A consecutive chain ends once it has so many times the bytes of its base; that of figure 9 grows to almost 4."""

COSTS_KEPT = 50
"""Checkpoints whose cost is remembered."""


@dataclass(frozen=True)
class Chain:
    """The checkpoint with all rows that was taken last, and those that build on it.

    * `base`: its id; empty: the next checkpoint has all rows. `newest`: the id of the newest of all.
    * `base_bytes`: that were written for the base. `increments`: the same of each that followed, S_1 to S_i of the
      paper, which gives them as fractions of the base.
    * `weight_bits`: the fewest bits of a weight in the files of the newest; 0: all are exact.
    """

    base: str = ""
    newest: str = ""
    base_bytes: int = 0
    increments: tuple[int, ...] = ()
    weight_bits: int = 0

    def followed_by(self, checkpoint: str, files: Iterable[CheckpointFile]) -> "Chain":
        """The chain once this checkpoint is complete. It is a base where it needs no file of an earlier one."""
        listed = tuple(files)
        written = sum(file.bytes for file in listed if not file.checkpoint)
        bits = fewest_weight_bits(file.path for file in listed)
        if all(not file.checkpoint for file in listed):
            return Chain(checkpoint, checkpoint, written, weight_bits=bits)
        return replace(self, newest=checkpoint, increments=(*self.increments, written), weight_bits=bits)


def builds_on(chain: Chain, mode: IncrementalMode, weight_bits: int = 0) -> str:
    """The id of the checkpoint on which the next one builds; empty: it has all rows.

    `weight_bits` are those of a weight in the next one, 0 for float32. It builds on none that has fewer: most of its
    rows would have these.
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
    """Whether a restore of a consecutive chain reads so much that the next checkpoint has all rows.

    A merge of the files of the chain would read all of them, write as much as that checkpoint does, and write it in
    addition to the next increment, instead of in its place.
    """
    size = chain.base_bytes + sum(chain.increments)
    return bool(chain.increments) and (len(chain.increments) >= LONGEST or size >= MOST_BASES * chain.base_bytes)


def begins_anew(chain: Chain) -> bool:
    """Whether all rows again are expected to cost no more than another increment (section 4.1.1).

    After all rows again, the next i + 1 checkpoints should cost what the last did: F_c = 1 + S_1 + ... + S_i.
    Otherwise each costs at least as much as the last increment: I_c = (i + 1) * S_i.
    """
    if not chain.increments:
        return False
    future = chain.base_bytes + sum(chain.increments)
    return future <= (len(chain.increments) + 1) * chain.increments[-1]
