"""Quantised embedding vectors: how far they are from the trained ones, by method, and how fast they are made.

Draws figures 5, 6 and 7 of Check-N-Run (section 4.2) on the rows of a DLRM that is first trained here: a job on a
million synthetic records (200,000 with --quick), whose last checkpoint is read as a server reads it. The rows of all
tables are one sample.

* Loss: the mean over the rows of the l2 distance between weights and quantised weights; of symmetric and asymmetric
  quantisation, of the adaptive asymmetric one by the paper's greedy search and as the product does it, and, as the
  reference, of k-means for each vector: 15 iterations from random weights of the vector, as in the paper, which itself
  finds that worse than asymmetric quantisation with 4 bits. So beside it, 15 from evenly spaced values of the vector's
  range: a better k-means, which loses no more than asymmetric quantisation. Most rows have had few gradients.
* Bins and ratio: what the greedy search gains over the asymmetric method, by its two parameters.
* Speed: megabytes of weights a second that one thread turns into the rows of a checkpoint, with keys, optimizer state
  and counts, by its own CPU time, the methods in turns. k-means gets a part of the rows, and only their weights. It is
  Lloyd's algorithm, compiled as the others are, with 15 iterations for each vector; beside it, the same until no weight
  changes its cluster, which costs no loss, and scikit-learn's, which stops likewise. None of them makes use of the fact
  that weights have one dimension, or of vector instructions. What scikit-learn takes is the cost of a call a vector.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from emberscale_trainer.checkpoint import CheckpointFiles, read_records
from emberscale_trainer.checkpoint.files import PartitionFile
from emberscale_trainer.table import PackedRows, RowLayout
from emberscale_trainer.table.quantization import QUANTIZERS, Quantizer
from references import PAPER_QUANTIZERS
from reporting import Ratio, arguments, report, say
from whole_run import manifest, run, synthesise

Vectors = NDArray[np.float32]
Rows = NDArray[Any]
"""Vectors, or records that contain them."""

DIMENSION = 64
"""The paper's dimension (section 2.1)."""

ROWS, KMEANS_ROWS, LIBRARY_ROWS = 200_000, 4_000, 100
KMEANS_ITERATIONS = 15
TURNS = 7
BINS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LIBRARY = "k-means of scikit-learn"
STOPPING = "k-means until nothing changes"
EVEN = "k-means from even values"
METHODS = ("symmetric", "asymmetric", "greedy search", "adaptive asymmetric", "k-means per vector")
SYMMETRIC, ASYMMETRIC, GREEDY, ADAPTIVE, K_MEANS = METHODS
LAYOUT = RowLayout(DIMENSION, 1)
"""The layout of rows with row-wise Adagrad."""

WITHIN, FASTER, SPEED = 1.1, 50.0, 300.0


def trained_rows(folder: Path, records: int) -> Vectors:
    """Trains a DLRM in `folder`; returns its embedding vectors, float32 [n, DIMENSION]."""
    synthesise(folder / "data", records)
    checkpoints = folder / "checkpoints"
    spec: dict[str, Any] = {
        "data": {
            "train": [str(folder / "data/train-*.tsv")],
            "evaluation": [str(folder / "data/evaluation.tsv")],
        },
        "model": {"architecture": "DLRM", "embeddings": {"dimension": DIMENSION}},
        "training": {"batchSize": 2048, "epochs": 2},
        "checkpoint": {"uri": str(checkpoints)},
    }
    auc = run(manifest("quantisation", spec))["auc"]
    files = CheckpointFiles(str(max(checkpoints.iterdir())))
    found = []
    for index in files.manifest.servers:
        part = files.parse(f"ps-{index}/partition.json", PartitionFile)
        for table in part.tables:
            layout = table.layout
            found += [layout.fields(records)["weights"].copy() for records in read_records(files, part, table)]
    rows = np.concatenate(found)
    say(f"trained a DLRM on {records:,} records to an AUC of {auc:.4f}: {len(rows):,} rows of {DIMENSION}")
    return rows


def records_of(vectors: Vectors) -> NDArray[np.uint8]:
    """Returns rows with these weights, random keys, and long-tailed numbers of pushes."""
    random = np.random.default_rng(1)
    records = LAYOUT.empty(len(vectors))
    fields = LAYOUT.fields(records)
    fields["weights"] = vectors
    fields["key"] = random.integers(-(2**63), 2**63, len(vectors))
    fields["state"] = random.random((len(vectors), 1))
    fields["pushes"] = random.zipf(1.5, len(vectors)).clip(1, 2**31)
    return records


def restored(vectors: Vectors, quantizer: Quantizer) -> Vectors:
    """Returns the vectors as a checkpoint restores them."""
    packed = PackedRows(quantizer, LAYOUT)
    weights: Vectors = LAYOUT.fields(next(packed.unpack(packed.pack(records_of(vectors)))))["weights"]
    return weights


