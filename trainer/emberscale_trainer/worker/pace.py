"""Compares a worker's speed in rounds with its speed batch by batch: a round saves bytes, but may cost waits.

If other workers train too, a worker waits for the push of a round before it pulls the next one. Whether rounds pay
depends on the network, the servers and the load, so their speed is measured. `RoundPace` compares the two speeds; it
has no clock and no I/O. `StretchTimer` measures them in the pipeline.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from emberscale_api.readable import rate_text

_SPEEDS = 3
"""The number of speeds of each kind whose medians are compared, as one may include a pause or a cold start."""

_LEAST_SECONDS = 1.0
_LEAST_BATCHES = 16
_LEAST_STRETCHES = 2

_TO_BEGIN = 1.0
_TO_STAY = 0.9
"""Rounds stay unless they are clearly slower: at equal speed, noise alone must not end them, and they save bytes."""

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 1 << 6, 1 << 13
"""The least interval between the starts of two comparisons, in leases of the job; powers of two."""

RoutingVersion = tuple[int, int]
"""Generation and version of a routing table."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The stretch between two commits of a pipeline: `samples` of `batches` were trained in `seconds`.

    `token` is that of the lease, `routing` the table that was in force throughout.
    """

    in_rounds: bool
    token: int
    batches: int
    samples: int
    seconds: float
    routing: RoutingVersion


class StretchTimer:
    """Times the stretches of one pipeline that contain only training of one kind; used by the thread that commits.

    Omits stretches in which the worker waited for a lease, evaluated, or changed from rounds to single batches or back,
    or in which the routing table changed. Waits for servers count, and so does the pause of a checkpoint, which a
    worker cannot distinguish from a slow server.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._committed = -math.inf
        self._token: int | None = None
        self._circumstances: tuple[bool, RoutingVersion] | None = None

    def commit(self, token: int, granted: float, in_rounds: bool, routing: RoutingVersion) -> float | None:
        """Notes the commit of a round or a batch; returns the seconds since the previous commit if they count.

        `granted` is the time by the clock when the worker got the lease of this token; infinite: the worker has
        evaluated since the previous lease.
        """
        now, circumstances = self._clock(), (in_rounds, routing)
        worked = token == self._token or granted <= self._committed
        counts = worked and circumstances == self._circumstances
        seconds = now - self._committed
        self._committed, self._token, self._circumstances = now, token, circumstances
        return seconds if counts else None


