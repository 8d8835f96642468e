"""Computes what a recovery makes rows forget, and the portion of lost samples that it adds (CPR equation 3).

Rows that go back to a checkpoint lose the batches that came after it, and rows that are rebuilt from parity with
`durability: Async` those that the parity lacked. Nobody trains a forgotten batch again, so a row cannot lose it twice:
a recovery counts the progress since the last checkpoint or since the last recovery of the same rows that made them
forget, whichever is later.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from emberscale_api.checkpoint import EpochApplied, ForgottenShare
from emberscale_api.job import TrainingJobSpec
from emberscale_api.routing import BUCKETS
from emberscale_jobmaster.figures import samples_in
from emberscale_jobmaster.operations import Source
from emberscale_jobmaster.ranges import Applied, Ranges, minus, normalised, on_any
from emberscale_jobmaster.state import JobState


def forgotten_by(
    state: JobState, spec: TrainingJobSpec, lost: Collection[int], applied: Applied, source: Source
) -> ForgottenShare:
    """Returns the `applied` batches that the rows of these servers, by index, lose by going back to a checkpoint.

    A source without a checkpoint stands for rows that are rebuilt from parity.

    Omits batches that all of these rows have already forgotten; each row counts only what it forgets anew.
    """
    table, batches = state.routing.table, minus(applied, source.restored.applied)
    buckets = [number for number, owner in enumerate(table.bucket_owners) if owner in lost]
    pieces = [number for number, owner in enumerate(table.piece_owners) if owner in lost]

    def news(known: Collection[ForgottenShare]) -> Applied:
        earlier = [{part.epoch: part.ranges for part in share.epochs} for share in known]
        return minus(batches, on_any(earlier))

    of_buckets = Counter(_known(state.forgotten, (share.buckets for share in state.forgotten), one) for one in buckets)
    of_pieces = {_known(state.forgotten, (share.pieces for share in state.forgotten), one) for one in pieces}
    lacking = on_any([news(known) for known in {*of_buckets, *of_pieces}])
    lost_samples = sum(count * samples_in(state, spec, news(known)) for known, count in of_buckets.items()) / BUCKETS
    return ForgottenShare(
        servers=tuple(sorted(lost)),
        checkpoint=source.checkpoint,
        epochs=tuple(EpochApplied(epoch=epoch, ranges=spans) for epoch, spans in sorted(lacking.items())),
        samples=samples_in(state, spec, lacking),
        buckets=normalised((number, number + 1) for number in buckets),
        pieces=normalised((number, number + 1) for number in pieces),
        pls=lost_samples / max(1, spec.training.epochs * state.training_records),
    )


def _known(forgotten: Iterable[ForgottenShare], spans: Iterable[Ranges], number: int) -> tuple[ForgottenShare, ...]:
    """Returns the recoveries in which the bucket or piece of this number forgot batches."""
    return tuple(
        share
        for share, ranges in zip(forgotten, spans, strict=True)
        if any(first <= number < stop for first, stop in ranges)
    )
