"""The calibrator of hot rows beside the paper's figures (FAE, Adnan et al. 2022, figures 5 and 7 to 11).

Measures what a sample of 5% of the records costs and how far it is off, against counting all of them; what the profiler
saves with chunks of the logger; and what tagging costs next to reading. Without paths the data is the product's
synthetic one, with the columns and cardinalities of Criteo Kaggle.

What it does not show: the paper's data has 10 to 80 million records, and power laws that are estimated from nothing
here; the synthetic exponents are assumptions (see trainer/emberscale_trainer/data/population.py), so the
shares of hot accesses and samples say nothing about Criteo. Times are of one thread on data in the page cache, where
the paper has 16 cores; ratios of times are comparable, times are not. Text must be indexed before it can be sampled,
which reads all of it: that time is told apart, since a job needs the index anyway.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from emberscale._commands.layout import LayoutOptions, layout_of
from emberscale_api.pictures import BLUE, GREEN, GREY, ORANGE, PALE_GREY
from emberscale_api.readable import duration_text
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.hot.access import Accesses, AccessLog, log_accesses
from emberscale_trainer.hot.classifier import HotSet, InputProcessor, classify_rows
from emberscale_trainer.hot.optimizer import Calibration, calibrate_threshold
from emberscale_trainer.hot.profiler import SizeEstimate, TableProfile
from emberscale_trainer.hot.sampler import IndexedData, index_data, take_sample
from reporting import Ratio, arguments, report, say

SAMPLING_RATE = 0.05
"""x of the paper."""
ROW_BYTES = 80
"""The bytes of a row of 16 weights with row-wise Adagrad, as in the README's job."""
THRESHOLDS = tuple(10.0**-power for power in np.arange(2.0, 6.01, 0.5))
PAPER = {
    "sampling": "19x to 55x",
    "chunks": "14.5x to 61x",
    "interval": "within 10%",
    "tagging": "110 s at most, 16 cores, 80 M records",
}


@dataclass(frozen=True)
class AtThreshold:
    """Hot rows at one threshold: estimated from chunks of the full log, estimated from a sample, and counted."""

    threshold: float
    estimated: SizeEstimate
    sampled: int
    counted: int
    hot_accesses: float
    hot_samples: float
    tag_seconds: float


def silent(stage: str, done: int, total: int) -> None:
    """Reports no progress, since the clock runs."""


def count_all(data: IndexedData) -> list[AccessLog]:
    """Profiles all records, without sampling."""
    logs = [AccessLog() for _ in data.reader.columns.id_columns]
    for records in data.read(data.blocks, []):
        log_accesses(records, logs)
    return logs


def read_all(data: IndexedData, processor: InputProcessor | None) -> tuple[float, float, int]:
    """Reads all data; returns the seconds of reading and of tagging, and the number of all-hot records."""
    reading = tagging = 0.0
    hot = 0
    before = time.perf_counter()
    for records in data.read(data.blocks, []):
        read = time.perf_counter()
        reading += read - before
        if processor is not None:
            hot += int(processor.tag(records).sum())
        before = time.perf_counter()
        tagging += before - read
    return reading, tagging, hot


def rows_above(logs: Sequence[Accesses], threshold: float) -> int:
    """Counts the rows with at least `threshold` of their table's accesses."""
    return sum(int((log.counts >= threshold * log.total).sum()) for log in logs)


def at_threshold(
    data: IndexedData, full: Sequence[Accesses], sampled: Sequence[Accesses], threshold: float
) -> AtThreshold:
    """Measures one threshold for figures 5, 10 and 11; no table is hot as a whole."""
    profiles = [TableProfile.of(log, ROW_BYTES, np.random.default_rng(1)) for log in full]
    parts = [profile.hot_rows(threshold) for profile in profiles]
    estimated = SizeEstimate(sum(part.mean for part in parts), sum(part.half_width**2 for part in parts) ** 0.5)
    calibration = Calibration(1 << 62, threshold, frozenset())
    hot = classify_rows(full, [ROW_BYTES] * len(full), calibration)
    _, tagging, tagged = read_all(data, InputProcessor(hot, len(full)))
    accesses = float(np.mean([table.accesses for table in hot.tables]))
    return AtThreshold(
        threshold, estimated, rows_above(sampled, threshold), hot.rows, accesses, tagged / data.records, tagging
    )


