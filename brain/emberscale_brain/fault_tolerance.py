"""Chooses how a job recovers from the loss of a PS, and how often it saves: full, partial or coded recovery.

The expected overhead of each strategy is a share of the job's time. Full and partial recovery follow CPR equations 1
and 2, each at its own best checkpoint interval: sqrt(2 O_save T_fail) for full (CPR section 2.2), 2 PLS N_ps T_fail for
partial (equation 4 solved for T_save). Coded recovery (ECRM) pays for parity all the time and rebuilds without going
back. It saves as often as full recovery does: its checkpoints cover what these equations leave out, such as the loss of
a node with several PS, and rows whose parity is not complete yet.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from emberscale_api.checkpoint import PRIORITY_SHARE
from emberscale_api.job import DEFAULT_TARGET_PLS, stripe_width
from emberscale_api.readable import duration_text, share_text
from emberscale_api.shape import JobShape


class Recovery(StrEnum):
    """The recovery strategies, with the names of the manifest's `faultTolerance.strategy`."""

    FULL = "FullRecovery"
    PARTIAL = "PartialRecovery"
    CODED = "ErasureCoding"


_SYNC_PARITY_COST = 0.1
"""The share of CPU time that parity with `Sync` adds to a sample, for each PS that gets a push's changes.

From `benchmarks/parity_sweep.py --over servers`, 2 to 11 PS, and `--over parity`, 5 PS, batches of 2048.
"""
_ASYNC_PARITY_COST = 0.14
"""The same with `Async`, whatever the number of PS: `benchmarks/parity.py`, 5 PS."""

_PARITY_SOURCE = " by a benchmark of parity on another job"

WITH_PRIORITY, WITHOUT_PRIORITY = "PartialRecovery with priority", "PartialRecovery without priority"
"""Partial recovery with and without saves of priority rows. The manifest chooses: they spare accuracy, not time."""


