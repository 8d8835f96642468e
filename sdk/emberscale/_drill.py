"""A drill rehearses the loss of a parameter server on a live job: whether it may begin, and what it cost.

Pure: the input is a series of the job's own reports, on this machine or on a cluster.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from emberscale_api.errors import InvalidError
from emberscale_api.job.roles import Role
from emberscale_api.job.status import RESTING, ConditionType, JobPhase, Progress, Rebuilds, TrainingJobStatus
from emberscale_api.readable import bytes_text, duration_text, rate_text

_SERVING = frozenset({JobPhase.TRAINING, JobPhase.EVALUATING})
_YET_TO_TRAIN = frozenset({JobPhase.PENDING, JobPhase.PREPARING, JobPhase.RESTORING, JobPhase.EVALUATING})
_TRAINED = frozenset({JobPhase.EVALUATING, JobPhase.SAVING, JobPhase.COMPLETE})
"""Phases that a job reaches only once it has trained all batches before them."""
_SETTLED_SECONDS = 20.0
"""How long a job trains on without a recovery until the server counts as one that was not lost."""


@dataclass(frozen=True)
class Look:
    """A job's own report at one moment.

    * `at`: in seconds, on the observer's clock.
    * `samples`: the samples that count, over all epochs. `speed`: samples/s, as the job measures it.
    * `checkpoint`: the id of the newest persistent one; empty if there is none.
    * `servers`: the incarnations of the parameter servers, by index.
    * `protected`: whether any one of them can be rebuilt from parity; None: the job keeps none. `problem`: why not.
    * `recoveries`: how often the job went back to a checkpoint. `pls`: the portion of lost samples.
    * `rebuilds`: how many servers were rebuilt; the last rebuild took `rebuild_seconds` and had `rebuild_bytes`.
    """

    at: float
    phase: JobPhase
    samples: int = 0
    speed: float = 0.0
    checkpoint: str = ""
    servers: Mapping[int, str] = field(default_factory=dict)
    protected: bool | None = None
    problem: str = ""
    recoveries: int = 0
    pls: float = 0.0
    rebuilds: int = 0
    rebuild_seconds: float = 0.0
    rebuild_bytes: int = 0

    @property
    def history(self) -> tuple[int, float, int]:
        """The figures that change with each recovery."""
        return self.recoveries, self.pls, self.rebuilds


@dataclass(frozen=True)
class DrillReport:
    """The cost of the loss of a parameter server. A time is None if the event had not happened when the drill ended.

    * `precision_seconds`: the longest time between two reports of samples before the kill. Times are no more exact.
    * `without_service_seconds`: from the kill to the first samples after it.
    * `unprotected_seconds`: from the kill until any one server could be lost again; None also without parity.
    * `regained_seconds`: from the kill until the job had as many samples as before it.
    * `before`, `meanwhile`: samples/s, until the kill, and from it to the end of the drill.
    * `rebuild_seconds`: as the master counts them, from when it noticed until the rows were served again.
      `rebuild_bytes`: of the rebuilt rows.
    * `rolled_back`: whether the job went back to a checkpoint; `repeated_samples` are then trained again.
    * `forgotten`: the portion of lost samples that the loss has added, where the lost server alone went back, or its
      parity lagged.
    * `moved_away`: the server gave its rows away before it ended, so that no loss was rehearsed.
    * `ended`: the phase in which the job was over before the drill was; empty: it was not.
    """

    server: str
    precision_seconds: float
    without_service_seconds: float | None
    unprotected_seconds: float | None
    regained_seconds: float | None
    before: float
    meanwhile: float
    rebuilt: bool
    rebuild_seconds: float
    rebuild_bytes: int
    rolled_back: bool
    repeated_samples: int
    forgotten: float
    was_protected: bool
    moved_away: bool = False
    ended: str = ""

    @property
    def passed(self) -> bool:
        """Whether the job has recovered from a loss, and lost nothing if it was protected."""
        lost = self.was_protected and (self.rolled_back or self.unprotected_seconds is None)
        return self.regained_seconds is not None and not lost


def look_at_job(status: TrainingJobStatus, at: float) -> Look:
    """Reads the status of a TrainingJob."""
    progress = status.progress or Progress()
    protected, rebuilds = status.condition(ConditionType.PROTECTED), progress.rebuilds or Rebuilds()
    return Look(
        at=at,
        phase=status.phase,
        samples=progress.samples,
        speed=progress.samples_per_second,
        checkpoint=progress.checkpoint,
        servers={one.index: str(one.incarnation) for one in status.members if one.role == str(Role.PS) and one.pod},
        protected=None if protected is None else protected.status == "True",
        problem="" if protected is None else protected.message,
        recoveries=progress.recoveries,
        pls=progress.pls,
        rebuilds=rebuilds.count,
        rebuild_seconds=rebuilds.seconds,
        rebuild_bytes=rebuilds.bytes,
    )


def check(job: str, look: Look, index: int, force: bool) -> None:
    """Raises InvalidError if a server's loss cannot be rehearsed now, or costs more than time and is not forced."""
    if look.phase is not JobPhase.TRAINING:
        again = "; try again once it trains" if look.phase in _YET_TO_TRAIN else ""
        raise InvalidError(f"{job}: the job is {look.phase}; a drill needs one that is Training{again}")
    check_server(look, index, force)


