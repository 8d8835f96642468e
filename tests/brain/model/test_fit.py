"""The fit of the throughput model to profiles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.model.fit import first_prior, fit_window
from emberscale_brain.model.predict import Coefficients, ModelConstants, features, shape_features, throughput
from emberscale_brain.model.prior import similar_prior, weak_prior
from emberscale_brain.model.window import PROFILES_PER_SHAPE, SHAPES, ProfileWindow, problem_with
from emberscale_brain.planner.types import ThroughputFit
from eventually import unwrap
from references import fit_profiles

PAPER = (3.48, 2.36, 0.68, 2.45, 2.45, 0.0)  # DLRover-RM section 6.2, in the order of COEFFICIENTS
UNITS = ModelConstants(batch_size=1, dense_bytes=1, embedding_dimension=1, network_bytes_per_second=1)


def rmsle(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((np.log(predicted) - np.log(measured)) ** 2)))


def random_shapes(count: int, seed: int) -> list[JobShape]:
    random = np.random.default_rng(seed)
    return [
        JobShape(
            workers=int(random.integers(1, 17)),
            ps=int(random.integers(1, 9)),
            worker_cpu=float(random.integers(1, 9)),
            ps_cpu=float(random.integers(1, 9)),
            worker_memory=0,
            ps_memory=0,
        )
        for _ in range(count)
    ]


NOW = 1e9
ONE_SHAPE = JobShape(workers=4, ps=2, worker_cpu=4, ps_cpu=4, worker_memory=0, ps_memory=0)


def profiles_of(
    shapes: list[JobShape],
    coefficients: tuple[float, ...] = PAPER,
    repeats: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    outliers: float = 0.0,
    start: float = 0.0,
) -> tuple[JobProfile, ...]:
    """Returns profiles of every shape, each measured `repeats` times."""
    random = np.random.default_rng(seed)
    profiles = []
    for number, shape in enumerate(shape for shape in shapes for _ in range(repeats)):
        seconds = float(shape_features(UNITS, shape) @ np.array(coefficients))
        seconds *= float(np.exp(noise * random.standard_normal()))
        if random.random() < outliers:
            seconds *= float(random.uniform(2, 6))
        profiles.append(
            JobProfile(
                time=start + 30.0 * (number + 1),
                shape=shape,
                batch_size=1,
                iteration_seconds=seconds,
                throughput=shape.workers / seconds,
            )
        )
    return tuple(profiles)


def grid() -> NDArray[np.float64]:
    axes = np.meshgrid(np.arange(1, 17), np.arange(1, 9), np.arange(1, 9), np.arange(1, 9), indexing="ij")
    return features(UNITS, *axes).reshape(-1, 6)


def relative_errors(fit: ThroughputFit, coefficients: tuple[float, ...] = PAPER) -> NDArray[np.float64]:
    x = grid()
    errors: NDArray[np.float64] = Coefficients.of(fit).iteration_seconds(x) / (x @ np.array(coefficients)) - 1
    return errors


def fitted(profiles: tuple[JobProfile, ...]) -> ThroughputFit:
    return unwrap(fit_profiles(profiles, UNITS, NOW))


@pytest.mark.parametrize("seed", range(8))
def test_the_papers_coefficients_predict_within_two_percent_at_five_percent_noise(seed: int) -> None:
    fit = fitted(profiles_of(random_shapes(24, seed), repeats=20, noise=0.05, seed=seed))
    assert np.sqrt(np.mean(relative_errors(fit) ** 2)) < 0.02
    assert fit.noise == pytest.approx(0.05, rel=0.2)


@settings(max_examples=40)
@given(st.tuples(*[st.floats(0.05, 20)] * 6), st.integers(0, 10_000))
def test_exact_profiles_of_varied_shapes_are_reproduced(coefficients: tuple[float, ...], seed: int) -> None:
    shapes = random_shapes(16, seed)
    x = features(UNITS, *(np.array([getattr(s, n) for s in shapes]) for n in ("workers", "ps", "worker_cpu", "ps_cpu")))
    seconds = x @ np.array(coefficients)
    profiles = tuple(
        JobProfile(30.0 * i, shape, 1, float(t), shape.workers / float(t))
        for i, (shape, t) in enumerate(zip(shapes, seconds, strict=True), start=1)
    )
    fit = fitted(profiles)
    assert rmsle(Coefficients.of(fit).iteration_seconds(x), seconds) < 0.02
    assert min(fit.coefficients) >= 0


@pytest.mark.parametrize("seed", range(4))
def test_what_every_server_does_for_each_batch_is_not_divided_among_more_of_them(seed: int) -> None:
    asked = (3.48, 0.0, 0.0, 0.0, 2.45, 2.36)
    fit = fitted(profiles_of(random_shapes(24, seed), asked, repeats=10, noise=0.05, seed=seed))
    busy = JobShape(workers=16, ps=1, worker_cpu=8, ps_cpu=1, worker_memory=0, ps_memory=0)
    alone, shared = (throughput(UNITS, fit, replace(busy, ps=ps))[0] for ps in (1, 8))
    assert shared / alone == pytest.approx(1, abs=0.05)
    assert np.sqrt(np.mean(relative_errors(fit, asked) ** 2)) < 0.03


OVERLAPPING = Coefficients(np.array((*PAPER[:5], 0.5)), np.zeros((6, 6)), overlap=4.0)


def overlapping_profiles(count: int, seed: int) -> tuple[JobProfile, ...]:
    """Returns profiles of a job whose workers practically wait only for the longest term."""
    random = np.random.default_rng(seed)
    made = []
    for number, shape in enumerate(shape for shape in random_shapes(count, seed) for _ in range(6)):
        seconds = float(OVERLAPPING.iteration_seconds(shape_features(UNITS, shape)))
        seconds *= float(np.exp(0.03 * random.standard_normal()))
        made.append(JobProfile(30.0 * (number + 1), shape, 1, seconds, shape.workers / seconds))
    return tuple(made)


@pytest.mark.parametrize("seed", range(4))
def test_terms_that_overlap_are_found_out(seed: int) -> None:
    fit = fitted(overlapping_profiles(24, seed))
    assert 3 <= fit.overlap <= 6
    assert rmsle(Coefficients.of(fit).iteration_seconds(grid()), OVERLAPPING.iteration_seconds(grid())) < 0.04


@pytest.mark.parametrize("seed", range(4))
def test_terms_that_follow_each_other_are_not_said_to_overlap(seed: int) -> None:
    assert fitted(profiles_of(random_shapes(24, seed), repeats=6, noise=0.03, seed=seed)).overlap == 1


def test_too_few_shapes_to_tell_leave_what_was_believed() -> None:
    profiles = overlapping_profiles(5, 0)
    known = fitted(overlapping_profiles(24, 1))
    assert fitted(profiles).overlap == 1
    prior = similar_prior([known, replace(known, overlap=1.0)], [0.9, 0.6], shape_features(UNITS, ONE_SHAPE))
    fit = unwrap(fit_profiles(profiles, UNITS, NOW, prior))
    assert fit.overlap == known.overlap
    assert rmsle(Coefficients.of(fit).iteration_seconds(grid()), OVERLAPPING.iteration_seconds(grid())) < 0.1


def used_profiles(shapes: list[JobShape], model: Coefficients) -> tuple[JobProfile, ...]:
    """Returns three profiles of each shape, with the shares of their cores that workers and PS compute on."""
    made = []
    for number, shape in enumerate(shape for shape in shapes for _ in range(3)):
        x = shape_features(UNITS, shape)
        seconds = float(model.iteration_seconds(x))
        computing = x * model.mean / seconds
        made.append(
            JobProfile(
                time=30.0 * (number + 1),
                shape=shape,
                batch_size=1,
                iteration_seconds=seconds,
                throughput=shape.workers / seconds,
                worker_cpu_utilization=min(1.0, float(computing[0])),
                ps_cpu_utilization=min(1.0, float(computing[1] + computing[5])),
            )
        )
    return tuple(made)


@pytest.mark.parametrize("overlap", [1.0, 2.0, 8.0])
def test_processor_times_tell_what_other_cores_would_bring_before_they_are_tried(overlap: float) -> None:
    """A job in one shape of one worker and one PS; how far its speed depends on the cores of each is not measured."""
    model = Coefficients(np.array([3.0, 2.0, 0.0, 0.0, 0.0, 0.0]), np.zeros((6, 6)), overlap)
    one = JobShape(1, 1, 1, 1, 0, 0)
    fit = fitted(used_profiles([one], model))
    for shape in (replace(one, worker_cpu=2), replace(one, ps_cpu=2), replace(one, worker_cpu=6, ps_cpu=4)):
        expected = float(model.iteration_seconds(shape_features(UNITS, shape)))
        told = float(Coefficients.of(fit).iteration_seconds(shape_features(UNITS, shape)))
        assert told == pytest.approx(expected, rel=0.1), shape


def test_processor_times_of_other_numbers_of_servers_tell_what_each_server_does_for_every_batch() -> None:
    model = Coefficients(np.array([3.0, 2.0, 0.0, 0.0, 0.0, 1.0]), np.zeros((6, 6)), 4.0)
    profiles = used_profiles([JobShape(2, ps, 2, 4, 0, 0) for ps in (1, 2)], model)
    prior = unwrap(first_prior(profiles, ProfileWindow().add(profiles, NOW), UNITS))
    assert prior.mean[[1, 5]] == pytest.approx([2.0, 1.0], rel=0.1)


def test_a_job_that_waits_for_its_data_expects_nothing_of_more_servers() -> None:
    model = Coefficients(np.array([0.1, 0.05, 0.0, 0.0, 0.85, 0.0]), np.zeros((6, 6)))
    stages = {"read": 0.95, "pull": 0.05, "compute": 0.1, "push": 0.05, "wait_read": 0.85}  # of threads that overlap
    waits = (replace(profile, stage_fractions=stages) for profile in used_profiles([JobShape(1, 1, 1, 1, 0, 0)], model))
    told = Coefficients.of(fitted(tuple(waits))).iteration_seconds(shape_features(UNITS, JobShape(1, 4, 1, 1, 0, 0)))
    assert float(told) == pytest.approx(0.96, rel=0.05)


def test_profiles_without_processor_times_are_split_by_stages() -> None:
    used = used_profiles([ONE_SHAPE], OVERLAPPING)
    without = tuple(replace(profile, ps_cpu_utilization=0.0) for profile in used)
    assert fitted(without) == fitted(tuple(replace(profile, worker_cpu_utilization=0.0) for profile in without))
    assert fitted(without).overlap == 1


@given(st.floats(1, 8), st.integers(0, 100))
def test_slopes_say_how_the_time_moves_with_each_coefficient(overlap: float, seed: int) -> None:
    x = shape_features(UNITS, random_shapes(1, seed)[0])
    model = replace(OVERLAPPING, overlap=overlap)
    assert model.slopes(x) @ model.mean == pytest.approx(float(model.iteration_seconds(x)))
    for index, slope in enumerate(model.slopes(x)):
        step = np.zeros(6)
        step[index] = 1e-6
        up, down = (replace(model, mean=model.mean + sign * step).iteration_seconds(x) for sign in (1, -1))
        assert float(up - down) / 2e-6 == pytest.approx(float(slope), rel=1e-3, abs=1e-6)


@settings(max_examples=25)
@given(st.floats(1e-4, 1e4), st.integers(0, 1000))
def test_the_unit_of_time_does_not_matter(factor: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = random_shapes(10, seed)
    seconds = random.uniform(1, 10, 10)
    one, other = (
        tuple(
            JobProfile(30.0 * i, shape, 1, float(t * scale), shape.workers / float(t * scale))
            for i, (shape, t) in enumerate(zip(shapes, seconds, strict=True), start=1)
        )
        for scale in (1.0, factor)
    )
    assert np.array(fitted(other).coefficients) / factor == pytest.approx(fitted(one).coefficients, rel=1e-3, abs=1e-4)


def test_a_tenth_of_the_profiles_being_stragglers_does_not_move_the_fit() -> None:
    shapes = random_shapes(24, 3)
    clean = fitted(profiles_of(shapes, repeats=20, noise=0.05, seed=3))
    dirty = fitted(profiles_of(shapes, repeats=20, noise=0.05, seed=3, outliers=0.1))
    assert dirty.outliers > 30
    assert np.abs(relative_errors(dirty) - relative_errors(clean)).max() < 0.03


def test_outliers_at_shapes_measured_once_are_set_aside() -> None:
    fit = fitted(profiles_of(random_shapes(32, 5), repeats=1, noise=0.02, seed=5, outliers=0.12))
    assert fit.outliers >= 2
    assert np.sqrt(np.mean(relative_errors(fit) ** 2)) < 0.05


def test_profiles_of_a_restart_do_not_count() -> None:
    good = profiles_of(random_shapes(12, 1), repeats=2)
    bad = tuple(
        replace(p, restarted=True, throughput=p.throughput / 9) for p in profiles_of([ONE_SHAPE], repeats=20, start=1e5)
    )
    assert fitted(good + bad).coefficients == fitted(good).coefficients


def test_many_profiles_of_one_shape_do_not_drown_few_of_others() -> None:
    others = random_shapes(8, 7)
    few = profiles_of(others, repeats=3, noise=0.01)
    many = profiles_of([ONE_SHAPE], repeats=32, noise=0.01, start=2e3)
    slower = tuple(replace(p, throughput=p.throughput / 1.2) for p in many)  # the model does not hold at this shape
    x = features(UNITS, *(np.array([getattr(s, n) for s in others]) for n in ("workers", "ps", "worker_cpu", "ps_cpu")))
    fit = fitted(few + slower)
    assert rmsle(Coefficients.of(fit).iteration_seconds(x), x @ np.array(PAPER)) < 0.05


def test_a_job_that_never_varied_its_shape_leans_on_similar_jobs() -> None:
    past = [fitted(profiles_of(random_shapes(24, seed), repeats=10, noise=0.05, seed=seed)) for seed in range(3)]
    at = features(UNITS, 4, 2, 4, 4)
    prior = similar_prior(past, [0.95, 0.9, 0.8], at)
    profiles = profiles_of([ONE_SHAPE], coefficients=tuple(1.3 * c for c in PAPER), repeats=10, noise=0.05)
    with_prior = unwrap(fit_profiles(profiles, UNITS, NOW, prior))
    truth = tuple(1.3 * c for c in PAPER)
    alone = fitted(profiles)
    assert np.abs(relative_errors(with_prior, truth)).max() < 0.25 < np.abs(relative_errors(alone, truth)).max()
    assert with_prior.prior_share > 0.5


def test_own_measurements_outweigh_a_wrong_prior() -> None:
    wrong = fitted(profiles_of(random_shapes(24, 0), coefficients=(0.5, 9.0, 3.0, 0.5, 9.0, 0.5), repeats=10))
    prior = similar_prior([wrong], [0.7], features(UNITS, 4, 2, 4, 4))
    fit = unwrap(fit_profiles(profiles_of(random_shapes(24, 2), repeats=20, noise=0.05), UNITS, NOW, prior))
    assert np.sqrt(np.mean(relative_errors(fit) ** 2)) < 0.03
    assert fit.prior_share < 0.1


def test_a_job_that_has_not_run_is_predicted_by_its_prior_alone() -> None:
    prior = weak_prior(features(UNITS, 4, 2, 4, 4), 10.0)
    fit = unwrap(fit_profiles((), UNITS, NOW, prior))
    assert throughput(UNITS, fit, ONE_SHAPE)[0] == pytest.approx(4 / 10.0)
    assert fit.prior_share == 1
    assert fit_profiles((), UNITS, NOW) is None


def test_nine_of_ten_ninety_percent_intervals_hold_the_truth() -> None:
    inside = []
    x = grid()
    for seed in range(40):
        fit = fitted(profiles_of(random_shapes(12, seed), repeats=3, noise=0.05, seed=seed))
        inside.append(np.mean(np.abs(relative_errors(fit)) < 1.645 * Coefficients.of(fit).uncertainty(x)))
    assert 0.8 < np.mean(inside) < 0.98


def test_a_fit_is_surer_near_what_was_measured_and_with_more_shapes() -> None:
    one = fitted(profiles_of([ONE_SHAPE], repeats=20, noise=0.05))
    many = fitted(profiles_of([ONE_SHAPE, *random_shapes(11, 0)], repeats=20, noise=0.05))
    far = replace(ONE_SHAPE, workers=16, ps=1, worker_cpu=1)
    assert throughput(UNITS, one, ONE_SHAPE)[1] < 0.05 < 0.3 < throughput(UNITS, one, far)[1]
    assert throughput(UNITS, many, far)[1] < throughput(UNITS, one, far)[1] / 5


def test_adding_profiles_one_by_one_is_the_same_as_all_at_once() -> None:
    profiles = profiles_of(random_shapes(9, 4), repeats=6, noise=0.05, outliers=0.1)
    window = ProfileWindow()
    for profile in profiles:
        window = window.add([profile], NOW)
    at_once = ProfileWindow().add(profiles, NOW)
    prior = weak_prior(features(UNITS, 4, 2, 4, 4), 5.0)
    assert fit_window(window, UNITS, prior) == fit_window(at_once, UNITS, prior)
    assert window.add(profiles, NOW) == window


def test_a_window_forgets_the_oldest_profiles_and_shapes() -> None:
    window = ProfileWindow().add(profiles_of([ONE_SHAPE], repeats=PROFILES_PER_SHAPE + 10), NOW)
    assert window.profiles == PROFILES_PER_SHAPE
    shapes = [replace(ONE_SHAPE, workers=workers) for workers in range(1, SHAPES + 6)]
    window = ProfileWindow().add(profiles_of(shapes), NOW)
    assert [summary.key[0] for summary in window.shapes.values()] == list(range(6, SHAPES + 6))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("throughput", float("nan"), "throughput is not finite"),
        ("throughput", -1.0, "throughput is not above 0"),
        ("iteration_seconds", float("inf"), "iteration_seconds is not finite"),
        ("time", NOW + 60, "in the future"),
        ("time", float("nan"), "time is not finite"),
        ("samples", -5, "samples is out of range"),
        ("batch_size", 0, "batch_size is out of range"),
        ("ps_cpu_utilization", float("nan"), "ps_cpu_utilization is not a share"),
    ],
)
def test_a_profile_that_cannot_be_true_is_refused_and_in_no_fit(field: str, value: float, says: str) -> None:
    good = profiles_of(random_shapes(6, 0), repeats=2)
    bad = replace(good[-1], time=1e6)
    bad = replace(bad, **{field: value})  # type: ignore[arg-type]  # the fields have several types
    problem = unwrap(problem_with(bad, NOW))
    assert says in problem
    assert ProfileWindow().add([*good, bad], NOW) == ProfileWindow().add(good, NOW)
