"""Weights as codes of a few bits: how far off they are restored, and what is refused."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from emberscale_api.errors import InvalidError
from emberscale_trainer.table import PackedRows, RowLayout
from emberscale_trainer.table.quantization import QUANTIZERS, Quantizer
from packed_rows import unpacked
from references import PAPER_QUANTIZERS

MOST = float(np.finfo(np.float32).max) / 4
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
NAIVE = [Quantizer(bits, symmetric) for bits in range(1, 9) for symmetric in (False, True)]
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 19))
FINITE = st.floats(-MOST, MOST, width=32)
SIMILAR = st.floats(-1, 1, width=32)


def vectors(elements: st.SearchStrategy[float] = FINITE | SIMILAR) -> st.SearchStrategy[NDArray[np.float32]]:
    return arrays.arrays(np.float32, SHAPES, elements=elements)


def records_of(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Returns rows with these weights and nothing else."""
    layout = RowLayout(weights.shape[1], 0)
    records = layout.empty(len(weights))
    layout.fields(records)["weights"] = weights
    return records


def restored(weights: NDArray[np.float32], quantizer: Quantizer) -> NDArray[np.float32]:
    layout = RowLayout(weights.shape[1], 0)
    packed = PackedRows(quantizer, layout)
    found: NDArray[np.float32] = layout.fields(unpacked(packed, packed.pack(records_of(weights))))["weights"]
    return found


def errors(weights: NDArray[np.float32], quantizer: Quantizer) -> NDArray[np.float64]:
    """Returns the l2 error of each vector."""
    difference = weights.astype(np.float64) - restored(weights, quantizer).astype(np.float64)
    return np.asarray(np.sqrt((difference**2).sum(axis=1)))


def rounding(weights: NDArray[np.float32], levels: int) -> NDArray[np.float64]:
    """Returns the rounding error of float32 for a row: some last bits of the largest magnitude, and denormal steps."""
    largest: NDArray[np.float64] = np.abs(weights.astype(np.float64)).max(axis=1)
    return largest * 2**-20 + levels * SMALLEST


@given(vectors(), st.sampled_from(NAIVE))
@example(np.array([[0.81032014, 0]], np.float32), Quantizer(1, symmetric=True))
def test_no_weight_is_further_off_than_half_a_step(weights: NDArray[np.float32], quantizer: Quantizer) -> None:
    wide = weights.astype(np.float64)
    span = wide.max(axis=1) - wide.min(axis=1)
    if quantizer.symmetric:
        span = 2 * np.abs(wide).max(axis=1)
    levels = 2**quantizer.bits - 1
    step = span / levels * (1 + 1 / 16 / levels)  # a range that is stored as float16 is up to this much wider
    allowed = step / 2 + rounding(weights, levels)
    assert (np.abs(wide - restored(weights, quantizer)) <= allowed[:, None]).all()


@given(vectors(), st.sampled_from([2, 3, 4]))
def test_the_search_never_makes_an_error_larger(weights: NDArray[np.float32], bits: int) -> None:
    naive, adaptive = errors(weights, Quantizer(bits)), errors(weights, QUANTIZERS[bits])
    allowed = rounding(weights, 2**bits) * weights.shape[1]
    assert (adaptive <= naive * (1 + 1e-5) + allowed).all()


def greedy(weights: NDArray[np.float32], quantizer: Quantizer) -> float:
    """Returns the smallest l2 error on the path of the paper's search, for one vector."""

    def error(low: float, high: float) -> float:
        step = (high - low) / (2**quantizer.bits - 1)
        codes = np.round((np.clip(wide, low, high) - low) / step)
        return float(np.linalg.norm(wide - (low + codes * step)))

    wide = weights.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    bin_width = (high - low) / quantizer.bins
    best = error(low, high)
    for _ in range(quantizer.cuts):
        above, below = error(low + bin_width, high), error(low, high - bin_width)
        low, high = (low + bin_width, high) if above < below else (low, high - bin_width)
        best = min(best, above, below)
    return best


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dimension", [3, 8, 16, 37])
def test_the_search_finds_what_the_papers_finds(bits: int, dimension: int) -> None:
    weights = np.random.default_rng(dimension).standard_t(3, (200, dimension)).astype(np.float32)
    weights[0] *= 1e9  # so that ranges are stored as float32
    expected = np.array([greedy(vector, PAPER_QUANTIZERS[bits]) for vector in weights])
    found = errors(weights, PAPER_QUANTIZERS[bits])
    # now and then, float32 breaks a tie differently, and the search takes another path
    assert np.mean(np.isclose(found, expected, rtol=1e-4)) > 0.95
    assert np.mean(found[1:]) == pytest.approx(np.mean(expected[1:]), rel=0.005)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dimension", [8, 16, 37, 64])
