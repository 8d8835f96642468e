import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from emberscale_api.job.status import EVALUATION_BINS
from emberscale_jobmaster.statistics import Tally, auc

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@given(COUNTS, st.randoms())
def test_the_histogram_gives_the_auc_of_its_samples(positives: list[int], random: object) -> None:
    negatives = positives[::-1]
    scores = [*np.repeat(range(len(positives)), positives), *np.repeat(range(len(negatives)), negatives)]
    labels = [1] * sum(positives) + [0] * sum(negatives)
    if not sum(positives):
        assert math.isnan(auc(positives, negatives))
    else:
        assert auc(positives, negatives) == pytest.approx(roc_auc_score(labels, scores))


def test_sixteen_thousand_bins_are_exact_to_a_millionth() -> None:
    generator = np.random.default_rng(3)
    labels = generator.random(200_000) < 0.25
    scores = np.clip(generator.normal(0.3 + 0.1 * labels, 0.15), 0, 1)
    bins = np.minimum((scores * EVALUATION_BINS).astype(int), EVALUATION_BINS - 1)

    found = auc(
        np.bincount(bins[labels], minlength=EVALUATION_BINS), np.bincount(bins[~labels], minlength=EVALUATION_BINS)
    )

    assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)


def test_merged_shards_measure_what_all_samples_together_do() -> None:
    generator = np.random.default_rng(5)
    labels = generator.random(3000) < 0.3
    scores = np.clip(generator.normal(0.25 + 0.2 * labels, 0.1), 0.01, 0.99)
    tally = Tally()
    for part in np.array_split(np.arange(3000), 4):
        bins = (scores[part] * EVALUATION_BINS).astype(int)
        ones, truth = scores[part], labels[part]
        tally = tally.merge(
            Tally(
                samples=len(part),
                loss_sum=float(-np.log(np.where(truth, ones, 1 - ones)).sum()),
                prediction_sum=float(ones.sum()),
                label_sum=int(truth.sum()),
                positives=tuple(np.bincount(bins[truth], minlength=EVALUATION_BINS).tolist()),
                negatives=tuple(np.bincount(bins[~truth], minlength=EVALUATION_BINS).tolist()),
            )
        )

    result = tally.result(epoch=2)

    base = labels.mean()
    assert (result.epoch, result.samples) == (2, 3000)
    assert result.auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-4)
    assert result.logloss == pytest.approx(log_loss(labels, scores))
    assert result.normalized_entropy == pytest.approx(
        log_loss(labels, scores) / -(base * math.log(base) + (1 - base) * math.log(1 - base))
    )
    assert result.calibration == pytest.approx(scores.sum() / labels.sum())


def test_an_evaluation_of_one_label_only_has_no_auc() -> None:
    result = Tally(samples=4, loss_sum=1.0, prediction_sum=1.0, label_sum=0).result(epoch=1)
    assert result.auc is None
    assert result.normalized_entropy is None
    assert result.calibration is None
    assert result.logloss == 0.25