def scan_seconds(logs: Sequence[Accesses], threshold: float) -> tuple[float, float]:
    """Returns the seconds to size the hot set from all entries of the large tables' logs, and from chunks."""
    profiles = [TableProfile.of(log, ROW_BYTES, np.random.default_rng(1)) for log in logs]
    large = [(profile, log) for profile, log in zip(profiles, logs, strict=True) if len(profile.chunks) > 1]
    if not large:
        return 1.0, 1.0
    begin = time.perf_counter()
    for profile, log in large:
        (log.counts >= profile.cutoff(threshold)).sum()
    between = time.perf_counter()
    for profile, _ in large:
        profile.hot_rows(threshold)
    return between - begin, time.perf_counter() - between


def hot_of(logs: Sequence[Accesses], budget: int) -> HotSet:
    """Returns the hot set of a budget."""
    profiles = [TableProfile.of(log, ROW_BYTES, np.random.default_rng(1)) for log in logs]
    return classify_rows(logs, [ROW_BYTES] * len(logs), calibrate_threshold(profiles, budget))


def coverage(hot: HotSet, full: Sequence[Accesses]) -> float:
    """Returns the ratio of all accesses that go to the rows of a hot set."""
    hit = sum(int(log.counts[np.isin(log.keys, table.keys)].sum()) for table, log in zip(hot.tables, full, strict=True))
    return hit / sum(log.total for log in full)


def draw(
    path: Path,
    points: Sequence[AtThreshold],
    logs: tuple[Sequence[Accesses], Sequence[Accesses]],
    ratios: dict[str, Ratio],
    share: float,
) -> None:
    """Draws the paper's figures, in its order."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    size, hot, curve, times, error, tagging = figure.subplots(2, 3).flat
    thresholds = [point.threshold for point in points]
    size.loglog(thresholds, [point.counted * ROW_BYTES / 2**20 for point in points], "o-", color=BLUE)
    size.set(title="Figure 5a: hot rows, MiB", xlabel="threshold t")
    hot.semilogx(thresholds, [point.hot_accesses for point in points], "o-", color=BLUE, label="accesses")
    hot.semilogx(thresholds, [point.hot_samples for point in points], "o-", color=GREEN, label="all-hot samples")
    hot.set(title="Figure 5b: share that is hot", xlabel="threshold t", ylim=(0, 1.02))
    hot.yaxis.set_major_formatter(PercentFormatter(1.0))
    hot.legend()
    draw_curve(curve, logs, share)
    names = [name for name in ratios if "seconds" in name]
    times.barh(range(len(names)), [ratios[name].median for name in names], color=BLUE, height=0.5)
    times.set_yticks(range(len(names)), ["figure 8: sampling", "figure 9: chunks"])
    for place, (low, high) in enumerate(((19, 55), (14.5, 61))):
        times.plot([low, high], [place, place], color=ORANGE, linewidth=4, label="paper" if place else None)
    times.set(title="Figures 8 and 9: times faster", xlabel="x")
    times.legend()
    shown = [point for point in points if point.counted]
    error.axhspan(-0.1, 0.1, color=PALE_GREY, label="paper: chunks within 10%")
    error.errorbar(
        [point.threshold for point in shown],
        [point.estimated.mean / point.counted - 1 for point in shown],
        yerr=[point.estimated.half_width / point.counted for point in shown],
        fmt="o-",
        color=BLUE,
        capsize=3,
        label="chunks, 99.9% interval",
    )
    error.plot(
        [point.threshold for point in shown],
        [point.sampled / point.counted - 1 for point in shown],
        "D--",
        color=ORANGE,
        label="sample of 5%",
    )
    error.set(title="Figure 10: error of the number of hot rows", xlabel="threshold t", xscale="log", ylim=(-1, 1))
    error.yaxis.set_major_formatter(PercentFormatter(1.0))
    error.legend()
    tagging.semilogx(thresholds, [point.tag_seconds for point in points], "o-", color=BLUE)
    tagging.set(title="Figure 11: seconds to tag all records", xlabel="threshold t")
    tagging.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def draw_curve(axes: Axes, logs: tuple[Sequence[Accesses], Sequence[Accesses]], share: float) -> None:
    """Draws figure 7: the largest table's accesses, from all records and from the sample."""
    largest = int(np.argmax([log.keys.size for log in logs[0]]))
    for log, scale, colour, label in (
        (logs[0][largest], 1.0, GREY, "all records"),
        (logs[1][largest], 1 / share, ORANGE, "sample, scaled"),
    ):
        falling = np.sort(log.counts)[::-1] * scale
        axes.loglog(np.arange(1, falling.size + 1), falling, color=colour, label=label)
    axes.set(title="Figure 7: accesses by row, largest table", xlabel="rows by falling accesses")
    axes.legend()


