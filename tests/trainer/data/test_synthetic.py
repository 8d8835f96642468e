import json
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from emberscale_api.dataset import DataFile
from emberscale_api.errors import InvalidError
from emberscale_api.job import CSVSpec, DataFormat
from emberscale_api.job.resolved import CRITEO_COLUMNS
from emberscale_trainer.data.calibration import RankStatistics, calibrate, expected_auc
from emberscale_trainer.data.criteo import split_lines
from emberscale_trainer.data.formats import format_reader
from emberscale_trainer.data.population import Population
from emberscale_trainer.data.records import Columns, empty_columns
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.data.writers import MISSING_INTEGER

ROWS = 20_000


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parsed(folder: Path, pattern: str) -> Columns:
    text = b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))
    records = text.count(b"\n")
    columns = empty_columns(records, CRITEO_COLUMNS, raw=True)
    good, bad = split_lines(text, records, raw=True).read(np.arange(records), columns)
    assert (good, bad) == (records, [])
    return columns


@pytest.mark.parametrize("target", [DataFormat.PARQUET, DataFormat.CSV])
def test_every_format_holds_the_same_records(tmp_path: Path, target: DataFormat) -> None:
    read = []
    for written in (DataFormat.CRITEO_TSV, target):
        out = tmp_path / written.value
        write_dataset(out, DatasetSpec(3000, 5, evaluation_fraction=0, format=written))
        (path,) = out.glob("train-00000.*")
        reader = format_reader(written, CRITEO_COLUMNS, CSVSpec(), raw=True)
        file = DataFile(uri=str(path), bytes=path.stat().st_size)
        (block,) = reader.index_file(file, 0, 4096)
        columns = empty_columns(3000, CRITEO_COLUMNS, raw=True)
        assert reader.read_block(file, block).read(np.arange(3000), columns) == (3000, [])
        read.append(columns)
    ours, theirs = read
    np.testing.assert_array_equal(ours.labels, theirs.labels)
    np.testing.assert_array_equal(ours.dense, theirs.dense)
    np.testing.assert_array_equal(ours.ids, theirs.ids)


