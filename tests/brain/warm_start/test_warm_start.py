"""First shapes from past jobs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.planner.types import JobId, JobMetadata, PastJob, ShapeBounds
from emberscale_brain.warm_start import HistoryIndex, NewJob, describe, smooth, warm_start, within

CTR = JobMetadata(
    architecture="DLRM",
    batch_size=512,
    dense_bytes=4 << 20,
    embedding_dimension=416,
    tables=26,
    total_samples=10**8,
    name="ctr-home-20240301",
    data_bytes=40 * GIB,
)
BIG = JobMetadata(
    architecture="xDeepFM",
    batch_size=4096,
    dense_bytes=400 << 20,
    embedding_dimension=6400,
    tables=200,
    total_samples=10**10,
    name="video-rank",
    data_bytes=4000 * GIB,
)
SMALL_SHAPE = JobShape(4, 2, 4, 2, 4 * GIB, 8 * GIB)
BIG_SHAPE = JobShape(24, 12, 8, 6, 16 * GIB, 64 * GIB)


def past(name: str, metadata: JobMetadata, shape: JobShape, owner: str = "ads", finished_at: float = 0.0) -> PastJob:
    return PastJob(JobId(name), owner, metadata, shape, finished_at=finished_at)


HISTORY = (
    past("monday", CTR, SMALL_SHAPE, finished_at=1),
    past("tuesday", replace(CTR, name="ctr-home-20240302", total_samples=12 * 10**7), replace(SMALL_SHAPE, workers=6)),
    past("video", BIG, BIG_SHAPE, owner="video"),
)


def start(metadata: JobMetadata, owner: str = "ads", history: tuple[PastJob, ...] = HISTORY) -> JobShape:
    return warm_start(NewJob(owner, metadata), ShapeBounds(), HistoryIndex(history), neighbours=5, mu=0.5).shape


def test_a_job_that_comes_again_starts_like_the_last_time() -> None:
    assert start(replace(CTR, name="ctr-home-20240303")) == replace(SMALL_SHAPE, workers=5)
    assert start(BIG, "video") == BIG_SHAPE


def test_memory_is_that_of_the_largest_tables_among_similar_jobs_and_grows_with_the_samples() -> None:
    larger = past("wednesday", CTR, replace(SMALL_SHAPE, ps_memory=24 * GIB), finished_at=0)
    first = start(CTR, history=(HISTORY[0], larger))
    assert first.ps * first.ps_memory >= SMALL_SHAPE.ps * 24 * GIB
    longer = start(replace(CTR, total_samples=2 * CTR.total_samples), history=HISTORY[:1])
    assert 1.3 * SMALL_SHAPE.ps_memory < longer.ps_memory < 2 * SMALL_SHAPE.ps_memory


def test_the_most_similar_job_has_the_last_word() -> None:
    shapes = [replace(SMALL_SHAPE, workers=workers) for workers in (1, 9, 17)]
    assert smooth(shapes, mu=0.5).workers == 11  # ((1 + 9) / 2 + 17) / 2
    assert smooth(shapes, mu=1.0).workers == 17


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            JobShape,
            st.integers(1, 100),
            st.integers(1, 50),
            st.floats(0.5, 32),
            st.floats(0.5, 32),
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 40),
        ),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.05, 1),
)
def test_a_smoothed_shape_lies_between_those_it_comes_from(shapes: list[JobShape], mu: float) -> None:
    smoothed = smooth(shapes, mu)
    for name in ("workers", "ps", "worker_cpu", "ps_cpu"):
        values = [getattr(shape, name) for shape in shapes]
        assert min(values) * (1 - 1e-9) <= getattr(smoothed, name) <= max(values) * (1 + 1e-9)


def test_dissimilar_jobs_do_not_dilute_a_job_that_is_the_same() -> None:
    others = tuple(past(f"other{i}", replace(BIG, architecture="DLRM"), BIG_SHAPE) for i in range(20))
    assert start(CTR, history=(HISTORY[0], *others)) == SMALL_SHAPE


def test_a_job_like_no_other_starts_cold_and_says_so() -> None:
    strange = replace(BIG, architecture="DCN", name="x")
    cold = warm_start(NewJob("ads", strange), ShapeBounds(), HistoryIndex(HISTORY[:2]), neighbours=5, mu=0.5)
    assert cold.similar == ()
    assert "cold start" in cold.reason
    assert "the most similar of 2 is tuesday" in cold.reason, "its data is nearer in size"
    nothing = warm_start(NewJob("new", strange), ShapeBounds(), HistoryIndex(()), neighbours=5, mu=0.5)
    assert "no history" in nothing.reason


def test_bounds_hold_for_a_first_shape() -> None:
    bounds = ShapeBounds(workers=(1, 3), ps=(4, 8), worker_cpu=(0.5, 1.5), cpu_step=0.5)
    shape = warm_start(NewJob("ads", CTR), bounds, HistoryIndex(HISTORY), neighbours=5, mu=0.5).shape
    assert bounds.contains(shape)
    assert (shape.workers, shape.ps, shape.worker_cpu) == (3, 4, 1.5)


def test_similarity_is_explained_feature_by_feature() -> None:
    new = NewJob("search", replace(CTR, batch_size=1024, name="ctr-feed"))
    (_, similar), *_ = HistoryIndex(HISTORY).rank(new, 3)
    assert similar.features["batch size"] == 0.5
    assert similar.features["owner"] == 0
    assert similar.features["name"] == pytest.approx(1 / 3)
    text = describe(similar)
    assert "same architecture" in text
    assert "owner (0% alike)" in text


def test_past_jobs_of_other_owners_are_not_named() -> None:
    """All owners benefit from their shapes, but may not read who ran which job."""
    theirs = warm_start(NewJob("search", CTR), ShapeBounds(), HistoryIndex(HISTORY), neighbours=5, mu=0.5)
    assert theirs.similar
    assert {similar.id for similar in theirs.similar} == {None}
    assert "a job of another owner" in theirs.reason
    assert not any(past.id in theirs.reason for past in HISTORY)
    own = warm_start(NewJob("ads", CTR), ShapeBounds(), HistoryIndex(HISTORY), neighbours=5, mu=0.5)
    assert own.similar[0].id is not None
    assert own.similar[0].id in own.reason


def test_identical_jobs_are_wholly_similar_and_the_latest_comes_first() -> None:
    twins = (past("early", CTR, SMALL_SHAPE, finished_at=1), past("late", CTR, SMALL_SHAPE, finished_at=2))
    ranked = HistoryIndex(twins).rank(NewJob("ads", CTR), 2)
    assert [similar.id for _, similar in ranked] == ["late", "early"]
    assert ranked[0][1].similarity == pytest.approx(1)


def test_cores_at_a_lower_bound_that_is_no_multiple_of_the_step_stay_there() -> None:
    bounds = ShapeBounds(worker_cpu=(1.7, 4.0), ps_cpu=(0.25, 4.0), cpu_step=1.0)
    least = JobShape(1, 1, 1.7, 0.25, GIB, GIB)
    assert within(least, bounds) == least
    assert within(replace(least, worker_cpu=1.9, ps_cpu=0.7), bounds) == replace(least, worker_cpu=2.0, ps_cpu=1.0)
