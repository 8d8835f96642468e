"""Hands out work, sizes shards, and commits what workers report of them.

Shards follow DLRover-RM section 5.1, guided self-scheduling: a shard is a part of what is left, so shards shrink
towards the end and all workers end at about the same time. The part follows the worker's share of the total speed, and
its largest size follows the worker's speed relative to the middle of its peers, so a straggler holds less and pushes
stale gradients for a shorter time.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from emberscale_api.dataset import DataFile, Split
from emberscale_api.errors import InvalidError
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId
from emberscale_jobmaster.figures import loses_answered
from emberscale_jobmaster.ledger import Lease
from emberscale_jobmaster.progress import fail
from emberscale_jobmaster.state import PREPARATION, JobState, Stage
from emberscale_jobmaster.statistics import Tally


class InvalidReportError(InvalidError):
    """A report that contradicts the task that it is about."""


@dataclass(frozen=True)
class Task:
    """One lease as the worker sees it; `start`, `stop` and `shard` are positions in the epoch's order."""

    stage: Stage
    token: int
    epoch: int = 0
    start: int = 0
    stop: int = 0
    shard: int = 0
    file: DataFile | None = None
    file_number: int = 0
    split: Split | None = None


@dataclass(frozen=True)
class Discovered:
    """Outcome of a DISCOVER task: the files of both splits, in order."""

    training: tuple[DataFile, ...]
    evaluation: tuple[DataFile, ...]


@dataclass(frozen=True)
class Indexed:
    """Outcome of an INDEX task: how many records the file has."""

    records: int


Finding = Discovered | Indexed | Tally | None
"""What a finished task found; None after TRAIN."""


def acquire(
    state: JobState, spec: TrainingJobSpec, member: MemberId, batches: int, leases: int | None = None
) -> tuple[JobState, Task | None]:
    """Leases the next task to a worker, of `batches` batches if the task is data; None if there is none for it now.

    The worker may hold this number of `leases` of data at once; by default LEASES_PER_WORKER.

    A worker prepares data one task at a time. If it asks again while it holds such a task, it never received the task
    and gets the same one.
    """
    if not _may_lease(state):
        return state, None
    held = state.ledger.held_by(member)
    if state.stage in PREPARATION and held:
        return state, _task(state, spec, held[0])
    most = LEASES_PER_WORKER if leases is None or state.stage in PREPARATION else leases
    if len(held) >= most:
        return state, None
    granted = state.ledger.grant(member, state.next_token, 1 if state.stage in PREPARATION else batches)
    if granted is None:
        return state, None
    ledger, lease = granted
    return replace(state, ledger=ledger, next_token=state.next_token + 1), _task(state, spec, lease)


def report_progress(
    state: JobState, spec: TrainingJobSpec, member: MemberId, committed: dict[int, int]
) -> tuple[JobState, list[int]]:
    """Commits a worker's progress; `committed` has positions by token. Returns the tokens that the worker must drop.

    Raises InvalidReportError for a position beyond the lease.
    """
    dropped = []
    for token, position in committed.items():
        lease = state.ledger.leases.get(token)
        if lease is None or lease.holder != member:
            dropped.append(token)
        elif state.stage is Stage.TRAIN:
            state = replace(state, ledger=state.ledger.commit(token, _batches_below(state, spec, lease, position)))
    return state, dropped