def quantizer_of(method: str, bits: int) -> Quantizer:
    """Returns the quantiser of a method other than k-means; at 8 bits, searches have the settings of 4 bits."""
    if method == GREEDY:
        return PAPER_QUANTIZERS[bits] if bits < 8 else replace(PAPER_QUANTIZERS[4], bits=8)
    if method == ADAPTIVE:
        return QUANTIZERS[bits] if bits < 8 else replace(QUANTIZERS[4], bits=8)
    return Quantizer(bits, symmetric=method == SYMMETRIC)


@numba.njit("f4[:, ::1](f4[:, ::1], i8, i8, i8, b1, b1)", nogil=True, cache=True)
def k_means(vectors, clusters, iterations, seed, stops, even):  # type: ignore[no-untyped-def]  # Numba infers them
    """Each vector with its weights replaced by the centroids of their clusters; Numba types this from the signature.

    With `stops`, a vector gets no more iterations once none of its weights changes its cluster. Centroids begin at
    random weights of the vector or, with `even`, evenly spaced from its smallest weight to its largest.
    """
    np.random.seed(seed)
    count, dimension = vectors.shape
    result = np.empty_like(vectors)
    centroids = np.empty(clusters, np.float32)
    sums = np.empty(clusters, np.float32)
    sizes = np.empty(clusters, np.int64)
    nearest = np.empty(dimension, np.int64)
    chosen = np.arange(dimension)
    for row in range(count):
        vector = vectors[row]
        nearest[:] = -1
        if even:
            low, high = vector.min(), vector.max()
            for cluster in range(clusters):
                centroids[cluster] = low + (high - low) * np.float32(cluster) / np.float32(clusters - 1)
        else:
            for cluster in range(clusters):
                other = np.random.randint(cluster, dimension)
                chosen[cluster], chosen[other] = chosen[other], chosen[cluster]
                centroids[cluster] = vector[chosen[cluster]]
        for _ in range(iterations + 1):
            changed = 0
            sums[:] = 0
            sizes[:] = 0
            for element in range(dimension):
                best, place = np.float32(np.inf), 0
                for cluster in range(clusters):
                    distance = abs(vector[element] - centroids[cluster])
                    if distance < best:
                        best, place = distance, cluster
                changed += nearest[element] != place
                nearest[element] = place
                sums[place] += vector[element]
                sizes[place] += 1
            for cluster in range(clusters):
                if sizes[cluster]:
                    centroids[cluster] = sums[cluster] / sizes[cluster]
            if stops and not changed:
                break
        for element in range(dimension):
            result[row, element] = centroids[nearest[element]]
    return result


def _k_means(vectors: Vectors, bits: int, *, stops: bool = False, even: bool = False) -> Vectors:
    found: Vectors = k_means(vectors, 1 << bits, KMEANS_ITERATIONS, 1, stops, even)
    return found


def library_k_means(vectors: Vectors, clusters: int) -> None:
    """Clusters the weights of each vector with scikit-learn."""
    for vector in vectors:
        KMeans(clusters, init="random", n_init=1, max_iter=KMEANS_ITERATIONS, random_state=1).fit(vector[:, None])


def loss(vectors: Vectors, quantised: Vectors) -> float:
    """Returns the mean l2 loss (section 4.2)."""
    return float(np.linalg.norm(vectors - quantised, axis=1).mean())


def losses(vectors: Vectors) -> dict[str, dict[int, float]]:
    """Returns the losses of figure 5, by method and bits. At 8 bits, k-means would have more clusters than weights."""
    found: dict[str, dict[int, float]] = {
        method: {bits: loss(vectors, restored(vectors, quantizer_of(method, bits))) for bits in QUANTIZERS}
        for method in METHODS[:-1]
    }
    for name in (K_MEANS, EVEN):
        found[name] = {bits: loss(vectors, _k_means(vectors, bits, even=name == EVEN)) for bits in (2, 3, 4)}
    return found


def gain(vectors: Vectors, naive: float, quantizer: Quantizer) -> float:
    """Returns the gain of the search over asymmetric quantisation, in percent of the latter's loss."""
    return 100 * (1 - loss(vectors, restored(vectors, quantizer)) / naive)


def speeds(vectors: Vectors, turns: int) -> dict[tuple[str, int], list[float]]:
    """Measures the MB per second of CPU time by method and bits, one number per turn."""
    measured: dict[tuple[str, int], list[float]] = {}

    def time_one(key: tuple[str, int], rows: Rows, quantise: Callable[[Rows], object]) -> None:
        began = time.thread_time()
        quantise(rows)
        taken = time.thread_time() - began
        measured.setdefault(key, []).append(len(rows) * 4 * DIMENSION / 1e6 / taken)

    records = records_of(vectors)

    for _ in range(turns):
        for bits in QUANTIZERS:
            for method in METHODS[:-1]:
                time_one((method, bits), records, PackedRows(quantizer_of(method, bits), LAYOUT).pack)
            if bits < 8:
                for name in (K_MEANS, STOPPING):
                    time_one((name, bits), vectors[:KMEANS_ROWS], partial(_k_means, bits=bits, stops=name == STOPPING))
                time_one((LIBRARY, bits), vectors[:LIBRARY_ROWS], partial(library_k_means, clusters=1 << bits))
    return measured


