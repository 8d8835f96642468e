"""Sampling, traffic, and the whole calibrator on real files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat, InitializerSpec, OptimizerSpec, OptimizerType
from emberscale_api.job.resolved import CRITEO_COLUMNS, ResolvedModel, TableSpec
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import format_reader
from emberscale_trainer.data.records import DataUnavailableError, IdLists
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.hot.access import IdRecords
from emberscale_trainer.hot.sampler import IndexedData, draw, index_data, take_sample
from emberscale_trainer.hot.skew import SkewRequest, measure_skew
from emberscale_trainer.hot.traffic import RowCosts, bytes_of_batch, step_bytes, traffic_with


def silent(stage: str, done: int, total: int) -> None:
    pass


def model_of(columns: ColumnMapping, dimension: int = 16) -> ResolvedModel:
    optimizer = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.05)
    tables = (
        TableSpec(number, name, number, dimension, optimizer, InitializerSpec(), 0)
        for number, name in enumerate(columns.id_columns)
    )
    return ResolvedModel(columns, tuple(tables))


def opened(path: str, format_name: DataFormat, columns: ColumnMapping = CRITEO_COLUMNS) -> IndexedData:
    return index_data(expand([path]), format_reader(format_name, columns, CSVSpec(), True), silent)


@given(st.integers(1, 2000), st.floats(0.001, 0.5), st.integers(0, 3000), st.integers(0, 99))
def test_the_sample_and_what_is_held_out_are_apart(units: int, rate: float, held_out: int, seed: int) -> None:
    profiled, others = draw(units, rate, held_out, seed)
    assert profiled == sorted(set(profiled))
    assert others == sorted(set(others))
    assert set(profiled) | set(others) <= set(range(units))
    assert len(profiled) >= min(rate * units - 1, 32, units / 2)
    assert len(profiled) <= max(rate * units + 1, 32)
    if units > 1:
        assert not set(profiled) & set(others)
        assert len(others) == min(held_out, units - len(profiled))


def test_each_stretch_of_the_data_is_sampled_equally() -> None:
    profiled, _ = draw(2000, 0.05, 0, 4)
    assert np.array_equal(np.array(profiled) // 20, np.arange(100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("skew")
    for kind in (DataFormat.CRITEO_TSV, DataFormat.PARQUET, DataFormat.CSV):
        write_dataset(root / kind, DatasetSpec(20_000, seed=5, parts=2, evaluation_fraction=0, format=kind))
    return root


@pytest.mark.parametrize("kind", [DataFormat.CRITEO_TSV, DataFormat.PARQUET, DataFormat.CSV])
def test_every_format_gives_a_sample_of_its_size(folder: Path, kind: DataFormat) -> None:
    data = opened(f"{folder}/{kind}/train-*", kind)
    sample = take_sample(data, 0.2, 3000, 0, silent)
    assert data.records == 20_000
    assert sample.profiled == pytest.approx(4000, rel=0.1)
    assert sample.share == sample.profiled / 20_000
    assert len(sample.held_out) == pytest.approx(3000, rel=0.1)
    assert [log.accesses for log in sample.logs] == [sample.profiled] * 26


def test_a_full_pass_agrees_with_a_small_sample(folder: Path) -> None:
    data = opened(f"{folder}/{DataFormat.CRITEO_TSV}/train-*", DataFormat.CRITEO_TSV)
    request = SkewRequest((100_000, 1 << 40), 256, 2, 0.5, 0, exact=True)
    report = measure_skew(data, model_of(CRITEO_COLUMNS), request)
    small, unbounded = report.budgets
    assert small.exact is not None
    assert unbounded.exact is not None
    assert small.bytes <= 100_000
    assert small.access_share == pytest.approx(small.exact.access_share, abs=0.01)
    assert small.estimated_rows == pytest.approx(small.exact.rows_at_threshold, rel=0.1)
    assert small.exact.best_access_share >= small.exact.access_share - 0.01
    # all rows of all records are hot, so no batch is cold
    assert (unbounded.exact.best_access_share, unbounded.exact.best_hot_share) == (1.0, 1.0)
    assert small.traffic.cold <= 1.2 * report.row_bytes_per_sample


def test_uniform_ids_have_no_hot_samples(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [f"{i % 2},{a},{b}" for i, (a, b) in enumerate(random.integers(0, 10**9, (5000, 2)).tolist())]
    (tmp_path / "uniform.csv").write_text("y,a,b\n" + "\n".join(rows) + "\n")
    columns = ColumnMapping(label="y", categorical=("a", "b"))
    data = opened(str(tmp_path / "uniform.csv"), DataFormat.CSV, columns)
    (point,) = measure_skew(data, model_of(columns), SkewRequest((1 << 16,), 64, 2, 0.1, 0, False)).budgets
    assert (point.access_share, point.hot_share) == (0.0, 0.0)
    assert (point.traffic.swapped_copies, point.traffic.exchanged) == (0.0, 0.0)


def test_ids_that_all_records_share_need_no_server(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("y,a,h\n" + "".join(f"{i % 2},{i % 5},{i % 3}|{i % 2}\n" for i in range(5000)))
    columns = ColumnMapping.model_validate({"label": "y", "categorical": ["a"], "lists": [{"name": "h"}]})
    data = opened(str(tmp_path / "few.csv"), DataFormat.CSV, columns)
    report = measure_skew(data, model_of(columns), SkewRequest((1 << 20,), 64, 3, 0.1, 0, False))
    (point,) = report.budgets
    assert (point.access_share, point.hot_share, point.traffic.cold) == (1.0, 1.0, 0.0)
    # a batch of 64 pulls and pushes 5 + 3 rows of a key and 16 floats each
    assert report.row_bytes_per_sample == 2 * 8 * (8 + 64) / 64
    # twice in an epoch of 5,000 samples, hot rows go once to each of three workers, and once back
    assert point.traffic.swapped_copies == pytest.approx(2 * (3 + 1) * 8 * 80 / 5000)
    assert point.traffic.exchanged == pytest.approx(2 * 8 * (8 + 64) / 64)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=3)), min_size=1))
def test_a_batch_carries_each_key_once(records: list[tuple[int, int, list[int]]]) -> None:
    single = np.array([record[:2] for record in records], dtype=np.int64)
    offsets = np.cumsum([0, *(len(record[2]) for record in records)])
    values = np.array([one for record in records for one in record[2]], dtype=np.int64)
    costs = (RowCosts(1, 10), RowCosts(1, 100), RowCosts(1, 1000))
    distinct = [{r[0] for r in records}, {r[1] for r in records}, {one for r in records for one in r[2]}]
    size = bytes_of_batch(IdRecords(single, (IdLists(values, offsets),)), costs)
    assert size == sum(cost.step * len(keys) for cost, keys in zip(costs, distinct, strict=True))


def test_no_records_cost_nothing_and_few_make_a_small_batch() -> None:
    records = IdRecords(np.arange(10).reshape(5, 2))
    costs = (RowCosts(1, 8), RowCosts(1, 8))
    assert step_bytes(records, np.zeros(5, np.bool_), 4, costs, 0) == 0.0
    assert step_bytes(records, np.array([1, 1, 0, 0, 0], np.bool_), 4, costs, 0) == 16.0


def test_swaps_are_as_many_as_the_rate_says() -> None:
    often, seldom = (traffic_with(0.5, 10.0, 100.0, 1000, 2, 10_000, rate) for rate in (1, 100))
    assert often.swapped_shared == 100 * 2 * 1000 / 10_000
    assert seldom.swapped_shared == 2 * 1000 / 10_000
    assert often.cold == seldom.cold == 100.0
    assert often.exchanged == 5.0


def test_a_sample_without_a_sound_record_names_the_first_one(tmp_path: Path) -> None:
    lines = ["1,2"] * 40 + ["7,2"] * 4000
    (tmp_path / "bad.csv").write_text("y,a\n" + "\n".join(lines) + "\n")
    columns = ColumnMapping(label="y", categorical=("a",))
    data = opened(str(tmp_path / "bad.csv"), DataFormat.CSV, columns)
    last = IndexedData(data.files, data.blocks[-20:], data.reader)
    with pytest.raises(DataUnavailableError, match=r"no record of the sample is well-formed; the first: .*bad.csv:\d+"):
        take_sample(last, 0.1, 100, 0, silent)


def test_files_without_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("y,a\n")
    with pytest.raises(DataUnavailableError, match="contains no records"):
        opened(str(tmp_path / "empty.csv"), DataFormat.CSV, ColumnMapping(label="y", categorical=("a",)))
