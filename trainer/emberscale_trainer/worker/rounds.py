"""Rounds: several consecutive batches that a worker trains on rows which it pulls and pushes once (BagPipe, section 3).

The reader knows the next batches, so the rows that they share cross the wire once, with their optimizer state. The
worker steps them by the servers' own rules, and pushes their changes. `RoundLengths` decides how many batches make a
round; it has no clock and no I/O.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from emberscale_api.frozen import replace
from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec, TrainingJobSpec
from emberscale_api.job.rounds import BUDGET_PROBLEMS, RoundsDecision, RoundsReason
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.wire import MAX_ROUND
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.pace import RoundPace, Stretch

_COPIES = 6
"""The copies of a round's rows in memory: as pulled, as trained, a place for each float, the changes, the previous
round's changes, which are added to the next round, and the next round as pulled."""

_WORTH = 0.6
"""`Auto` requires rounds to move at most this share of the bytes of single batches. On one machine, rounds begin to
cost more CPU time than they save at a share between 0.51 and 0.64 (docs/data.md)."""

_PROBE_EVERY = 64
"""The leases that are trained batch by batch before rounds that saved little or did not fit are tried again."""

_FIRST = 2


@dataclass(frozen=True)
class Round:
    """Consecutive batches of one lease, and the ids of all of them, one batch after another.

    `ids` int64 [records, columns]; a list of ids for each list column; `edges[i]` is the first record of batch i.
    """

    batches: tuple[Batch, ...]
    ids: NDArray[np.int64]
    lists: tuple[IdLists, ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Round":
        """The round of these batches."""
        edges = tuple(accumulate((len(batch.labels) for batch in batches), initial=0))
        if len(batches) == 1:
            return cls((batches[0],), batches[0].ids, batches[0].lists, edges)
        ids = np.concatenate([batch.ids for batch in batches])
        lists = tuple(IdLists.join(column) for column in zip(*(batch.lists for batch in batches), strict=True))
        return cls(tuple(batches), ids, lists, edges)

    @property
    def stop(self) -> int:
        """The position after the last record of the last batch."""
        return self.batches[-1].stop


@dataclass(frozen=True, slots=True)
class RoundSize:
    """The cost of a round of `batches`: `bytes` of its rows on the wire, `single_bytes` for its batches one by one.

    The worker holds `rows` distinct rows for the round, which are `values` floats with their state.
    """

    batches: int
    bytes: int
    single_bytes: int
    rows: int
    values: int

    @property
    def ratio(self) -> float:
        """`bytes` over `single_bytes` in hundredths, as reported to people: the report must agree with the decision."""
        return round(self.bytes / max(1, self.single_bytes), 2)

    @property
    def memory_bytes(self) -> int:
        """The memory that the rows take in the worker."""
        return _COPIES * 4 * self.values


@dataclass(frozen=True, slots=True)
class RoundFigures(RoundSize):
    """A finished round: its batches would have pulled `single_rows` one by one.

    Training took `seconds`, and the lease has `of_lease` batches.
    """

    single_rows: int
    seconds: float
    of_lease: int


def rounds_ruled_out(spec: TrainingJobSpec, memory_limit: int | None) -> RoundsDecision | None:
    """Returns why a worker with this memory cannot train rounds, whatever they save; None: nothing prevents them.

    `memory_limit` in bytes; None: there is no limit.
    """
    hot = spec.hot_embeddings
    if hot.mode is HotEmbeddingsMode.DISABLED:
        return None
    if spec.obstacle_to_rounds:
        message = f"hotEmbeddings does not work with {spec.obstacle_to_rounds}"
        return RoundsDecision(False, RoundsReason.OBSTACLE, message)
    if memory_limit is not None and hot.budget_bytes > memory_limit:
        has = f"a worker has {bytes_text(memory_limit)} of memory"
        message = f"hotEmbeddings.budget is {bytes_text(hot.budget_bytes)}, and {has}"
        return RoundsDecision(False, RoundsReason.BUDGET_ABOVE_MEMORY, message)
    return None


class RoundLengths:
    """Decides how many batches make a worker's next round; 1: the batches of the lease are trained one by one.

    Rounds grow from two batches by doubling, as far as the staleness bound, the memory budget and the time in which a
    lease must progress allow. If two batches do not fit, rounds end and are tried again later, as slow moments pass.

    With `Auto`, rounds begin once an estimate says that they save enough, and end if they do not. The estimate uses the
    keys of batches that are trained one by one, and is repeated from time to time: a hot set drifts, and the bound
    grows. Rounds also end if they are slower than single batches, whose speed is measured before rounds begin.
    """

    def __init__(self, spec: HotEmbeddingsSpec, lease_timeout: float, ruled_out: RoundsDecision | None = None) -> None:
        """`ruled_out` says why there can be no rounds, whatever they save; None: nothing prevents them."""
        self._mode = spec.mode if ruled_out is None else HotEmbeddingsMode.DISABLED
        self.budget = spec.budget_bytes
        self._longest_seconds = lease_timeout / 4
        self._limit = MAX_ROUND
        self._length = _FIRST
        self._fits = MAX_ROUND
        self._in_frame = MAX_ROUND
        self._longest_lease = 1
        self._rest = 0
        self._pays = spec.mode is not HotEmbeddingsMode.AUTO
        self._grown = False
        self._pace = RoundPace()
        self._pacing = threading.Lock()  # the reading, computing and committing stages take part, and callers
        self._split: set[int] = set()
        self._decision = ruled_out or _first_decision(spec.mode)

    @property
    def decision(self) -> RoundsDecision | None:
        """Whether rounds are trained now, and why; None for a job that disables them. Any thread may ask."""
        with self._pacing:  # both must be of the same moment
            decision, pending = self._decision, self._pace.pending
        if decision is not None and decision.active and min(self._limit, self._in_frame) < _FIRST:
            message = "the bound on staleness, or the size of a frame, admits no round of two batches now"
            return RoundsDecision(False, RoundsReason.NOT_ADMITTED, message)
        if decision is not None and decision.active and self._mode is HotEmbeddingsMode.AUTO and pending:
            message = "the speed of single batches is measured before rounds begin"
            return replace(decision, active=False, reason=RoundsReason.SPEED_PENDING, message=message)
        return decision

    @property
    def length(self) -> int:
        """The number of batches of the next round of a lease that is trained in rounds: a power of two."""
        most = 1 if self._rest else max(1, min(self._length, self._limit, self._fits, self._in_frame))
        return 1 << (most.bit_length() - 1)

    def begin_lease(self, token: int) -> bool:
        """Whether the batches of this lease are trained in rounds."""
        if self._mode is HotEmbeddingsMode.DISABLED or token in self._split:
            return False
        with self._pacing:
            if self._pace.begin_lease(token) and not self._pays:
                self._grow_anew()
            if self._rest:
                self._rest -= 1
                return False
            measured = self._mode is HotEmbeddingsMode.ENABLED or self._pace.admits
            begins = measured and self._pays and self.length > 1
            if begins:
                self._pace.begin_rounds()
            return begins

    @property
    def wants_estimate(self) -> bool:
        """Whether to estimate what rounds would save, on a lease that is trained batch by batch."""
        is_open = not (self._pays or self._rest or self._pace.given_up)
        return self._mode is HotEmbeddingsMode.AUTO and is_open

    def longest(self, batches: int) -> int:
        """Returns the length of the longest admissible round of at most `batches` batches: a power of two."""
        most = max(1, min(batches, self._limit, self._in_frame))
        return 1 << (most.bit_length() - 1)

    def estimated(self, size: RoundSize) -> bool:
        """Takes an estimate; returns whether rounds should begin, once the speed of single batches is known.

        If not, the next estimate comes after as many leases as this one had batches. An estimate from few batches, as
        of a short lease or under a low bound, is repeated sooner, and costs correspondingly little.
        """
        self._pays = size.ratio <= _WORTH
        would = f"a round of {size.batches} batches would take {size.ratio:.2f}x the bytes of its batches one by one"
        needed = f"{_WORTH:g}x or less"
        if self._pays:
            self._decide(True, RoundsReason.ESTIMATE_PAYS, f"{would}; {needed} begins rounds", size)
        else:
            self.rest(min(size.batches, _PROBE_EVERY))
            self._decide(False, RoundsReason.ESTIMATE_DOES_NOT_PAY, f"{would}; {needed} would begin rounds", size)
        return self._pays

    def none_admitted(self) -> None:
        """Notes an estimate that found no admissible round of two batches in a lease; the next lease may have one."""
        message = "no two batches of a lease made a round that the bound on staleness and the size of a frame admit"
        self._decide(False, RoundsReason.NOT_ADMITTED, message)

    def exceeds_budget(self, size: RoundSize) -> None:
        """Rests rounds, because by this size the rows of two batches do not fit into the budget."""
        self.rest()
        self._lacks_budget(
            f"the rows of two batches take {bytes_text(_FIRST * size.memory_bytes / size.batches)}", size
        )

    def lacks_room(self, needed: int) -> None:
        """Rests rounds, because the records of two batches, `needed` bytes, exceed the budget for an estimate."""
        self.rest()
        self._lacks_budget(f"an estimate takes {bytes_text(needed)}")

    def rest(self, leases: int = _PROBE_EVERY) -> None:
        """Trains the next leases batch by batch. Rounds, or with `Auto` an estimate, begin again after them."""
        self._rest = leases
        self._pays = self._mode is not HotEmbeddingsMode.AUTO
        with self._pacing:
            self._grow_anew()
            self._pace.rest()

    def _grow_anew(self) -> None:
        self._length, self._fits, self._grown = _FIRST, MAX_ROUND, False

    def limit(self, batches: int) -> None:
        """Takes the first server's limit on the batches of the next round."""
        self._limit = batches

    def exceeds_frame(self, batches: int) -> None:
        """Notes that the rows of a round of this many batches do not fit into a frame."""
        self._in_frame = min(self._in_frame, max(1, batches // 2))

    def split(self, token: int) -> None:
        """Trains the rest of this lease one by one, because a server has applied only a part of a round."""
        self._split.add(token)

    def trained(self, figures: RoundFigures) -> None:
        """Takes the figures of a finished round."""
        by_memory = self.budget * figures.batches // max(1, figures.memory_bytes)
        by_time = int(self._longest_seconds * figures.batches / max(figures.seconds, 1e-9))
        self._fits = max(1, min(MAX_ROUND, by_memory, by_time))
        self._longest_lease = max(self._longest_lease, figures.of_lease)
        half = (self._longest_lease + 1) // 2  # any lease of this length has a round of this many
        longest = (
            figures.batches >= min(self._limit, self._fits, self._in_frame) or self._length > figures.batches >= half
        )
        self._grown = not self._rest and (self._grown or longest)
        if figures.batches >= self._length:
            self._length = min(MAX_ROUND, 2 * self._length)
        saves = self._mode is HotEmbeddingsMode.ENABLED or figures.ratio <= _WORTH
        if by_memory < _FIRST:
            self.exceeds_budget(figures)
        elif by_time < _FIRST:
            self.rest()
            took = f"two batches take {duration_text(_FIRST * figures.seconds / figures.batches)} to train"
            message = f"{took}, and a lease must progress every {duration_text(self._longest_seconds)}"
            self._decide(False, RoundsReason.TOO_SLOW, message, figures)
        elif longest and not saves:
            self.rest()
            took = f"a round of {figures.batches} batches took {figures.ratio:.2f}x the bytes of its batches one by one"
            message = f"{took}; {_WORTH:g}x or less would keep rounds"
            self._decide(False, RoundsReason.SAVES_TOO_LITTLE, message, figures)
        elif self._mode is HotEmbeddingsMode.ENABLED and not self._rest:  # rounds fit, perhaps again
            self._decision = _first_decision(self._mode)

    def measured(self, stretch: Stretch) -> None:
        """Takes a measured speed; the speed of rounds counts only once they have grown."""
        if self._mode is not HotEmbeddingsMode.AUTO or (stretch.in_rounds and not self._grown):
            return
        with self._pacing:
            comparison = self._pace.measured(stretch)
            decision = self._decision
            if comparison is None or decision is None:
                return
            if not comparison.pays:
                self._pays = False
            reason = RoundsReason.SPEED_PAYS if comparison.pays else RoundsReason.SPEED_DOES_NOT_PAY
            self._decision = replace(decision, active=comparison.pays, reason=reason, message=str(comparison))

    def _lacks_budget(self, need: str, size: RoundSize | None = None) -> None:
        message = f"{need} of memory, and hotEmbeddings.budget is {bytes_text(self.budget)}"
        self._decide(False, RoundsReason.BUDGET_TOO_SMALL, message, size)

    def _decide(self, active: bool, reason: RoundsReason, message: str, size: RoundSize | None = None) -> None:
        if reason in BUDGET_PROBLEMS and self._decision is not None and self._decision.reason == reason:
            return  # warns only once, although the numbers differ for every batch
        decision = RoundsDecision(active, reason, message)
        if size is not None:
            sizes = (size.batches, size.bytes, size.single_bytes, size.rows, size.memory_bytes)
            decision = RoundsDecision(active, reason, message, *sizes)
        self._decision = decision


def _first_decision(mode: HotEmbeddingsMode) -> RoundsDecision | None:
    match mode:
        case HotEmbeddingsMode.ENABLED:
            return RoundsDecision(True, RoundsReason.ENABLED, "hotEmbeddings.mode is Enabled")
        case HotEmbeddingsMode.AUTO:
            message = "no lease has been trained yet to estimate from"
            return RoundsDecision(False, RoundsReason.ESTIMATE_PENDING, message)
        case HotEmbeddingsMode.DISABLED:
            return None