@pytest.mark.parametrize("law", ["standard_normal", "uniform", "laplace"])
def test_checkpoints_are_no_further_off_than_the_papers_search(bits: int, dimension: int, law: str) -> None:
    random = np.random.default_rng(dimension)
    weights = np.asarray(getattr(random, law)(size=(2000, dimension)), np.float32)
    assert errors(weights, QUANTIZERS[bits]).mean() <= 1.005 * errors(weights, PAPER_QUANTIZERS[bits]).mean()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dimension", [2, 5, 16, 64])
def test_fitting_makes_no_error_larger(bits: int, dimension: int) -> None:
    weights = np.random.default_rng(dimension).standard_t(3, (500, dimension)).astype(np.float32)
    weights[0] *= 1e9
    quantizer = QUANTIZERS[bits]
    fitted, searched = errors(weights, quantizer), errors(weights, replace(quantizer, fits=0))
    assert (fitted <= searched * (1 + 1e-5) + rounding(weights, 2**bits) * dimension).all()
    assert dimension < 5 or fitted.mean() < searched.mean()


def test_a_vector_with_an_outlier_gains_from_the_search() -> None:
    weights = np.linspace(-0.01, 0.01, 64, dtype=np.float32)[None].copy()
    weights[0, 5] = 0.03
    assert errors(weights, QUANTIZERS[2])[0] < 0.9 * errors(weights, Quantizer(2))[0]


@given(st.integers(1, 40), FINITE, st.sampled_from([2, 3, 4, 8]))
def test_a_constant_vector_comes_back_exactly(dimension: int, value: float, bits: int) -> None:
    weights = np.full((3, dimension), value, np.float32)
    assert restored(weights, QUANTIZERS[bits]).tobytes() == (weights + np.float32(0)).tobytes()


@pytest.mark.parametrize("quantizer", [*QUANTIZERS.values(), *NAIVE])
def test_zeros_and_denormals_stay_small(quantizer: Quantizer) -> None:
    weights = np.zeros((9, 11), np.float32)
    weights[4] = np.arange(11) * SMALLEST
    back = restored(weights, quantizer)
    assert not np.delete(back, 4, axis=0).any()
    assert np.abs(back[4]).max() <= 300 * SMALLEST


@given(vectors(SIMILAR), st.sampled_from([2, 3, 4, 8]))
def test_quantising_again_what_was_quantised_moves_it_by_no_more_than_a_step(
    weights: NDArray[np.float32], bits: int
) -> None:
    once = restored(weights, Quantizer(bits))
    span = np.ptp(weights.astype(np.float64), axis=1)[:, None]
    assert (np.abs(once - restored(once, Quantizer(bits))) <= span / (2**bits - 1) + 1e-6).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dimension", [16, 64])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_rows_that_nobody_trains_come_back_the_same_however_often_they_are_restored(
    bits: int, dimension: int, scale: float
) -> None:
    weights = scale * np.random.default_rng(bits).standard_normal((2000, dimension)).astype(np.float32)
    once = restored(weights, QUANTIZERS[bits])
    assert np.array_equal(restored(once, QUANTIZERS[bits]), once)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantizer", [*QUANTIZERS.values(), Quantizer(4, symmetric=True)])
@pytest.mark.parametrize("row", range(10))
def test_weights_that_are_not_finite_are_refused(value: float, quantizer: Quantizer, row: int) -> None:
    weights = np.ones((10, 5), np.float32)
    weights[row, 4] = value
    with pytest.raises(InvalidError, match="quantised"):
        restored(weights, quantizer)


def test_weights_too_far_apart_are_refused() -> None:
    largest = np.finfo(np.float32).max
    with pytest.raises(InvalidError, match="quantised"):
        restored(np.array([[-largest, largest]], np.float32), QUANTIZERS[8])