@pytest.fixture(scope="module")
def population() -> Population:
    return Population(5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("synthetic") / "data"
    assert write_dataset(out, DatasetSpec(ROWS, 5, parts=3, evaluation_fraction=0.25)).written
    return out


@pytest.mark.parametrize("chunk_rows", [7, 997, 4096])
def test_the_same_parameters_give_the_same_bytes_whatever_the_chunks(tmp_path: Path, chunk_rows: int) -> None:
    spec = DatasetSpec(3000, 5, parts=2)
    write_dataset(tmp_path / "whole", spec)
    write_dataset(tmp_path / "chunked", spec, chunk_rows=chunk_rows)
    assert contents(tmp_path / "chunked") == contents(tmp_path / "whole")


def test_the_bytes_of_a_seed_never_change(data: Path) -> None:
    """If you change the bytes on purpose, raise GENERATOR, so that older folders are not taken for the new rows."""
    assert zlib.crc32((data / "train-00000.tsv").read_bytes()) == 2043484475


def test_seeds_differ_in_ids_and_labels(population: Population) -> None:
    first, second = population.rows(0, 1000), Population(6).rows(0, 1000)
    assert not np.intersect1d(first.ids, second.ids).size > 10
    assert 0.2 < np.mean(first.labels != second.labels) < 0.6


def test_more_rows_begin_with_the_same_rows(tmp_path: Path) -> None:
    for rows in (500, 1000):
        write_dataset(tmp_path / str(rows), DatasetSpec(rows, 1, evaluation_fraction=0))
    short, long = ((tmp_path / f"{rows}/train-00000.tsv").read_bytes() for rows in (500, 1000))
    assert long.startswith(short)


def test_what_is_written_is_what_was_generated(data: Path, population: Population) -> None:
    rows = population.rows(0, ROWS)
    for pattern, part in (("train-*", slice(0, 15_000)), ("evaluation*", slice(15_000, ROWS))):
        written = parsed(data, pattern)
        np.testing.assert_array_equal(written.labels, rows.labels[part])
        np.testing.assert_array_equal(written.ids, rows.ids[part])
        integers = np.where(rows.integers == MISSING_INTEGER, np.nan, rows.integers)
        np.testing.assert_array_equal(written.dense, integers[part])


def test_the_metadata_says_what_the_files_hold(data: Path) -> None:
    metadata = json.loads((data / "metadata.json").read_text())
    assert [file["name"] for file in metadata["files"]] == [
        "train-00000.tsv",
        "train-00001.tsv",
        "train-00002.tsv",
        "evaluation.tsv",
    ]
    for file in metadata["files"]:
        content = (data / file["name"]).read_bytes()
        assert (len(content), content.count(b"\n")) == (file["bytes"], file["rows"])
    train = parsed(data, "train-*")
    assert metadata["splits"]["train"]["rows"] == train.labels.size
    assert metadata["splits"]["train"]["positives"] == train.labels.sum()
    for column, name in enumerate(f"C{number}" for number in range(1, 27)):
        ids = train.ids[:, column]
        assert metadata["columns"][name]["distinct_in_train"] == np.unique(ids[ids >= 0]).size


def test_the_teachers_scores_are_those_of_scikit_learn_on_the_written_labels(
    data: Path, population: Population
) -> None:
    metadata = json.loads((data / "metadata.json").read_text())
    probabilities = population.rows(0, ROWS).probabilities
    for split, part in (("train", slice(0, 15_000)), ("evaluation", slice(15_000, ROWS))):
        labels = parsed(data, f"{split}*").labels
        reported = metadata["splits"][split]
        assert reported["teacher_auc"] == pytest.approx(roc_auc_score(labels, probabilities[part]), abs=1e-6)
        assert reported["teacher_log_loss"] == pytest.approx(log_loss(labels, probabilities[part]), abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_every_seed_has_a_quarter_of_positives_and_a_teacher_of_auc_08(seed: int) -> None:
    rows = Population(seed).rows(0, 100_000)
    assert rows.labels.mean() == pytest.approx(0.25, abs=0.02)
    assert roc_auc_score(rows.labels, rows.probabilities) == pytest.approx(0.80, abs=0.01)


def test_new_ids_keep_arriving_and_popularity_is_skewed(population: Population) -> None:
    ids = population.rows(0, 100_000).ids
    for column in (2, 3, 11, 15, 20):
        halves = [np.unique(half) for half in np.split(ids[:, column], 2)]
        assert np.setdiff1d(halves[1], halves[0]).size > 5000
        _, times = np.unique(ids[:, column], return_counts=True)
        assert np.sort(times)[-100:].sum() > 200 * times.mean()
    distinct = [np.unique(ids[:, column]).size for column in range(26)]
    assert min(distinct) <= 4
    assert max(distinct) > 20_000


def test_a_simple_model_learns_most_of_what_the_teacher_knows(population: Population) -> None:
    """The model sees only single ids: it adds up their smoothed log odds, learned from 180,000 rows."""
    rows, train = population.rows(0, 200_000), 180_000
    rate = rows.labels[:train].mean()
    score = np.zeros(rows.labels.size - train)
    for column in range(26):
        score += _log_odds(rows.ids[:, column], rows.labels, train, rate)
    auc = roc_auc_score(rows.labels[train:], score)
    ceiling = roc_auc_score(rows.labels[train:], rows.probabilities[train:])
    assert 0.7 < auc < ceiling


def _log_odds(
    ids: npt.NDArray[np.int64], labels: npt.NDArray[np.uint8], train: int, rate: float
) -> npt.NDArray[np.float64]:
    _, places = np.unique(ids, return_inverse=True)
    positives = np.bincount(places[:train], labels[:train], places.max() + 1) + 20 * rate
    total = np.bincount(places[:train], minlength=places.max() + 1) + 20
    odds: npt.NDArray[np.float64] = np.log(positives / (total - positives))[places[train:]]
    return odds


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.999), st.integers(0, 1)), min_size=2, max_size=200).filter(
        lambda rows: len({label for _, label in rows}) == 2
    ),
    st.integers(1, 50),
)
def test_rank_statistics_are_exact_up_to_ties(rows: list[tuple[float, int]], chunk: int) -> None:
    probabilities = np.array([round(probability, 3) for probability, _ in rows])
    labels = np.array([label for _, label in rows], dtype=np.uint8)
    statistics = RankStatistics()
    for start in range(0, len(rows), chunk):
        statistics.add(probabilities[start : start + chunk], labels[start : start + chunk])
    assert statistics.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    assert statistics.log_loss == pytest.approx(log_loss(labels, probabilities), abs=1e-9)
    assert (statistics.rows, statistics.positives) == (len(rows), labels.sum())


def test_a_split_of_one_class_has_no_auc() -> None:
    statistics = RankStatistics()
    assert statistics.log_loss is None
    statistics.add(np.array([0.2, 0.4]), np.zeros(2, dtype=np.uint8))
    assert statistics.auc is None