def main() -> None:
    """Counts and samples in turn, then walks through the thresholds."""
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", help="files, globs or URIs instead of synthetic data")
    parser.add_argument("--manifest", type=Path, help="a TrainingJob that says what the files are")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the synthetic data")
    parser.add_argument("--budget", type=int, default=4 << 20, help="bytes of hot rows to compare hot sets at")
    options = parser.parse_args()
    pairs = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            say(f"writing {options.rows:,} synthetic records")
            write_dataset(Path(folder, "data"), DatasetSpec(options.rows, seed=7, evaluation_fraction=0))
        files = expand(options.data or [f"{folder}/data/*.tsv"])
        layout = layout_of([file.uri for file in files], LayoutOptions(manifest=options.manifest))
        begin = time.perf_counter()
        data = index_data(files, layout.raw_reader(), silent)
        indexing = time.perf_counter() - begin
        take_sample(data, SAMPLING_RATE, 1, 9, silent)  # so that kernels are compiled
        sampling: list[tuple[float, float]] = []
        for number in range(pairs):
            begin = time.perf_counter()
            logs = count_all(data)
            between = time.perf_counter()
            sample = take_sample(data, SAMPLING_RATE, 1, number, silent)
            sampling.append((between - begin, time.perf_counter() - between))
        full, sampled = [log.entries() for log in logs], [log.entries() for log in sample.logs]
        say(
            f"{data.records:,} records, {sample.share:.1%} sampled; indexing took {duration_text(indexing)}, "
            "which both need"
        )
        say(
            f"all records: {duration_text(sampling[-1][0])}, sample: {duration_text(sampling[-1][1])} "
            f"(paper: {PAPER['sampling']})"
        )
        scans = [scan_seconds(full, THRESHOLDS[number % len(THRESHOLDS)]) for number in range(4 * pairs)][pairs:]
        points = [at_threshold(data, full, sampled, threshold) for threshold in THRESHOLDS]
        say("threshold   in the sample   hot rows   chunks' error   interval   sample's error   accesses   samples")
        for point in points:
            say(row(point, sum(log.total for log in sampled) / len(sampled)))
        middle = hot_of(full, options.budget)
        tagging = []
        for _ in range(pairs):
            reading, extra, _ = read_all(data, InputProcessor(middle, len(full)))
            tagging.append((reading, reading + extra))
        close = coverage(hot_of(sampled, options.budget), full), coverage(middle, full)
        say(f"accesses to the hot rows of {options.budget:,} bytes: {close[0]:.2%}, {close[1]:.2%} if all are counted")
        well_counted = [point for point in points if point.counted]
        ratios = {
            "profiling, seconds without sampling over with": Ratio(sampling, 19.0, "min"),
            "sizing a threshold, seconds of entries over chunks": Ratio(scans, 14.5, "min"),
            "hot rows, upper end of the chunks' interval over count": Ratio(
                [(point.estimated.upper, point.counted) for point in well_counted], 1.1, "max"
            ),
            "accesses to the hot set, sample over full profile": Ratio([close], 0.99, "min"),
            "reading and tagging over reading, records/s": Ratio(tagging, 0.5, "min"),
        }
        if options.plot:
            draw(options.plot, points, (full, sampled), ratios, sample.share)
    report("hot_calibrator", ratios, options.output)


def row(point: AtThreshold, accesses: float) -> str:
    """Returns a line of the table; errors are relative to the counted rows."""
    chunks = point.estimated.mean / point.counted - 1 if point.counted else 0.0
    interval = point.estimated.half_width / point.counted if point.counted else 0.0
    sampled = point.sampled / point.counted - 1 if point.counted else 0.0
    return (
        f"{point.threshold:9.1e} {point.threshold * accesses:15.1f} {point.counted:10,} {chunks:15.1%} "
        f"{interval:10.1%} {sampled:16.1%} {point.hot_accesses:10.1%} {point.hot_samples:9.1%}"
    )


if __name__ == "__main__":
    main()