def draw(
    path: Path,
    lost: dict[str, dict[int, float]],
    by_bins: dict[int, list[float]],
    by_ratio: dict[int, list[float]],
    fast: dict[tuple[str, int], list[float]],
) -> None:
    """Draws figures 5, 6 and 7, and the speeds."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    (of_loss, of_speed), (of_bins, of_ratio) = figure.subplots(2, 2)
    for axis, title, heights in (
        (of_loss, "Mean l2 loss (figure 5)", lost),
        (
            of_speed,
            "MB/s of float32, one core",
            {method: {bits: float(np.median(fast[method, bits])) for bits in lost[method]} for method in METHODS},
        ),
    ):
        for number, method in enumerate(METHODS):
            places = [place + 0.17 * (number - 2) for place in range(len(heights[method]))]
            axis.bar(places, list(heights[method].values()), 0.17, label=method)
        axis.set_xticks(range(len(QUANTIZERS)), [f"{bits} bits" for bits in QUANTIZERS])
        axis.set(yscale="log", title=title)
        axis.legend(fontsize="small")
    of_speed.axhline(SPEED, linestyle="--", color="black")
    sweeps: list[tuple[Any, Sequence[float], dict[int, list[float]], str, str]] = [
        (of_bins, BINS, by_bins, "Greedy search: gain by bins, ratio 1 (figure 6)", "bins"),
        (of_ratio, RATIOS, by_ratio, "Greedy search: gain by ratio (figure 7)", "ratio of the range"),
    ]
    for sweep, settings, gains, title, label in sweeps:
        for bits, values in gains.items():
            (line,) = sweep.plot(settings, values, marker=".", label=f"{bits} bits")
            chosen = PAPER_QUANTIZERS[bits].bins if sweep is of_bins else PAPER_QUANTIZERS[bits].ratio
            sweep.axvline(chosen, linestyle=":", color=line.get_color())
        sweep.set(title=title, xlabel=f"{label} (dotted: the paper's)", ylabel="lower mean l2 loss, %")
        sweep.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains, measures and reports."""
    options = arguments(__doc__).parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # for vectors with fewer distinct weights than clusters
    with tempfile.TemporaryDirectory() as folder:
        rows = trained_rows(Path(folder), 200_000 if options.quick else 1_000_000)
    random = np.random.default_rng(0)
    rows = np.ascontiguousarray(rows[random.permutation(len(rows))[:ROWS]])
    sample = rows[: ROWS // 10]
    lost = losses(sample)
    for method, values in lost.items():
        shown = ", ".join(f"{bits} bits {value:.5f}" for bits, value in values.items())
        say(f"mean l2 loss, {method}: {shown}")
    by_bins: dict[int, list[float]] = {}
    by_ratio: dict[int, list[float]] = {}
    for bits in (2, 3, 4):
        naive = lost[ASYMMETRIC][bits]
        by_bins[bits] = [gain(sample, naive, Quantizer(bits, bins=bins, ratio=1.0)) for bins in BINS]
        bins = PAPER_QUANTIZERS[bits].bins
        by_ratio[bits] = [gain(sample, naive, Quantizer(bits, bins=bins, ratio=ratio)) for ratio in RATIOS]
        say(f"{bits} bits, gain over asymmetric by bins: " + _pairs(BINS, by_bins[bits]))
        say(f"{bits} bits, by ratio with {bins} bins: " + _pairs(RATIOS, by_ratio[bits]))
    speeds(sample, 1)  # so that kernels are compiled and data is in memory
    fast = speeds(rows, 3 if options.quick else TURNS)
    for method in (*METHODS, STOPPING, LIBRARY):
        shown = ", ".join(
            f"{bits} bits {np.median(values):,.2f}" for (of, bits), values in fast.items() if of == method
        )
        say(f"MB/s a core, {method}: {shown}")
    if options.plot:
        draw(options.plot, lost, by_bins, by_ratio, fast)
    ratios = {}
    for bits in (2, 3, 4):
        for name, within in ((K_MEANS, WITHIN), (EVEN, WITHIN), (GREEDY, 1.0)):
            pair = lost[ADAPTIVE][bits], lost[name][bits]
            ratios[f"loss, adaptive / {name}, {bits} bits"] = Ratio([pair], within, "max")
        for name in (LIBRARY, K_MEANS, STOPPING):
            pairs = list(zip(fast[ADAPTIVE, bits], fast[name, bits], strict=True))
            ratios[f"speed, adaptive / {name}, {bits} bits"] = Ratio(pairs, FASTER, "min")
    for bits in QUANTIZERS:
        method = ADAPTIVE if bits < 8 else ASYMMETRIC
        ratios[f"speed, {method}, {bits} bits / 300 MB/s"] = Ratio(
            [(speed, SPEED) for speed in fast[method, bits]], 1.0, "min"
        )
    report("quantisation", ratios, options.output)


def _pairs(places: Sequence[float], gains: list[float]) -> str:
    return ", ".join(f"{place:g} {gained:.1f}%" for place, gained in zip(places, gains, strict=True))


if __name__ == "__main__":
    main()