def check_server(look: Look, index: int, force: bool) -> None:
    """Raises InvalidError if a server does not run, or its loss costs more than time and is not forced."""
    server = f"ps-{index}"
    check_runs(index, look.servers)
    if look.protected or force:
        return
    if look.protected is None:
        raise InvalidError(
            f"{server}: the job keeps no parity, and {consequence(look)}; train with "
            "spec.faultTolerance.strategy: ErasureCoding to have parity, or --force kills it anyway"
        )
    why = f": {look.problem}" if look.problem else ""
    raise InvalidError(f"{server}: the job is unprotected now{why}; try again once it is protected, or with --force")


def check_runs(index: int, servers: Collection[int]) -> None:
    """Raises InvalidError if the parameter server of this index is not among those that run."""
    if index not in servers:
        known = ", ".join(f"ps-{one}" for one in sorted(servers)) or "none"
        raise InvalidError(f"ps-{index}: no such parameter server runs; running are {known}")


def consequence(look: Look) -> str:
    """Says what the loss of an unprotected server costs, as the end of a sentence."""
    persistent = f"checkpoint {look.checkpoint}" if look.checkpoint else "its start"
    return (
        f"its loss rolls the job back to {persistent} or a newer flash checkpoint; training repeats what came after "
        "(with PartialRecovery, only the rows of that server roll back)"
    )


def waits(look: Look) -> bool:
    """Whether a drill waits for what a job does now, since it will soon train on."""
    return look.phase is JobPhase.EVALUATING


def watches_on(before: Sequence[Look], watched: float, timeout: float) -> bool:
    """Whether to watch on ahead of the kill: for `watched` seconds, and until an evaluation is over."""
    lasted = before[-1].at - before[0].at
    return lasted < watched or (waits(before[-1]) and lasted < timeout)


def is_over(index: int, before: Sequence[Look], after: Sequence[Look]) -> bool:
    """Whether the drill of the server of this index is over."""
    if not after:
        return False
    if _moved_away(index, before[-1], after):
        return True
    recovered = _recovered(before[-1], after)
    protected = before[-1].protected is None or _protected(recovered) is not None
    return after[-1].phase in RESTING or (protected and _regained(_peak(before, after), recovered) is not None)


def report(index: int, before: Sequence[Look], killed_at: float, after: Sequence[Look]) -> DrillReport:
    """Reports on the looks before the kill, at least one, and those after it; `killed_at` is on their clock."""
    at_kill, last = before[-1], (after or before)[-1]
    recovered = _recovered(at_kill, after)
    peak = _peak(before, after)
    served, protected, regained = _served(recovered), _protected(recovered), _regained(peak, recovered)
    ends = [look.at for look in (regained, protected) if look is not None]
    end = next((look for look in after if look.at >= max(ends)), last) if ends else last
    lasted = end.at - killed_at
    rolled_back = last.recoveries > at_kill.recoveries
    lowest = min((look.samples for look in recovered if look.phase in _SERVING), default=peak)
    rebuilt = last.rebuilds > at_kill.rebuilds

    def since(look: Look | None) -> float | None:
        return None if look is None else look.at - killed_at

    return DrillReport(
        server=f"ps-{index}",
        precision_seconds=max((two.at - one.at for one, two in pairwise(_changes(before))), default=0.0),
        without_service_seconds=since(served),
        unprotected_seconds=since(protected),
        regained_seconds=since(regained),
        before=_rate(before),
        meanwhile=max(0, end.samples - at_kill.samples) / lasted if lasted > 0 else 0.0,
        rebuilt=rebuilt,
        rebuild_seconds=last.rebuild_seconds if rebuilt else 0.0,
        rebuild_bytes=last.rebuild_bytes if rebuilt else 0,
        rolled_back=rolled_back,
        repeated_samples=max(0, peak - lowest) if rolled_back else 0,
        forgotten=max(0.0, last.pls - at_kill.pls),
        was_protected=bool(at_kill.protected),
        moved_away=_moved_away(index, at_kill, after),
        ended=str(last.phase) if last.phase in RESTING else "",
    )


