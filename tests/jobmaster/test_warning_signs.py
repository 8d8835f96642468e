"""Each sign is told when it holds, and only then."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.pure import Pure

from emberscale_api.job.status import PROGRESS_BINS, EvaluationResult
from emberscale_jobmaster import lifecycle
from emberscale_jobmaster.checkpointing import SAVE_SECONDS
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import CHECKPOINT_NOT_WRITTEN, CheckpointPurpose
from emberscale_jobmaster.retry import Trouble
from emberscale_jobmaster.statistics import ProgressiveWindow
from emberscale_jobmaster.warning_signs import warning_signs
from emberscale_trainer.worker.statistics import add_to_histogram

NOTHING = Observations()


def trained(**sections: Any) -> Pure:
    pure = Pure(**sections)
    pure.start_training(records=1000)
    pure.train_epoch()
    return pure


def evaluated(normalized_entropy: float) -> EvaluationResult:
    return EvaluationResult(
        epoch=1, samples=100, auc=0.6, logloss=0.5, normalized_entropy=normalized_entropy, calibration=1.0
    )


def predicted(logits: np.ndarray[Any, Any], positive: float) -> Observations:
    """A window of predictions, `positive` of which have the label 1, as a worker counts them."""
    counts = np.zeros((2, PROGRESS_BINS), np.int64)
    probabilities = (1 / (1 + np.exp(-logits))).astype(np.float32)
    labels = np.arange(len(logits)) % 20 < 20 * positive
    add_to_histogram(probabilities, labels.astype(np.float32), counts)
    zeros, ones = counts.tolist()
    return replace(NOTHING, window=ProgressiveWindow().add(len(logits), 1.0, ones, zeros, 0))


def test_a_job_that_goes_well_has_no_warnings() -> None:
    pure = trained()
    state = replace(pure.state, evaluations=(evaluated(0.8),))
    assert warning_signs(state, predicted(np.linspace(-5, 1, 5000), 0.25), pure.spec) == ()


@pytest.mark.parametrize(("entropy", "told"), [(0.999, False), (1.0, False), (1.001, True), (12.3, True)])
def test_an_evaluation_worse_than_the_mean_label_is_told(entropy: float, told: bool) -> None:
    pure = trained()
    signs = warning_signs(replace(pure.state, evaluations=(evaluated(entropy),)), NOTHING, pure.spec)
    assert ["denseTransform" in sign for sign in signs] == [True] * told
    assert ["worse than always predicting the mean label" in sign for sign in signs] == [True] * told


def test_an_evaluation_whose_labels_are_all_alike_is_told() -> None:
    pure = trained()
    alike = EvaluationResult(epoch=1, samples=100, logloss=0.1)
    (sign,) = warning_signs(replace(pure.state, evaluations=(alike,)), NOTHING, pure.spec)
    assert sign.startswith("all records of spec.data.evaluation have the same label, so there is no AUC")
    empty = alike.model_copy(update={"samples": 0})
    assert warning_signs(replace(pure.state, evaluations=(empty,)), NOTHING, pure.spec) == ()


@pytest.mark.parametrize(
    ("samples", "positive", "told"), [(20_000, 0, "0"), (20_000, 1, "1"), (20_000, 0.05, ""), (2_000, 0, "")]
)
def test_training_data_whose_labels_are_all_alike_is_told(samples: int, positive: float, told: str) -> None:
    pure = trained()
    signs = warning_signs(pure.state, predicted(np.linspace(-5, 1, samples), positive), pure.spec)
    assert [f"all samples trained lately have the label {told}:" in sign for sign in signs] == [True] * bool(told)


def test_a_model_that_was_better_before_overfits_and_says_which_epoch_was_best() -> None:
    pure = trained()
    results = [evaluated(entropy).model_copy(update={"epoch": n}) for n, entropy in enumerate((0.9, 0.8, 1.2, 1.3), 1)]
    told = {warning_signs(replace(pure.state, evaluations=(*results[:n],)), NOTHING, pure.spec) for n in (3, 4)}
    ((sign,),) = told  # it stays the same
    assert "after epoch 2 it was best, so the model overfits: train with spec.training.epochs 2, or export" in sign


def test_a_checkpoint_that_cannot_be_written_is_told_alike_at_each_attempt() -> None:
    pure = trained()
    signs: set[str] = set()
    for attempt in range(2, 5):
        folder = f"{attempt:08}"
        problem = f"ps-0 wrote nothing for 1m: /2026/11112222/{folder}/ps-0/table-3-0.rows: No space left on device"
        trouble = Trouble(CHECKPOINT_NOT_WRITTEN, problem, 0.0, next_at=1.0, attempts=attempt, checkpoint=folder)
        signs.update(warning_signs(pure.state.troubled(CheckpointPurpose.PERIODIC, trouble), NOTHING, pure.spec))
    assert signs == {
        "no new checkpoint was taken, and training continues: ps-0 wrote nothing for 1m: "
        "/2026/11112222/*/ps-0/table-3-0.rows: No space left on device"
    }


def test_a_checkpoint_whose_files_make_no_progress_is_told_until_one_is_taken() -> None:
    driven = Driven(interval=20.0)
    driven.start()
    driven.train(3)
    driven.faults["Saved", 0] = Fault(hangs=True, times=100)
    driven.pass_time(20 + SAVE_SECONDS + 10)
    (sign,) = warning_signs(driven.job, NOTHING, driven.spec)
    assert sign.startswith("no new checkpoint was taken, and training continues: ps-0 wrote nothing for 1m")
    assert driven.job.troubles[CheckpointPurpose.PERIODIC].checkpoint == "00000001"
    driven.faults.clear()
    driven.pass_time(60)
    assert driven.job.checkpoint
    assert warning_signs(driven.job, NOTHING, driven.spec) == ()


def test_what_keeps_the_last_checkpoint_from_being_written_is_told_at_once() -> None:
    driven = Driven(interval=20.0)
    driven.start()
    driven.train(3)
    driven.faults["Saved", 0] = Fault(hangs=True, times=100)
    driven.suspend()
    signs: set[str] = set()
    for _ in range(2):
        (taking,) = driven.job.checkpointings
        problem = f"/full/{taking.checkpoint}/ps-0/table-3-0.rows: No space left on device; trying again"
        state = driven.job.having(replace(taking, problems={0: "", 1: problem}))
        signs.update(warning_signs(state, NOTHING, driven.spec))
        driven.pass_time(SAVE_SECONDS + 2)
    assert signs == {
        "the checkpoint to end with is not written yet: /full/*/ps-0/table-3-0.rows: No space left on device; trying "
        "again"
    }


def test_a_barrier_that_fails_is_repeated_without_a_warning() -> None:
    driven = Driven(interval=20.0)
    driven.start()
    driven.train(3)
    driven.faults["Snapshot", 0] = Fault(code="FAILED_PRECONDITION")
    driven.pass_time(21)
    assert CheckpointPurpose.PERIODIC in driven.job.troubles
    assert warning_signs(driven.job, NOTHING, driven.spec) == ()


def test_a_batch_that_is_larger_than_the_data_is_told_once_the_data_is_known() -> None:
    pure = Pure(training={"batchSize": 5000})
    assert warning_signs(pure.state, NOTHING, pure.spec) == ()
    pure.start_training(records=1000)
    (sign,) = warning_signs(pure.state, NOTHING, pure.spec)
    assert "spec.training.batchSize is 5,000 and the training data has 1,000 records" in sign


def test_more_than_a_hundredth_of_records_with_lists_cut_is_told() -> None:
    pure = trained()
    few = lifecycle.count_truncated(pure.state, 10)
    assert warning_signs(few, NOTHING, pure.spec) == ()
    (sign,) = warning_signs(lifecycle.count_truncated(few, 1), NOTHING, pure.spec)
    assert "more than 1% of the records" in sign
    assert "raise maxLength" in sign
    assert warning_signs(lifecycle.count_truncated(few, 500), NOTHING, pure.spec) == (sign,)


@pytest.mark.parametrize(
    ("entrypoint", "logits", "positive", "told"),
    [
        ("own:model", np.linspace(0, 1, 5000), 0.25, True),
        ("own:model", np.linspace(-0.1, 1, 5000), 0.25, False),
        ("own:model", np.linspace(0, 1, 5000), 0.6, False),
        ("own:model", np.linspace(0, 1, 500), 0.25, False),
        (None, np.linspace(0, 1, 5000), 0.25, False),
    ],
)
def test_a_model_of_ones_own_that_seems_to_return_probabilities_is_told(
    entrypoint: str | None, logits: np.ndarray[Any, Any], positive: float, told: bool
) -> None:
    pure = trained(**({"model": {"entrypoint": entrypoint}} if entrypoint else {}))
    signs = warning_signs(pure.state, predicted(logits, positive), pure.spec)
    assert ["own:model seems to return probabilities" in sign for sign in signs] == [True] * told


def test_files_that_are_trained_on_and_evaluated_are_told() -> None:
    pure = trained()
    (file,) = pure.state.training_files
    other = replace(file, uri="other.tsv")
    assert warning_signs(replace(pure.state, evaluation_files=(other,)), NOTHING, pure.spec) == ()
    (sign,) = warning_signs(replace(pure.state, evaluation_files=(other, file)), NOTHING, pure.spec)
    assert f"has 1 of the files that are trained on, such as {file.uri}:" in sign


def test_damaged_checkpoints_are_told() -> None:
    pure = trained()
    damaged = {"00000002": "00000002/ps-0: was altered", "00000001": "00000001: is missing"}
    state = replace(pure.state, damaged=damaged)
    assert [sign.rpartition(": ")[0] for sign in warning_signs(state, NOTHING, pure.spec)] == [
        "a damaged checkpoint was skipped, and an older one or none is used: 00000002/ps-0",
        "a damaged checkpoint was skipped, and an older one or none is used: 00000001",
    ]