def test_calibration_reaches_the_rate_and_the_auc_wanted() -> None:
    scores = np.random.default_rng(0).gamma(2.0, 3.0, size=4000)
    offset, slope = calibrate(scores, positive_rate=0.1, auc=0.7)
    probabilities = 1 / (1 + np.exp(-(offset + slope * scores)))
    assert probabilities.mean() == pytest.approx(0.1, abs=1e-4)
    assert expected_auc(probabilities) == pytest.approx(0.7, abs=1e-4)


def test_a_data_set_that_is_there_is_left_alone(data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    result = write_dataset(data, DatasetSpec(ROWS, 5, parts=3, evaluation_fraction=0.25))
    assert not result.written
    assert result.metadata == json.loads((data / "metadata.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert write_dataset(tmp_path / "out", DatasetSpec(100)).written
    assert sorted(contents(tmp_path / "out")) == ["evaluation.tsv", "metadata.json", "train-00000.tsv"]


def test_without_an_evaluation_fraction_there_is_no_such_file(tmp_path: Path) -> None:
    result = write_dataset(tmp_path / "out", DatasetSpec(100, evaluation_fraction=0))
    assert sorted(contents(tmp_path / "out")) == ["metadata.json", "train-00000.tsv"]
    assert list(result.metadata["splits"]) == ["train"]


def test_another_data_set_is_never_overwritten(data: Path) -> None:
    with pytest.raises(InvalidError, match=r"holds another data set \(rows 20000 instead of 10, seed 5 instead of 7"):
        write_dataset(data, DatasetSpec(10, 7, parts=3, evaluation_fraction=0.25))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("notes.txt", "mine", "exists and holds no data set of this generator"),
        ("metadata.json", "{}", "is not what the generator writes"),
        ("metadata.json", "[1]", "is not what the generator writes"),
        ("metadata.json", "half a fi", "is not what the generator writes"),
    ],
)
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidError, match=problem):
        write_dataset(tmp_path, DatasetSpec(100))
    assert contents(tmp_path) == {name: content.encode()}


def test_a_damaged_data_set_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path / "out", DatasetSpec(100))
    with (tmp_path / "out/evaluation.tsv").open("ab") as file:
        file.truncate(50)
    with pytest.raises(InvalidError, match=r"evaluation\.tsv: is damaged, it should have"):
        write_dataset(tmp_path / "out", DatasetSpec(100))


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("{}/no/out", r"no/out: the folder .*/no does not exist; make it first"),
        ("{}/file", "holds no data set of this generator"),
        ("{}/file/out", r"the folder .*/file does not exist"),
        ("/proc/out", "/proc/out: cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, out: str, problem: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match=problem):
        write_dataset(Path(out.format(tmp_path)), DatasetSpec(100))


def test_folders_above_a_relative_path_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_dataset(Path("a/b/out"), DatasetSpec(100)).written
    assert (tmp_path / "a/b/out/metadata.json").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match="file/out: cannot be written"):
        write_dataset(Path("file/out"), DatasetSpec(100))


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "out", DatasetSpec(100), interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_data_set_and_the_next_one_clears_up(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset\n"
        "die = lambda rows: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_dataset(pathlib.Path(sys.argv[1]), DatasetSpec(100, parts=5), die)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]

    assert write_dataset(tmp_path / "out", DatasetSpec(100)).written
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(contents(tmp_path / "out")) == ["evaluation.tsv", "metadata.json", "train-00000.tsv"]


def test_two_writers_of_one_data_set_do_not_mix(tmp_path: Path) -> None:
    problems = []

    def write_too(rows: int) -> None:
        with pytest.raises(InvalidError) as error:
            write_dataset(tmp_path / "out", DatasetSpec(100))
        problems.append(str(error.value))

    write_dataset(tmp_path / "out", DatasetSpec(100, evaluation_fraction=0), write_too)
    assert problems == [f"{tmp_path / 'out'}: another process is writing it"]
    assert sorted(contents(tmp_path / "out")) == ["metadata.json", "train-00000.tsv"]


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"rows": 0}, "rows must be at least 1"),
        ({"rows": 10, "seed": -1}, "seed must be at least 0"),
        ({"rows": 10, "parts": 0}, "parts must be from 1 to the number of training rows"),
        ({"rows": 10, "parts": 10}, "parts must be from 1 to the number of training rows"),
        ({"rows": 10, "evaluation_fraction": 1.0}, "evaluation fraction must be at least 0 and below 1"),
        ({"rows": 10, "evaluation_fraction": float("nan")}, "evaluation fraction must be"),
        ({"rows": 1, "evaluation_fraction": 0.9}, "leave none to train"),
    ],
)
def test_numbers_that_make_no_data_set_are_refused(numbers: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DatasetSpec(**numbers)
