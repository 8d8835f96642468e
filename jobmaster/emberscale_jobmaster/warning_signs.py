"""Warnings that a running or Complete job may not be what the user wanted: each is a line that says what to do."""

import math
from collections.abc import Iterator

import numpy as np

from emberscale_api.job import RecoveryPriority, TrainingJobSpec
from emberscale_api.job.rounds import BUDGET_PROBLEMS
from emberscale_api.job.status import BINNED_LOGITS
from emberscale_api.job.units import memory_quantity
from emberscale_jobmaster import flash
from emberscale_jobmaster.figures import checkpoint_interval, committed_samples, wanted_workers
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import CHECKPOINT_NOT_WRITTEN, CheckpointPurpose
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.statistics import ProgressiveWindow

_SKIPPED = {
    CheckpointPurpose.PERIODIC: "no new checkpoint was taken",
    CheckpointPurpose.PRIORITY: "no priority rows were saved",
}
_TRUNCATED_SHARE = 0.01
_ENOUGH_SAMPLES = 1000
_MANY_SAMPLES = 10_000
"""So many that labels as rare as one in a thousand are among them, but for a chance of 0.00005."""
_OF_ZERO, _OF_ONE = 0.5, 1 / (1 + math.exp(-1))
"""The sigmoids of 0 and 1: the range of the predictions of a model that returns probabilities for logits."""


def warning_signs(state: JobState, seen: Observations, spec: TrainingJobSpec) -> tuple[str, ...]:
    """Returns the warnings that hold now, in a stable order.

    A warning's text does not change while the warning holds, so that a viewer can recognise new ones.
    """
    return tuple(_signs(state, seen, spec))


def _signs(state: JobState, seen: Observations, spec: TrainingJobSpec) -> Iterator[str]:
    trouble = state.troubles.get(CheckpointPurpose.FLASH)
    if problem := flash.missing_store(state.flash, spec) or (trouble.message if trouble is not None else ""):
        yield f"no new flash checkpoint was taken, and training continues: {problem}"
    for purpose, what in _SKIPPED.items():
        trouble = state.troubles.get(purpose)
        if trouble is not None and trouble.reason == CHECKPOINT_NOT_WRITTEN:
            yield f"{what}, and training continues: {_of_every_attempt(trouble.message, trouble.checkpoint)}"
    for taking in state.checkpointings:
        problem = next(filter(None, taking.problems.values()), "")
        if problem and taking.purpose in (CheckpointPurpose.SUSPENSION, CheckpointPurpose.FINAL):
            yield f"the checkpoint to end with is not written yet: {_of_every_attempt(problem, taking.checkpoint)}"
    saves_rows = spec.fault_tolerance.priority is not RecoveryPriority.NONE
    if saves_rows and state.flash.checkpoint and flash.is_wanted(state.flash, spec):
        yield (
            "spec.faultTolerance.priority saves hardly any rows beside flash checkpoints, which have all of them: set "
            "spec.checkpoint.flash.mode to Disabled, or remove the priority"
        )
    if wanted := _wanted_bandwidth(state, seen, spec):
        yield (
            "checkpoints take longer than their interval at spec.checkpoint.writeBandwidth "
            f"{spec.checkpoint.write_bandwidth}, so fewer are taken: {wanted} would do, or a longer "
            "spec.checkpoint.interval"
        )
    for problem in state.damaged.values():
        yield f"a damaged checkpoint was skipped, and an older one or none is used: {problem}"
    records, batch = state.training_records, spec.training.batch_size
    if 0 < records < batch:
        yield (
            f"spec.training.batchSize is {batch:,} and the training data has {records:,} records: an epoch is a single "
            "step; choose a smaller batch"
        )
    trained = {file.uri for file in state.training_files}
    if both := [file.uri for file in state.evaluation_files if file.uri in trained]:
        yield (
            f"spec.data.evaluation has {len(both):,} of the files that are trained on, such as {both[0]}: the "
            "evaluation then tells little of new data; keep some files for it alone"
        )
    if (label := _only_label(seen.window)) is not None:
        yield f"all samples trained lately have the label {label}: check the labels of spec.data.train, or shuffle it"
    last = state.evaluations[-1] if state.evaluations else None
    if last is not None and last.samples and last.auc is None:
        yield (
            "all records of spec.data.evaluation have the same label, so there is no AUC or normalised entropy: "
            "take records with both labels"
        )
    if last is not None and (last.normalized_entropy or 0.0) > 1:
        better = [one for one in state.evaluations if (one.normalized_entropy or 1.0) < 1]
        best = min(better, key=lambda one: one.normalized_entropy or 1.0, default=None)
        advice = (
            "check that the evaluation data has ids of the training data and both labels, scale dense features, for "
            "example by denseTransform (see docs/data.md), or lower the learning rates"
            if best is None
            else f"after epoch {best.epoch} it was best, so the model overfits: train with spec.training.epochs "
            f"{best.epoch}, or export the newest checkpoint of that epoch, if spec.checkpoint.keep has left one (see "
            "docs/running.md)"
        )
        yield (
            "the evaluation is worse than always predicting the mean label (its normalised entropy is above 1): "
            f"{advice}"
        )
    if spec.model.entrypoint is not None and _are_sigmoids_of_probabilities(seen.window):
        yield (
            f"spec.model.entrypoint: {spec.model.entrypoint} seems to return probabilities: every prediction is the "
            "sigmoid of a number from 0 to 1; return logits, without a sigmoid at the end"
        )
    workers = sorted(wanted_workers(state, spec) & seen.sightings.keys())
    decisions = (seen.sightings[name].rounds for name in workers)
    lacking = next((one for one in decisions if one is not None and one.reason in BUDGET_PROBLEMS), None)
    if lacking is not None:
        yield f"workers train without rounds of batches: {lacking.message}; set another spec.hotEmbeddings.budget"
    samples = committed_samples(state, spec)
    if samples and state.truncated_records > _TRUNCATED_SHARE * samples:
        yield (
            "more than 1% of the records had a list that was longer than its maxLength and was cut: raise maxLength of "
            "the columns in spec.data.columns.lists"
        )