@dataclass(frozen=True, slots=True)
class FailureCosts:
    """What is known about a job's failures. Times are in seconds, for the whole job; fractions are 0 to 1.

    `between_failures` is CPR's T_fail (mean time between failures of any PS of the job), `save`, `load` and
    `reschedule` are its O_save, O_load and O_res. `target_pls` is the portion of lost samples that is acceptable.
    `parity_slowdown` is the time that this `parity` adds to training, over the time without it. Like CPR's overheads,
    it is a share of time; the share of throughput is smaller. `parity_memory` is the parity's bytes over the tables',
    and `memory_cost_share` the share of PS memory in the job's bill. A rebuild takes `rebuild` seconds, and costs
    `rebuild_slowdown` of the throughput meanwhile. With `saves_priority_rows`, partial recovery saves some rows between
    checkpoints. `unmeasured` tells people which values are assumed so far.
    """

    total_seconds: float
    ps: int
    between_failures: float
    save: float
    load: float
    reschedule: float
    target_pls: float = 0.1
    parity: int = 1
    parity_slowdown: float = 0.3
    parity_memory: float = 0.5
    memory_cost_share: float = 0.1
    rebuild: float = 60.0
    rebuild_slowdown: float = 0.3
    saves_priority_rows: bool = False
    unmeasured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("total_seconds", "between_failures"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("save", "load", "reschedule", "parity_slowdown", "parity_memory", "rebuild"):
            if not (0 <= getattr(self, name) < math.inf):
                raise ValueError(f"{name} must be finite and at least 0, not {getattr(self, name)}")
        for name in ("memory_cost_share", "rebuild_slowdown", "target_pls"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.ps < 1 or self.parity < 1:
            raise ValueError(f"ps ({self.ps}) and parity ({self.parity}) must be at least 1")


@dataclass(frozen=True, slots=True)
class RecoveryCost:
    """Expected overhead as a share of the job's time, at this checkpoint interval, and the expected PLS."""

    overhead: float
    interval: float
    expected_pls: float


@dataclass(frozen=True, slots=True)
class FaultToleranceAdvice:
    """The cheapest strategy, its checkpoint interval and time between failures in seconds, all costs, and the reason.

    `costs` has partial recovery with priority rows as the manifest sets them, and the opposite under another name.
    """

    strategy: Recovery
    checkpoint_interval: float
    between_failures: float
    costs: Mapping[str, RecoveryCost]
    reason: str


def expected_pls(interval: float, between_failures: float, ps: int) -> float:
    """CPR equation 4: the fraction of samples whose effect is lost by the end of the job."""
    return 0.5 * interval / (between_failures * ps)


def full_recovery(costs: FailureCosts) -> RecoveryCost:
    """CPR equation 1 at its best interval; nothing is lost for good."""
    interval = _interval(math.sqrt(2 * costs.save * costs.between_failures), costs)
    lost = costs.load + interval / 2 + costs.reschedule
    return RecoveryCost(costs.save / interval + lost / costs.between_failures, interval, 0.0)


def partial_recovery(costs: FailureCosts) -> RecoveryCost:
    """CPR equation 2 at the interval that meets the target PLS (equation 4).

    The interval is short enough that a single failure does not exceed the target, since the whole job would roll back
    then. If no interval meets the target, or the one that does costs more than full recovery, the job saves as often as
    with full recovery and costs no more: it rolls back as a whole once it exceeds its target.

    The cost of saving priority rows is their share of the cost of a checkpoint, since it is not measured by itself. The
    PLS counts priority rows like all others (section 4.2 of CPR), so it is an upper bound then.
    """
    meeting, full = _partial_recovery_at(_interval(_wanted_interval(costs), costs), costs), full_recovery(costs)
    if not _is_out_of_reach(costs) and meeting.overhead <= full.overhead:
        return meeting
    lost = min(costs.target_pls, expected_pls(full.interval, costs.between_failures, costs.ps))
    return replace(full, expected_pls=lost)


def _partial_recovery_at(interval: float, costs: FailureCosts) -> RecoveryCost:
    """CPR equation 2 at an interval."""
    between = 1 / PRIORITY_SHARE - 1 if costs.saves_priority_rows else 0.0
    saving = (1 + between * PRIORITY_SHARE) * costs.save / interval
    overhead = saving + (costs.load + costs.reschedule) / costs.between_failures
    return RecoveryCost(overhead, interval, expected_pls(interval, costs.between_failures, costs.ps))


def _wanted_interval(costs: FailureCosts) -> float:
    """The checkpoint interval that meets the target PLS, however short it is."""
    expected = 2 * costs.target_pls * costs.ps * costs.between_failures
    return min(expected, costs.target_pls * costs.ps * costs.total_seconds)


def coded_recovery(costs: FailureCosts) -> RecoveryCost:
    """The cost of parity all the time, a rebuild per failure, and full recovery from failures beyond the code.

    A failure is beyond the code when `parity` more PS fail while one is replaced and rebuilt (failures at random
    moments, as CPR section 3.1 finds them after a job's beginning). The overhead is the sum of the time that parity
    adds to training, the share of its memory in the bill, the slower training during rebuilds, the saves, and the
    roll-backs.
    """
    exposed = costs.reschedule + costs.rebuild
    others = max(0, costs.ps - 1) / costs.ps
    another = 1 - math.exp(-exposed * others / costs.between_failures)
    beyond = another**costs.parity if costs.ps > 1 else 1.0
    between_losses = costs.between_failures / max(beyond, 1e-12)
    interval = full_recovery(costs).interval
    losses = (costs.load + interval / 2 + costs.reschedule) / between_losses
    repairs = (costs.rebuild * costs.rebuild_slowdown) / costs.between_failures
    upkeep = costs.parity_slowdown + costs.parity_memory * costs.memory_cost_share
    return RecoveryCost(upkeep + repairs + costs.save / interval + losses, interval, 0.0)


def _interval(best: float, costs: FailureCosts) -> float:
    """Bounds an interval: at least the time that saving takes, at most the length of the job."""
    return min(max(best, costs.save, 1.0), max(costs.total_seconds, costs.save, 1.0))


def advise(
    costs: FailureCosts, least_benefit: float = 0.001, offered: Collection[Recovery] = ()
) -> FaultToleranceAdvice:
    """Advises full recovery, unless another `offered` strategy saves at least `least_benefit` of the job's time.

    Partial recovery saves nothing if no interval meets its target PLS: it then costs as much as full recovery.
    Coded recovery needs more PS than `parity`. The advice includes the costs of coded recovery, and of partial recovery
    at DEFAULT_TARGET_PLS, even if they are not offered. If partial and coded recovery cost the same, coded recovery
    wins, since it loses nothing.
    """
    allowed = costs if Recovery.PARTIAL in offered else replace(costs, target_pls=DEFAULT_TARGET_PLS)
    partial, otherwise = partial_recovery(allowed), replace(allowed, saves_priority_rows=not costs.saves_priority_rows)
    ways: dict[str, RecoveryCost] = {Recovery.FULL: full_recovery(costs), Recovery.PARTIAL: partial}
    ways[WITHOUT_PRIORITY if costs.saves_priority_rows else WITH_PRIORITY] = partial_recovery(otherwise)
    if costs.ps > costs.parity:
        ways[Recovery.CODED] = coded_recovery(costs)
    best = Recovery.FULL
    for way in (Recovery.CODED, Recovery.PARTIAL):
        margin = least_benefit if best is Recovery.FULL else 0.0
        if way in ways and way in offered and ways[way].overhead < ways[best].overhead - margin:
            best = way
    reason = _reason(costs, best, ways, least_benefit, offered)
    return FaultToleranceAdvice(best, ways[best].interval, costs.between_failures, MappingProxyType(ways), reason)


def _reason(
    costs: FailureCosts,
    best: Recovery,
    ways: Mapping[str, RecoveryCost],
    least_benefit: float,
    offered: Collection[Recovery],
) -> str:
    """Tells people why the best strategy is the best, and what they can change."""
    chosen = ways[best]
    notes = {Recovery.CODED: _PARITY_SOURCE}
    if Recovery.PARTIAL not in offered:
        notes[Recovery.PARTIAL] = f" with a targetPLS of {DEFAULT_TARGET_PLS:g}, which the manifest does not allow"
    others = ", ".join(
        f"{way} {share_text(ways[way].overhead)}{notes.get(way, '')}"
        for way in Recovery
        if way in ways and way is not best
    )
    instead = f" ({others})" if others else ""
    reason = (
        f"{best} is expected to cost {share_text(chosen.overhead)} of the job's time"
        f"{_PARITY_SOURCE if best is Recovery.CODED else ''}{instead}, with a PS lost every "
        f"{duration_text(costs.between_failures)} and a checkpoint every {duration_text(chosen.interval)}, "
        f"each of which costs {duration_text(costs.save)}"
    )
    if chosen.expected_pls > 0:
        reason += f", which loses the effect of {share_text(chosen.expected_pls)} of the samples"
    if costs.unmeasured:
        reason += f"; assumed so far: {' and '.join(costs.unmeasured)}"
    if Recovery.PARTIAL in offered:
        reason += _out_of_reach(costs)
    coded = ways.get(Recovery.CODED)
    if coded is not None and Recovery.CODED not in offered and coded.overhead < chosen.overhead - least_benefit:
        reason += f"; {Recovery.CODED}, which the manifest rules out, is expected to cost less"
    return reason


def _is_out_of_reach(costs: FailureCosts) -> bool:
    """Whether partial recovery would miss its target PLS even at the shortest possible interval."""
    wanted = _wanted_interval(costs)
    return wanted < _interval(wanted, costs)


def _out_of_reach(costs: FailureCosts) -> str:
    """Tells people what a target PLS would take if no checkpoint interval meets it; empty if one does."""
    if not costs.target_pls or not _is_out_of_reach(costs):
        return ""
    wanted = _wanted_interval(costs)
    tightest = _partial_recovery_at(_interval(wanted, costs), costs)
    least = costs.target_pls * tightest.interval / wanted
    digit = 10.0 ** (math.floor(math.log10(least)) - 1)
    within = math.ceil(least / digit) * digit
    instead = (
        f"{within:.2g} is within reach, at {tightest.overhead:.0%} of the job's time"
        if within <= 1
        else "no other is within reach either"
    )
    return (
        f"; targetPLS {costs.target_pls:g} is out of reach: it takes a checkpoint every {duration_text(wanted)}, and "
        f"each costs {duration_text(costs.save)}; {instead}; until then the job saves as often as with "
        "full recovery, and goes back as a whole beyond its target"
    )


_BELIEVED_PER_SECOND = 0.015 / 86_400  # DLRover-RM section 2.2: 1.5% of the pods fail on a day
_BELIEF = 0.5  # the weight, in failures, of that rate against the fleet's, and of the fleet's against the job's own
_FIRST_COST = 1.0  # seconds of training that a checkpoint costs, before one was taken


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The number of lost parameter servers, which a scaled record may split, and the total seconds that servers ran."""

    failures: float = 0
    server_seconds: float = 0.0

    def __add__(self, other: "FailureRecord") -> "FailureRecord":
        return FailureRecord(self.failures + other.failures, self.server_seconds + other.server_seconds)

    def __sub__(self, other: "FailureRecord") -> "FailureRecord":
        return FailureRecord(self.failures - other.failures, self.server_seconds - other.server_seconds)

    def at_most(self, failures: float) -> "FailureRecord":
        """Returns the record or, if it tells of more failures than this, seen or believed, the same rate with less."""
        told = max(self.failures, self.server_seconds * _BELIEVED_PER_SECOND)
        return self if told <= failures else FailureRecord(*(part * failures / told for part in astuple(self)))


_MOST_OF_ONE_OWNER = 10.0  # failures, which tell a rate to within a third


class FleetRecord:
    """The failures of all jobs' servers; one owner's jobs together count for no more than a good estimate takes.

    Otherwise an owner with many jobs, or with false reports, decides what all others expect.
    """

    def __init__(self) -> None:
        self._of_owners: dict[str, FailureRecord] = {}
        self.total = FailureRecord()

    def add(self, owner: str, new: FailureRecord) -> None:
        """Adds what happened to a job of the owner."""
        before = self._of_owners.get(owner, FailureRecord())
        after = self._of_owners[owner] = before + new
        self.total += after.at_most(_MOST_OF_ONE_OWNER) - before.at_most(_MOST_OF_ONE_OWNER)


def failure_rate(own: FailureRecord, fleet: FailureRecord) -> float:
    """Estimates the failures of one PS of the job per second.

    The failures of all jobs correct the believed rate, and the job's own failures correct that. The job's own rate
    prevails if it is higher: a job without failures so far tells little, but one that fails again and again tells much.
    """
    of_all = (_BELIEF + fleet.failures) / (_BELIEF / _BELIEVED_PER_SECOND + fleet.server_seconds)
    mixed = (_BELIEF + own.failures) / (_BELIEF / of_all + own.server_seconds)
    seen = max(0, own.failures - 1) / own.server_seconds if own.server_seconds > 0 else 0.0
    return max(mixed, seen)


def failure_costs(
    shape: JobShape,
    total_seconds: float,
    own: FailureRecord,
    fleet: FailureRecord,
    save: float,
    load: float,
    reschedule: float,
    target_pls: float = 0.0,
    saves_priority_rows: bool = False,
    parity: int = 1,
    async_parity: bool = False,
) -> FailureCosts:
    """Returns the costs of PS failures for a job that takes `total_seconds` in all.

    Times are in seconds: `save` is the measured cost of a checkpoint, 0 before the first; `load` is the pause for
    another number of PS, which is a snapshot and a load; `reschedule` is the start of a PS. `target_pls` is the
    portion of samples that the job may lose; with `saves_priority_rows`, it saves rows between checkpoints. With
    coded recovery, the job keeps this `parity`, which lags behind pushes if it is `async_parity`.
    """
    width = max(1, stripe_width(shape.ps, parity))
    one = _ASYNC_PARITY_COST if async_parity else _SYNC_PARITY_COST * (width + parity - 1)
    measured = {"how often a PS is lost": (own + fleet).failures > 0, "what a checkpoint costs": save > 0}
    return FailureCosts(
        total_seconds=max(1.0, total_seconds),
        ps=shape.ps,
        between_failures=1 / (failure_rate(own, fleet) * shape.ps),
        save=save or _FIRST_COST,
        load=load,
        reschedule=reschedule,
        target_pls=target_pls,
        parity=parity,
        parity_slowdown=one,
        parity_memory=parity / width,
        saves_priority_rows=saves_priority_rows,
        unmeasured=tuple(what for what, is_measured in measured.items() if not is_measured),
    )