def finish(state: JobState, spec: TrainingJobSpec, member: MemberId, token: int, finding: Finding) -> JobState:
    """Ends a finished task. A token that the worker has lost changes nothing.

    Raises InvalidReportError if the finding is not of the task's kind, or has more records or samples than possible.
    """
    lease = state.ledger.leases.get(token)
    if lease is None or lease.holder != member:
        return state
    match state.stage, finding:
        case Stage.DISCOVER, Discovered(training, evaluation):
            if not training:
                return fail(state, "DataUnavailable", "spec.data.train: no file was found")
            state = replace(state, training_files=training, evaluation_files=evaluation)
        case Stage.INDEX, Indexed(records):
            if records > MOST_RECORDS:
                raise InvalidReportError(f"task {token}: a file has no {records} records, {MOST_RECORDS} at most")
            state = _with_records(state, lease.start, records)
        case Stage.EVALUATE, Tally() as tally if state.tally is not None:
            if tally.samples > (lease.stop - lease.start) * spec.training.batch_size:
                raise InvalidReportError(f"task {token} has fewer than {tally.samples} samples")
            state = replace(state, tally=state.tally.merge(tally))
        case Stage.TRAIN, None:
            pass
        case _:
            raise InvalidReportError(f"the result of task {token} is not one of stage {state.stage}")
    return replace(state, ledger=state.ledger.finish(token))


def file_of(state: JobState, number: int) -> tuple[Split, int]:
    """Returns the file of the INDEX task of batch `number`: its split, and its number in the split."""
    if number < len(state.training_files):
        return Split.TRAINING, number
    return Split.EVALUATION, number - len(state.training_files)


def file_at(state: JobState, number: int) -> DataFile:
    """Returns the file of the INDEX task of batch `number`."""
    return (*state.training_files, *state.evaluation_files)[number]


def _may_lease(state: JobState) -> bool:
    if state.over or (state.stage is Stage.TRAIN and loses_answered(state)):
        return False
    if state.suspending:
        # Partially pushed batches must be settled before a snapshot; no new batch begins.
        return state.stage is Stage.TRAIN and bool(state.ledger.returned)
    return state.stage in PREPARATION or state.stage in (Stage.TRAIN, Stage.EVALUATE)


def _task(state: JobState, spec: TrainingJobSpec, lease: Lease) -> Task:
    match state.stage:
        case Stage.INDEX:
            split, number = file_of(state, lease.start)
            return Task(state.stage, lease.token, file=file_at(state, lease.start), file_number=number, split=split)
        case Stage.TRAIN | Stage.EVALUATE:
            size = spec.training.batch_size
            stop = min(lease.stop * size, _records(state))
            return Task(state.stage, lease.token, state.epoch, lease.start * size, stop, lease.shard * size)
        case _:
            return Task(state.stage, lease.token)


def _batches_below(state: JobState, spec: TrainingJobSpec, lease: Lease, position: int) -> int:
    size = spec.training.batch_size
    end = min(lease.stop * size, _records(state))
    if position > end:
        raise InvalidReportError(f"lease {lease.token} ends at position {end}, and {position} was committed")
    return lease.stop if position == end else position // size


def _records(state: JobState) -> int:
    return state.training_records if state.stage is Stage.TRAIN else state.evaluation_records


def _with_records(state: JobState, number: int, records: int) -> JobState:
    files = [*state.training_files, *state.evaluation_files]
    files[number] = replace(files[number], records=records)
    split = len(state.training_files)
    return replace(state, training_files=tuple(files[:split]), evaluation_files=tuple(files[split:]))


MOST_RECORDS = 1 << 40
"""The most records of a file: 250 times as many as all files of Criteo's Terabyte data set have together."""
LEASES_PER_WORKER = 2
"""A worker may hold the lease that it works on and the next one."""


def shard_batches(
    available: int, speed: float | None, peers: Sequence[float | None], minimum: int, maximum: int
) -> int:
    """Returns the shard size for a worker of `speed` samples/s, within [minimum, maximum].

    `peers` are the speeds of all live workers, this one included. None means not measured yet, and counts as the median
    of the measured speeds.
    """
    known = [peer for peer in peers if peer is not None and peer > 0]
    middle = statistics.median(known) if known else 1.0
    own = speed if speed is not None and speed > 0 else middle
    total = sum(peer if peer is not None and peer > 0 else middle for peer in peers) or own
    largest = maximum * min(1.0, own / middle)
    guided = available * min(1.0, own / total) / LEASES_PER_WORKER
    return max(minimum, int(min(largest, guided)))
