"""How fast records become batches, against the fastest plain code: polars for TSV, pyarrow and torch for Parquet.

Both sides make the same tensors: labels float32[n], log1p(max(x, 0)) of 13 integers as float32[n, 13], and 26 ids as
int64[n, 26], hexadecimal in the TSV, all contiguous. The benchmark checks that they are equal before it measures. Ours
does more on the way: it indexes the file anew each time, and shuffles as training does.

* TSV: polars is given its best among eager and lazy reading, either engine, and integers read as int64 or as float32.
* Parquet: pyarrow reads row groups, torch stacks the columns and picks the same shuffled records into the same batches.

Speed is records per second of CPU time, all threads counted, so threads bring no advantage; each side is limited to
one. The file is in the page cache.
"""

import os

os.environ["POLARS_MAX_THREADS"] = "1"  # polars reads this on import
os.environ["OMP_NUM_THREADS"] = "1"

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import torch
from matplotlib.figure import Figure

from emberscale_api.dataset import Dataset, Split
from emberscale_api.job import CSVSpec, DataFormat
from emberscale_api.job.resolved import CRITEO_COLUMNS
from emberscale_api.pictures import GREY, ORANGE
from emberscale_api.readable import rate_text
from emberscale_trainer.data.convert import Conversion, convert_files
from emberscale_trainer.data.files import Target, expand
from emberscale_trainer.data.formats import format_reader
from emberscale_trainer.data.order import EpochOrder
from emberscale_trainer.data.source import BatchSource
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from reporting import Ratio, arguments, report, say

BATCH = 2048
BLOCK = 32_768
SEED = 1
DENSE, IDS, LABEL = list(CRITEO_COLUMNS.dense), list(CRITEO_COLUMNS.categorical), CRITEO_COLUMNS.label
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def emberscale(path: Path, data_format: DataFormat, shuffle: bool = True) -> Iterator[Tensors]:
    """Yields the batches that a worker trains on."""
    reader = format_reader(data_format, CRITEO_COLUMNS, CSVSpec())
    files = expand([str(path)])
    dataset = Dataset(tuple(files), tuple(reader.index_file(files[0], 0, BLOCK)))
    source = BatchSource(dataset, reader, BATCH, SEED, shuffle)
    for batch in source.batches(Split.TRAINING, 0, 0, source.records(Split.TRAINING)):
        yield torch.from_numpy(batch.labels), torch.from_numpy(batch.dense), torch.from_numpy(batch.ids)


def polars(path: Path, engine: str | None, integers: type[pl.DataType]) -> Iterator[Tensors]:
    """Yields the whole file at once, in its order; `engine` None reads eagerly."""
    schema: dict[str, type[pl.DataType]] = {LABEL: pl.Float32}
    schema |= dict.fromkeys(DENSE, integers) | dict.fromkeys(IDS, pl.String)
    features = [
        pl.col(LABEL),
        *(pl.col(name).clip(lower_bound=0).cast(pl.Float32).log1p().fill_null(0.0) for name in DENSE),
        *(pl.col(name).str.to_integer(base=16, dtype=pl.Int64).fill_null(-1) for name in IDS),
    ]
    if engine is None:
        frame = pl.read_csv(path, separator="\t", has_header=False, schema=schema).select(features)
    else:
        scan = pl.scan_csv(path, separator="\t", has_header=False, schema=schema).select(features)
        frame = scan.collect(engine=engine)  # type: ignore[call-overload]  # one of its engines
    yield (
        torch.from_numpy(frame[LABEL].to_numpy(writable=True)),
        torch.from_numpy(frame.select(DENSE).to_numpy(order="c", writable=True)),
        torch.from_numpy(frame.select(IDS).to_numpy(order="c", writable=True)),
    )


def arrow_and_torch(path: Path) -> Iterator[Tensors]:
    """Yields batches from row groups in the order of the epoch, with records shuffled in the same way."""
    file = pq.ParquetFile(path)
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    order = EpochOrder(sizes, SEED, 0, True)
    rest: list[Tensors] = []
    held = 0
    for span in order.spans(0, order.records):
        table = file.read_row_group(span.block, columns=[LABEL, *DENSE, *IDS], use_threads=False)

        def column(name: str, missing: int, table: object = table) -> torch.Tensor:
            values = table.column(name)  # type: ignore[attr-defined]  # pyarrow has no types
            return torch.from_numpy((values.fill_null(missing) if values.null_count else values).to_numpy())

        shuffled = torch.from_numpy(order.permutation(span.block))
        labels = column(LABEL, 0).float()
        dense = torch.stack([column(name, 0).float() for name in DENSE], 1).clamp_(min=0).log1p_()
        ids = torch.stack([column(name, -1) for name in IDS], 1)
        place = 0
        while place < len(shuffled):
            chosen = shuffled[place : place + BATCH - held]
            rest.append((labels[chosen], dense[chosen], ids[chosen]))
            held += len(chosen)
            place += len(chosen)
            if held == BATCH:
                yield _joined(rest)
                rest, held = [], 0
    if held:
        yield _joined(rest)


