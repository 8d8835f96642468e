"""A synthetic data set as a folder: `train-00000.tsv`, ..., `evaluation.tsv` and `metadata.json`; or other formats.

The folder appears whole or not at all: files are written to a hidden folder beside it, which is renamed at the end.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import CSVSpec, DataFormat
from emberscale_api.job.resolved import CRITEO_CATEGORICAL, CRITEO_COLUMNS
from emberscale_trainer.data.calibration import RankStatistics
from emberscale_trainer.data.population import CATEGORICAL, Population, Rows, SeenIds
from emberscale_trainer.data.records import Columns
from emberscale_trainer.data.writers import MISSING_INTEGER, ROW_GROUP_RECORDS, criteo_lines, open_writer

METADATA = "metadata.json"
GENERATOR = 1
"""The version of the rows, raised whenever the same parameters give other bytes."""

CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """A data set: `rows` in total, the last `evaluation_fraction` of them held out, the others in `parts` files.

    In every format, the columns are those of Criteo. Raises InvalidError for impossible numbers.
    """

    rows: int
    seed: int = 0
    parts: int = 1
    evaluation_fraction: float = 0.1
    format: DataFormat = DataFormat.CRITEO_TSV

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InvalidError(f"rows must be at least 1 (got {self.rows})")
        if not 0 <= self.seed < 1 << 63:
            raise InvalidError(f"seed must be at least 0 and below 2**63 (got {self.seed})")
        if not 0 <= self.evaluation_fraction < 1:
            raise InvalidError(f"evaluation fraction must be at least 0 and below 1 (got {self.evaluation_fraction:g})")
        if not 1 <= self.parts <= max(self.training_rows, 1):
            raise InvalidError(f"parts must be from 1 to the number of training rows (got {self.parts})")
        if not self.training_rows:
            raise InvalidError(
                f"{self.rows} rows with evaluation fraction {self.evaluation_fraction:g} leave none to train"
            )

    @property
    def evaluation_rows(self) -> int:
        """The number of rows in the file for evaluation."""
        return round(self.rows * self.evaluation_fraction)

    @property
    def training_rows(self) -> int:
        """The total number of rows in all training files."""
        return self.rows - self.evaluation_rows

    def files(self) -> dict[str, tuple[int, int]]:
        """Rows [start, stop) by the file that holds them."""
        bounds = [self.training_rows * part // self.parts for part in range(self.parts + 1)]
        ending = self.format.ending
        files = {f"train-{part:05d}{ending}": (bounds[part], bounds[part + 1]) for part in range(self.parts)}
        if self.evaluation_rows:
            files[f"evaluation{ending}"] = (self.training_rows, self.rows)
        return files


@dataclass(frozen=True, slots=True)
class SynthesisResult:
    """`written` is False if the data set existed already. `metadata` is the content of `metadata.json`."""

    written: bool
    metadata: dict[str, Any]


def write_dataset(
    out: Path,
    spec: DatasetSpec,
    progress: Callable[[int], None] = lambda rows: None,
    chunk_rows: int = CHUNK_ROWS,
) -> SynthesisResult:
    """Writes a data set to the new or empty folder `out`, unless it exists there already.

    Folders above a relative `out` are made; those above an absolute one must exist, since a misspelt mount point would
    fill another disk. `progress` is called with numbers of rows as they are written. Raises InvalidError.
    """
    existing = _existing(out, spec)
    if existing is not None:
        return SynthesisResult(False, existing)
    if out.is_absolute() and not out.parent.is_dir():
        raise InvalidError(f"{out}: the folder {out.parent} does not exist; make it first")
    with os_errors_named(f"{out}: cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _draft_of(out) as draft:
            metadata = _write_files(draft, spec, progress, chunk_rows)
            (draft / METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
            draft.rename(out)
    return SynthesisResult(True, metadata)


def _existing(out: Path, spec: DatasetSpec) -> dict[str, Any] | None:
    """Returns the metadata of the same data set, None if `out` is empty. Raises InvalidError for anything else."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        metadata: dict[str, Any] = json.loads((out / METADATA).read_text(encoding="utf-8"))
        found = {"generator": metadata["generator"], **metadata["parameters"]}
        sizes = {file["name"]: file["bytes"] for file in metadata["files"]}
    except OSError as error:
        raise InvalidError(f"{out}: exists and holds no data set of this generator: choose another path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidError(f"{out / METADATA}: is not what the generator writes: choose another path") from error
    wanted = {"generator": GENERATOR, **asdict(spec)}
    if found != wanted:
        differing = ", ".join(
            f"{key} {found.get(key)} instead of {wanted[key]}" for key in wanted if found.get(key) != wanted[key]
        )
        raise InvalidError(f"{out}: holds another data set ({differing}): remove it or choose another path")
    for name, size in sizes.items():
        path = out / name
        if not path.is_file() or path.stat().st_size != size:
            raise InvalidError(f"{path}: is damaged, it should have {size:,} bytes: remove {out} and write it again")
    return metadata


@contextmanager
def _draft_of(out: Path) -> Iterator[Path]:
    """Yields a hidden, empty folder beside `out`, which this process owns, and removes it unless it was renamed.

    The lock ends with the process: the next process clears what a killed one left behind.
    """
    draft = out.parent / f".{out.name}.partial"
    draft.mkdir(exist_ok=True)
    handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidError(f"{out}: another process is writing it") from None
        if not draft.exists() or not os.path.samestat(os.fstat(handle), draft.stat()):
            raise InvalidError(f"{out}: another process has just written it")
        for leftover in draft.iterdir():
            leftover.unlink()
        try:
            yield draft
        finally:
            if draft.exists():
                shutil.rmtree(draft)
    finally:
        os.close(handle)


def _write_files(draft: Path, spec: DatasetSpec, progress: Callable[[int], None], chunk_rows: int) -> dict[str, Any]:
    population = Population(spec.seed)
    seen = SeenIds(spec.rows)
    statistics = {"train": RankStatistics(), "evaluation": RankStatistics()}
    files = []
    for name, (start, stop) in spec.files().items():
        split = "evaluation" if start >= spec.training_rows else "train"
        with _open(draft / name, spec.format) as write:
            for first in range(start, stop, chunk_rows):
                last = min(first + chunk_rows, stop)
                rows = population.rows(first, last, seen if split == "train" else None)
                statistics[split].add(rows.probabilities, rows.labels)
                write(rows)
                progress(last - first)
        files.append({"name": name, "rows": stop - start, "bytes": (draft / name).stat().st_size})
    return {
        "generator": GENERATOR,
        "parameters": asdict(spec),
        "splits": {split: _summary(measured) for split, measured in statistics.items() if measured.rows},
        "columns": {
            name: {"distinct_in_train": distinct, "cardinality": column.cardinality}
            for name, distinct, column in zip(CRITEO_CATEGORICAL, seen.counts(), CATEGORICAL, strict=True)
        },
        "files": files,
    }


@contextmanager
def _open(path: Path, target: DataFormat) -> Iterator[Callable[[Rows], None]]:
    """Yields a function that appends rows to a new file."""
    if target is DataFormat.CRITEO_TSV:
        with path.open("wb") as file:

            def write_lines(rows: Rows) -> None:
                file.write(criteo_lines(rows.labels, rows.integers, rows.ids).data)

            yield write_lines
        return
    compression = "zstd" if target is DataFormat.PARQUET else "none"
    with open_writer(path, target, CRITEO_COLUMNS, CSVSpec(), compression, integers=True) as append:

        def write(rows: Rows) -> None:
            dense = np.where(rows.integers == MISSING_INTEGER, np.nan, rows.integers)
            columns = Columns(rows.labels.astype(np.float32), dense, rows.ids)
            for start in range(0, len(columns), ROW_GROUP_RECORDS):
                append(columns.rows(start, start + ROW_GROUP_RECORDS))

        yield write


def _summary(measured: RankStatistics) -> dict[str, Any]:
    return {
        "rows": measured.rows,
        "positives": measured.positives,
        "teacher_auc": measured.auc,
        "teacher_log_loss": measured.log_loss,
    }