def lines(result: DrillReport) -> Iterator[tuple[str, str]]:
    """The report for people: what, and how much."""

    def seconds(value: float | None, after: str) -> str:
        return "not before the drill ended" if value is None else f"{duration_text(value)} {after}"

    if result.moved_away:
        yield (
            "not rehearsed",
            f"{result.server} gave its rows away before it ended, so none were lost: try again",
        )
        return
    yield "without service", seconds(result.without_service_seconds, "from the kill to the first samples after it")
    if result.was_protected or result.unprotected_seconds is not None:
        yield "fully protected again", seconds(result.unprotected_seconds, "after the kill")
    else:
        yield "fully protected again", "never: the job was not protected"
    share = f", {result.meanwhile / result.before:.0%} of before" if result.before else ""
    new = rate_text(result.meanwhile, "new samples")
    yield "speed", f"{rate_text(result.before)} before, {new} meanwhile{share}"
    if result.rebuilt:
        served = f"{duration_text(result.rebuild_seconds)} after the master noticed the loss"  # all are back later
        yield "rebuilt from parity", f"{bytes_text(result.rebuild_bytes)} of rows, served {served}"
    if result.rolled_back:
        regained = seconds(result.regained_seconds, "after the kill")
        yield "rolled back", f"{result.repeated_samples:,} samples trained again; regained {regained}"
    elif result.rebuilt and result.forgotten:
        yield "rolled back", f"nothing; parity lagged, and the portion of lost samples grew by {result.forgotten:.4g}"
    elif result.forgotten:
        yield (
            "rolled back",
            f"the rows of {result.server} alone; the portion of lost samples grew by {result.forgotten:.4g}",
        )
    else:
        yield "rolled back", "nothing"
    if result.precision_seconds:
        yield "precision", f"reports of samples came up to {duration_text(result.precision_seconds)} apart"
    if result.ended:
        yield "ended early", f"the job was {result.ended} before the drill was over"


def _moved_away(index: int, at_kill: Look, after: Sequence[Look]) -> bool:
    """Whether the job has trained for long with the server's successor, and without a recovery."""

    def goes_on(look: Look) -> bool:
        replaced = look.servers.get(index, at_kill.servers[index]) != at_kill.servers[index]
        is_healthy = look.phase in _SERVING and (look.protected is True or at_kill.protected is not True)
        return replaced and is_healthy and look.history == at_kill.history

    lately = list(takewhile(goes_on, reversed(after)))
    return bool(lately) and lately[0].at - lately[-1].at >= _SETTLED_SECONDS and lately[0].samples > lately[-1].samples


def _recovered(at_kill: Look, after: Sequence[Look]) -> Sequence[Look]:
    """Returns the looks since the recovery."""
    first = next((number for number, look in enumerate(after) if look.history != at_kill.history), len(after))
    return after[first:]


def _served(recovered: Sequence[Look]) -> Look | None:
    """Returns the first look after the recovery with new samples, or of a job that has trained all samples."""
    for one, two in pairwise(recovered):
        has_more = one.phase in _SERVING and two.phase is JobPhase.TRAINING and two.samples > one.samples
        if has_more or two.phase in _TRAINED:
            return two
    return next((look for look in recovered[:1] if look.phase in _TRAINED - _SERVING), None)


def _protected(recovered: Sequence[Look]) -> Look | None:
    return next((look for look in recovered if look.protected), None)


def _regained(peak: int, recovered: Sequence[Look]) -> Look | None:
    served = _served(recovered)
    if served is None:
        return None
    return next((look for look in recovered if look.at >= served.at and look.samples >= peak), None)


def _peak(before: Sequence[Look], after: Sequence[Look]) -> int:
    """The most samples that the job had until it recovered."""
    recovered = _recovered(before[-1], after)
    return max(look.samples for look in (*before, *after[: len(after) - len(recovered)]))


def _changes(looks: Sequence[Look]) -> list[Look]:
    """Returns the looks whose samples differ from those of the previous look."""
    return [two for one, two in pairwise(looks) if two.samples != one.samples]


def _rate(looks: Sequence[Look]) -> float:
    """Samples/s between the first and the last change of the samples; with fewer than two, what the job says."""
    changes = _changes(looks)
    if len(changes) < 2:
        return looks[-1].speed
    return (changes[-1].samples - changes[0].samples) / (changes[-1].at - changes[0].at)