def _joined(parts: list[Tensors]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    labels, dense, ids = (torch.cat(part) for part in zip(*parts, strict=True))
    return labels, dense, ids


def speed(batches: Callable[[], Iterator[Tensors]]) -> float:
    """Returns the records per second of CPU time."""
    started = time.process_time()
    records = sum(len(labels) for labels, _, _ in batches())
    return records / (time.process_time() - started)


def check(ours: Iterator[Tensors], theirs: Iterator[Tensors]) -> None:
    """Raises AssertionError unless all records are the same, in the same order."""
    one, other = (_joined(list(batches)) for batches in (ours, theirs))
    for name, first, second in zip(("labels", "dense", "ids"), one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=0, msg=f"{name} differ")
        if not (first.is_contiguous() and second.is_contiguous()):
            raise AssertionError(f"{name} are not contiguous")


def draw(path: Path, speeds: dict[str, list[float]]) -> None:
    """Draws one bar per side, with the single measurements."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axis = figure.subplots()
    for place, (name, values) in enumerate(speeds.items()):
        axis.barh(place, np.median(values) / 1e6, color=ORANGE if name.startswith("Emberscale") else GREY)
        axis.plot(np.array(values) / 1e6, [place] * len(values), "k|")
    axis.set_yticks(range(len(speeds)), list(speeds))
    axis.invert_yaxis()
    axis.set_xlabel("million records per second of CPU time, to contiguous tensors (13 numbers, 26 ids)")
    figure.savefig(path, dpi=120)


def measure(
    pairs: int, ours: Callable[[], Iterator[Tensors]], theirs: Callable[[], Iterator[Tensors]]
) -> list[tuple[float, float]]:
    """Measures both sides alternately, and begins with each in turn."""
    found = []
    for number in range(pairs):
        if number % 2:
            reference, own = speed(theirs), speed(ours)
        else:
            own, reference = speed(ours), speed(theirs)
        found.append((own, reference))
    return found


def main() -> None:
    """Writes the data, checks that both sides agree, and measures them in turn."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is never written to
    pairs = 5 if options.quick else 9
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing {options.rows:,} records")
        write_dataset(Path(folder, "data"), DatasetSpec(options.rows, SEED, evaluation_fraction=0))
        tsv, parquet = Path(folder, "data", "train-00000.tsv"), Path(folder, "train.parquet")
        conversion = Conversion((Target.of(str(parquet)),), DataFormat.PARQUET, CSVSpec(), "zstd", 0)
        convert_files(
            expand([str(tsv)]), format_reader(DataFormat.CRITEO_TSV, CRITEO_COLUMNS, CSVSpec(), True), conversion
        )
        choices = [(engine, kind) for engine in (None, "in-memory", "streaming") for kind in (pl.Int64, pl.Float32)]
        check(emberscale(tsv, DataFormat.CRITEO_TSV, shuffle=False), polars(tsv, "streaming", pl.Float32))
        check(emberscale(parquet, DataFormat.PARQUET), arrow_and_torch(parquet))
        say("both sides make the same tensors")
        tried = {choice: max(speed(partial(polars, tsv, *choice)) for _ in range(2)) for choice in choices}
        best = max(tried, key=lambda choice: tried[choice])
        say(
            f"polars is fastest with {best[0] or 'eager'} reading, integers as {best[1].__name__}: "
            f"{rate_text(tried[best])}"
        )
        tsv_pairs = measure(pairs, lambda: emberscale(tsv, DataFormat.CRITEO_TSV), lambda: polars(tsv, *best))
        parquet_pairs = measure(
            pairs, lambda: emberscale(parquet, DataFormat.PARQUET), lambda: arrow_and_torch(parquet)
        )
    sides: dict[str, list[float]] = {
        "Emberscale, Criteo TSV": [own for own, _ in tsv_pairs],
        "polars, Criteo TSV": [other for _, other in tsv_pairs],
        "Emberscale, Parquet": [own for own, _ in parquet_pairs],
        "pyarrow + torch, Parquet": [other for _, other in parquet_pairs],
    }
    for name, values in sides.items():
        say(f"{name}: {np.median(values):,.0f} records per second of CPU time")
    if options.plot:
        draw(options.plot, sides)
    report(
        "ingest",
        {
            "Criteo TSV, records/s per core, against polars": Ratio(tsv_pairs, 1.0, "min"),
            "Parquet, records/s per core, against pyarrow + torch": Ratio(parquet_pairs, 1.0, "min"),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