def _of_every_attempt(problem: str, checkpoint: str) -> str:
    """A problem with the files of a checkpoint, alike for each attempt, which has a folder of its own."""
    return problem.replace(f"/{checkpoint}/", "/*/")


def _wanted_bandwidth(state: JobState, seen: Observations, spec: TrainingJobSpec) -> str:
    """Returns the bandwidth per server at which a checkpoint would be written within the interval; empty if it is.

    Of the first checkpoint, only the size of the tables is known while it is being written, which it hardly exceeds.
    The bandwidth is a power of two, so that it does not change with each checkpoint.
    """
    interval = checkpoint_interval(state, spec)
    allowed = spec.checkpoint.bytes_per_second * interval
    if not allowed:
        return ""
    periodic = [one for one in state.checkpointings if one.purpose is CheckpointPurpose.PERIODIC]
    most = max([state.most_written, *(size for taking in periodic for size in taking.written.values())])
    if most > allowed and not state.most_written:
        most = max([most, *(one.server.table_bytes for one in seen.sightings.values() if one.server is not None)])
    return memory_quantity(1 << math.ceil(math.log2(most / interval))) if most > allowed else ""


def _only_label(window: ProgressiveWindow) -> int | None:
    """The label of all of the many latest samples; None if they have both, or are few."""
    ones, zeros = (int(counts.sum()) for counts in window.histograms())
    return int(zeros == 0) if ones + zeros >= _MANY_SAMPLES and not (ones and zeros) else None


def _are_sigmoids_of_probabilities(window: ProgressiveWindow) -> bool:
    """Whether all predictions are sigmoids of numbers from 0 to 1, unlike the share of positive labels."""
    if not window.slices:
        return False
    positives, negatives = window.histograms()
    total = positives + negatives
    count, edges = total.sum(), BINNED_LOGITS * (np.arange(len(total) + 1) / len(total) - 0.5)
    if count < _ENOUGH_SAMPLES or total[(edges[1:] <= 0) | (edges[:-1] > 1)].any():
        return False
    return not _OF_ZERO <= positives.sum() / count <= _OF_ONE
