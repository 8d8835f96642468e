"""Finds members that are much slower than their peers, and for how long they have been.

A member's pace is the time that a unit of its work takes: a sample of a worker, or a batch of a parameter server. It is
compared with the median of the other members of its role, so that load which slows all of them changes nothing. A
member counts as slow once a clear factor has lasted, and no longer counts once a much smaller factor has lasted.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberscale_api.frozen import replace

PACE_SECONDS = 8.0
"""A pace is the median over this number of seconds."""
_SLICE_SECONDS = 1.0
WARM_UP_SECONDS = 5.0
"""How long the pace of a new process is ignored, while it compiles, allocates and fills caches."""
SLOW_FACTOR, CALM_FACTOR = 4.0, 2.0
"""A member becomes slow at the first factor, and is no longer slow below the second."""
SLOW_SECONDS, CALM_SECONDS = 5.0, 5.0
"""How long the factor must last."""
_NEWS = 2.0
"""A factor is reported again once it has changed by this much, so that the status does not flicker."""


@dataclass(frozen=True)
class _Slice:
    began: float
    seconds: float
    units: float


@dataclass(frozen=True)
class Pace:
    """Seconds of work per unit: the median over slices of a second. A slice without units is merged with the next."""

    slices: tuple[_Slice, ...] = ()
    began: float | None = None

    def add(self, seconds: float, units: float, now: float) -> "Pace":
        """Returns the pace after `seconds` more of work on this number of units."""
        if self.began is None:
            return Pace((), now)
        if now - self.began < WARM_UP_SECONDS:
            return self
        kept = [one for one in self.slices if one.began > now - PACE_SECONDS]
        if kept and (now - kept[-1].began < _SLICE_SECONDS or not kept[-1].units):
            last = kept[-1]
            kept[-1] = _Slice(last.began, last.seconds + seconds, last.units + units)
        else:
            kept.append(_Slice(now, seconds, units))
        return Pace(tuple(kept), self.began)

    @property
    def seconds(self) -> float | None:
        """Seconds per unit; None before the first measurement."""
        paces = [one.seconds / one.units for one in self.slices if one.units > 0]
        return statistics.median(paces) if paces else None


@dataclass(frozen=True)
class Slowness:
    """A member that takes `factor` times as long as its peers.

    * `since`: when that began. `lasting`: it has been so for long enough to act on.
    * `calm_since`: since when it is no longer slow; None: it is still slow.
    * `reported`: the factor as people see it: rounded, and the same until it has changed by much.
    """

    since: float
    factor: float
    lasting: bool = False
    calm_since: float | None = None
    reported: float = 0.0


def factors(paces: Mapping[str, float | None]) -> dict[str, float]:
    """Returns each member's pace relative to the median of the others, for measured members with measured peers."""
    known = sorted((pace, name) for name, pace in paces.items() if pace is not None and pace > 0)
    if len(known) < 2:
        return {}
    return {name: pace / _median_without(known, place) for place, (pace, name) in enumerate(known)}


def _median_without(ascending: Sequence[tuple[float, str]], place: int) -> float:
    """Returns the median of all but one."""
    lower, upper = (
        ascending[middle + (middle >= place)][0] for middle in ((len(ascending) - 2) // 2, (len(ascending) - 1) // 2)
    )
    return (lower + upper) / 2


def judged(before: Mapping[str, Slowness], now_slower: Mapping[str, float], now: float) -> dict[str, Slowness]:
    """The members that may be slow, given how many times slower than its peers each is now."""
    after = {}
    for name, factor in now_slower.items():
        slowness = _judged(before.get(name), factor, now)
        if slowness is not None:
            after[name] = slowness
    return after


def _judged(before: Slowness | None, factor: float, now: float) -> Slowness | None:
    if before is None:
        return Slowness(now, factor) if factor >= SLOW_FACTOR else None
    reported = before.reported
    if not before.lasting:
        if factor < SLOW_FACTOR:
            return None
        lasting = now - before.since >= SLOW_SECONDS
        return replace(before, factor=factor, lasting=lasting, reported=_rounded(factor) if lasting else 0.0)
    if factor >= CALM_FACTOR:
        reported = reported if reported / _NEWS < factor < reported * _NEWS else _rounded(factor)
        return replace(before, factor=factor, calm_since=None, reported=reported)
    calm_since = now if before.calm_since is None else before.calm_since
    return replace(before, factor=factor, calm_since=calm_since) if now - calm_since < CALM_SECONDS else None


def _rounded(factor: float) -> float:
    """Rounds to one significant figure, as the measurement is no more precise."""
    digit = 10.0 ** math.floor(math.log10(factor))
    return round(factor / digit) * digit
