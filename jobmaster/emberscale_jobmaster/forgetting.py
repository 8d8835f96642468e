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
    batches = minus(applied, source.restored.applied)
    buckets, pieces = _places(state, lost)

    def news(known: Iterable[ForgottenShare]) -> Applied:
        return minus(batches, _batches(known))

    of_buckets = Counter(_of_bucket(state.forgotten, one) for one in buckets)
    of_pieces = {_of_piece(state.forgotten, one) for one in pieces}
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


def contradicts(state: JobState, lost: Collection[int], source: Source) -> bool:
    """Whether a checkpoint has other batches in the rows of these servers, by index, than the state says of them.

    It was out of reach when the rows went back to an older one, or is of a history that the job has given up.
    """
    buckets, pieces = _places(state, lost)
    here, there = state.forgotten, source.restored.forgotten
    known = {(_of_bucket(here, one), _of_bucket(there, one)) for one in buckets}
    known |= {(_of_piece(here, one), _of_piece(there, one)) for one in pieces}
    held = source.restored.applied
    return any(minus(held, _batches(one)) != minus(held, _batches(other)) for one, other in known)


def _places(state: JobState, lost: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the numbers of the buckets and dense pieces of these servers."""
    table = state.routing.table
    return (
        [number for number, owner in enumerate(table.bucket_owners) if owner in lost],
        [number for number, owner in enumerate(table.piece_owners) if owner in lost],
    )


def _batches(known: Iterable[ForgottenShare]) -> Applied:
    """Returns the batches that were forgotten in any of these recoveries."""
    return on_any([{part.epoch: part.ranges for part in share.epochs} for share in known])


def _of_bucket(forgotten: Iterable[ForgottenShare], number: int) -> tuple[ForgottenShare, ...]:
    """Returns the recoveries in which a bucket forgot batches."""
    return tuple(share for share in forgotten if _within(number, share.buckets))


def _of_piece(forgotten: Iterable[ForgottenShare], number: int) -> tuple[ForgottenShare, ...]:
    """Returns the recoveries in which a dense piece forgot batches."""
    return tuple(share for share in forgotten if _within(number, share.pieces))


def _within(number: int, spans: Ranges) -> bool:
    return any(first <= number < stop for first, stop in spans)
