"""Counts how often each sample was applied, by each server's record and by the steps of its dense parameters.

The record of applied batches also prevents a batch from being applied twice, so the record alone could not reveal a
repetition. Each push steps every dense piece of a server, and a piece counts its steps where rows are changed. The two
must agree, except for the batches that the piece forgot in recoveries, as the checkpoint records.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from emberscale_api.checkpoint import ForgottenShare, Origin

Runs = Sequence[tuple[int, int, int]]
"""(first, stop, times): each batch in [first, stop) was applied `times` times."""


@dataclass(frozen=True)
class Counts:
    """Samples that some server never applied, that every server applied once, and that some server applied repeatedly.

    A sample that one server missed and another repeated is in both `missing` and `repeated`. `forgotten` are the
    samples that some rows have lost again in a recovery.
    """

    missing: int = 0
    once: int = 0
    repeated: int = 0
    forgotten: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def accounted(self) -> bool:
        """Whether no sample was lost or repeated, except those that rows forgot in recoveries."""
        return self.missing == 0 and self.repeated == 0

    @property
    def exact(self) -> bool:
        """Whether no sample was lost, repeated or forgotten."""
        return self.accounted and self.forgotten == 0


@dataclass(frozen=True)
class ServerRecord:
    """The saved history of one parameter server.

    * `applied`: by epoch, which batches it applied and how often.
    * `dense_steps`: by dense piece that holds parameters, how many gradients stepped it.
    """

    applied: Mapping[int, Runs]
    dense_steps: Mapping[int, int]

    @property
    def pushes(self) -> int:
        """The number of pushes in `applied`."""
        return sum(times * (stop - first) for runs in self.applied.values() for first, stop, times in runs)


@dataclass(frozen=True)
class AuditReport:
    """Counts by epoch, over all servers of a checkpoint.

    * `contradictions`: the servers whose dense parameters took more or fewer steps than their records tell.
    * `shares`: what each recovery lost, and from which rows, oldest first.
    * `origin`: the checkpoint of another job that this one started from; None: from nothing.
    """

    epochs: Mapping[int, Counts]
    contradictions: tuple[str, ...]
    checkpoint: str
    ps_count: int
    shares: tuple[ForgottenShare, ...] = ()
    origin: Origin | None = None

    @property
    def accounted(self) -> bool:
        """Whether every sample was applied once, except for samples forgotten in recorded recoveries."""
        return self.total.accounted and not self.contradictions

    @property
    def pls(self) -> float:
        """The portion of lost samples (CPR equation 3)."""
        return sum((share.pls for share in self.shares), 0.0)

    @property
    def total(self) -> Counts:
        """The counts over all epochs."""
        return sum(self.epochs.values(), Counts())

    def as_document(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            **asdict(self.total),
            "epochs": [{"epoch": epoch, **asdict(counts)} for epoch, counts in sorted(self.epochs.items())],
            "contradictions": list(self.contradictions),
            "pls": self.pls,
            "forgotten_shares": [{**share.model_dump(mode="json"), "share": share.share} for share in self.shares],
            "checkpoint": self.checkpoint,
            "ps_count": self.ps_count,
            "origin": None if self.origin is None else self.origin.model_dump(mode="json"),
        }


def contradictions_of(
    servers: Sequence[ServerRecord], shares: Sequence[ForgottenShare] = (), steps_before: int = 0
) -> tuple[str, ...]:
    """Returns a line for each server whose dense pieces were not stepped once for each push that it recorded.

    A piece lacks the steps of what it has forgotten by `shares`, and no others. It counts `steps_before` beyond those
    of the job, which started from another one's checkpoint.
    """
    lines = []
    for index, server in enumerate(servers):
        forgotten = {piece: _batches_forgotten(shares, piece) for piece in server.dense_steps}
        wrong = {
            piece: steps - steps_before
            for piece, steps in server.dense_steps.items()
            if steps - steps_before != server.pushes - forgotten[piece]
        }
        if wrong:
            piece, steps = next(iter(wrong.items()))
            without = f" and forgot {forgotten[piece]:,}" if forgotten[piece] else ""
            lines.append(
                f"ps-{index} recorded {server.pushes:,} pushes{without}, but dense piece {piece} took {steps:,} steps"
                + (f", and {len(wrong) - 1} more pieces disagree" if len(wrong) > 1 else "")
            )
    return tuple(lines)


def _batches_forgotten(shares: Iterable[ForgottenShare], piece: int) -> int:
    """Counts the batches that a dense piece has forgotten; those of two recoveries from one checkpoint count once."""
    touching = [share for share in shares if any(first <= piece < stop for first, stop in share.pieces)]
    spans: dict[int, list[tuple[int, int]]] = {}
    for share in touching:
        for part in share.epochs:
            spans.setdefault(part.epoch, []).extend(part.ranges)
    return sum(_covered(ranges) for ranges in spans.values())


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """The numbers in [first, stop) ranges that may overlap."""
    covered, reached = 0, 0
    for first, stop in sorted(ranges):
        covered += max(0, stop - max(first, reached))
        reached = max(reached, stop)
    return covered


def with_forgotten(
    counts: Mapping[int, Counts], shares: Sequence[ForgottenShare], records: int, batch_size: int
) -> dict[int, Counts]:
    """The counts of each epoch, with the samples that some rows have forgotten: those of two recoveries once."""
    result = dict(counts)
    for epoch, each in counts.items():
        ranges = [span for share in shares for part in share.epochs if part.epoch == epoch for span in part.ranges]
        samples = [(first * batch_size, min(stop * batch_size, records)) for first, stop in ranges]
        result[epoch] = replace(each, forgotten=_covered(samples))
    return result


def audit_applied(
    records: int, batch_size: int, epochs: int, servers: Sequence[Mapping[int, Runs]]
) -> dict[int, Counts]:
    """Counts for each epoch.

    Batch k of an epoch holds its samples [k * batch_size, min((k + 1) * batch_size, records)). `servers[i][epoch]` is
    what server i applied; it never applied batches outside of its runs. Epochs beyond `epochs` are counted too if any
    server knows of them: everything applied there is too much.
    """
    expected = range(epochs)
    beyond = {epoch for server in servers for epoch in server if epoch not in expected}
    counts = {epoch: _epoch(records, batch_size, [server.get(epoch, ()) for server in servers]) for epoch in expected}
    for epoch in sorted(beyond):
        applied = _epoch(records, batch_size, [server.get(epoch, ()) for server in servers])
        counts[epoch] = Counts(repeated=applied.once + applied.repeated)
    return counts


def _epoch(records: int, batch_size: int, servers: Sequence[Runs]) -> Counts:
    batches = -(-records // batch_size)
    total = Counts()
    edges = {0, batches}
    for runs in servers:
        edges |= {edge for first, stop, _ in runs for edge in (first, stop)}
    ascending = [sorted(runs) for runs in servers]
    for first, stop in pairwise(sorted(edges)):
        times = [_times(runs, first) for runs in ascending]
        samples = min(stop * batch_size, records) - min(first * batch_size, records)
        if first >= batches:
            # batches that the data does not have: there is no sample to count, yet something was applied
            samples = (stop - first) * batch_size
            total += Counts(repeated=samples if any(times) else 0)
            continue
        low, high = min(times, default=0), max(times, default=0)
        total += Counts(
            missing=samples if low == 0 else 0,
            once=samples if low == high == 1 else 0,
            repeated=samples if high > 1 else 0,
        )
    return total


def _times(runs: Runs, batch: int) -> int:
    """How often one server applied a batch; its runs are disjoint, and ascend."""
    place = bisect_right(runs, batch, key=itemgetter(0)) - 1
    return runs[place][2] if place >= 0 and batch < runs[place][1] else 0