class _Speeds:
    """The last speeds of one kind, each over several stretches of at least a second and 16 batches together."""

    def __init__(self) -> None:
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        self._stretches: list[Stretch] = []

    def add(self, stretch: Stretch) -> None:
        self._stretches.append(stretch)
        seconds = sum(one.seconds for one in self._stretches)
        batches = sum(one.batches for one in self._stretches)
        if seconds >= _LEAST_SECONDS and batches >= _LEAST_BATCHES and len(self._stretches) >= _LEAST_STRETCHES:
            self._speeds.append(sum(one.samples for one in self._stretches) / seconds)
            self._stretches = []

    def clear(self) -> None:
        self._speeds.clear()
        self._stretches = []

    @property
    def known(self) -> float | None:
        """Samples per second; None: there are too few speeds yet."""
        return median(self._speeds) if len(self._speeds) == _SPEEDS else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples per second in `rounds` and in `singles`; rounds pay if `ratio` is at least `needed`."""

    rounds: float
    singles: float
    needed: float

    @property
    def ratio(self) -> float:
        """The ratio in hundredths, as reported to people, so that the report agrees with the decision."""
        return round(self.rounds / self.singles, 2) if self.singles else 1.0

    @property
    def pays(self) -> bool:
        """Whether rounds are fast enough."""
        return self.ratio >= self.needed

    def __str__(self) -> str:
        """The end of a sentence."""
        would = "pays" if self.pays else "would pay"
        speeds = f"rounds train {rate_text(self.rounds)}, and single batches {rate_text(self.singles)}"
        return f"{speeds} ({self.ratio:.2f}x; {self.needed:g}x or more {would})"


class _Phase(StrEnum):
    SINGLES = "Singles"
    """The speed of single batches is measured, until rounds begin."""
    ROUNDS = "Rounds"
    """The speed of rounds is measured."""
    KEPT = "Kept"
    GIVEN_UP = "GivenUp"


class RoundPace:
    """Compares the speed of single batches with that of the rounds right after them, and repeats this periodically.

    Between two comparisons, the job grants at least a quarter of the leases that the worker has seen before. So
    comparisons cost ever less, and noise on a machine changes the decision ever more rarely.

    The rounds of one worker delay the single batches of the others, by the staleness bound. So workers compare at the
    same time: tokens of leases ascend over the whole job, and a comparison begins with the first lease whose token
    reaches a multiple of a power of two.
    """

    def __init__(self) -> None:
        self._phase = _Phase.SINGLES
        self._singles = _Speeds()
        self._rounds = _Speeds()
        self._held = False
        self._routing: RoutingVersion | None = None
        self._first: int | None = None
        self._began = 0
        self._next = 0

    @property
    def admits(self) -> bool:
        """Whether a lease may be trained in rounds."""
        known = self._phase is not _Phase.SINGLES or self._singles.known is not None
        return known and self._phase is not _Phase.GIVEN_UP

    @property
    def given_up(self) -> bool:
        """Whether rounds were slower, and the next comparison has not begun."""
        return self._phase is _Phase.GIVEN_UP

    @property
    def pending(self) -> bool:
        """Whether rounds wait for the speed of single batches, other than for a moment."""
        return self._phase is _Phase.SINGLES and self._singles.known is None and not self._held

    def begin_lease(self, token: int) -> bool:
        """Notes the begin of a lease for training; returns whether the next comparison begins with it."""
        if self._first is None:
            self._first = self._began = token
        due = self._phase in (_Phase.KEPT, _Phase.GIVEN_UP) and token >= self._next
        if due:
            self._began = self._next
            self._compare()
        return due

    def begin_rounds(self) -> None:
        """Notes that a lease is trained in rounds."""
        if self._phase is _Phase.SINGLES:
            self._phase = _Phase.ROUNDS

    def rest(self) -> None:
        """Notes that rounds ended for a reason other than their speed, and may begin again."""
        self._held = False
        if self._phase in (_Phase.ROUNDS, _Phase.KEPT):
            self._compare()

    def measured(self, stretch: Stretch) -> Comparison | None:
        """Takes a stretch; returns the comparison that it completes.

        Under another routing table both speeds are measured again: other servers, other speeds.
        """
        if stretch.routing != self._routing:
            self._routing = stretch.routing
            if self._phase in (_Phase.SINGLES, _Phase.ROUNDS):
                self._compare()
        if self._phase is _Phase.SINGLES and not stretch.in_rounds:
            self._singles.add(stretch)
        if self._phase is not _Phase.ROUNDS or not stretch.in_rounds:
            return None
        self._rounds.add(stretch)
        rounds, singles = self._rounds.known, self._singles.known
        if rounds is None or singles is None:
            return None
        comparison = Comparison(rounds, singles, _TO_STAY if self._held else _TO_BEGIN)
        self._held = comparison.pays
        self._phase = _Phase.KEPT if comparison.pays else _Phase.GIVEN_UP
        self._next = _next_comparison(self._began - (self._first or 0), self._began, stretch.token)
        return comparison

    def _compare(self) -> None:
        self._phase = _Phase.SINGLES
        self._singles.clear()
        self._rounds.clear()


def _next_comparison(seen: int, began: int, ended: int) -> int:
    """The token with which to compare again, after a comparison that began and ended with these.

    `seen` counts the leases of the job before it, since this worker came. What follows from its begin is the same for
    all workers that began together, and its end is not: that matters only if the next one would come too soon.
    """
    earliest = ended + min(ended - began, _LONGEST_INTERVAL)
    interval = 1 << (max(_SHORTEST_INTERVAL, seen // 2).bit_length() - 1)
    while interval < _LONGEST_INTERVAL and (began // interval + 2) * interval <= earliest:
        interval *= 2
    interval = min(interval, _LONGEST_INTERVAL)
    return max(began // interval + 2, earliest // interval + 1) * interval
