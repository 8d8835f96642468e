from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from emberscale_api.dataset import Dataset, Split
from emberscale_trainer.data.criteo import CriteoTSV, LineBlock
from emberscale_trainer.data.records import DataUnavailableError
from emberscale_trainer.data.source import Batch, BatchSource

MakeDataset = Callable[..., Dataset]
CriteoLine = Callable[[int], bytes]


@pytest.fixture(scope="module")
def dataset(make_dataset: MakeDataset, criteo_line: CriteoLine) -> Dataset:
    """Three training files of 57, 0 and 34 records in blocks of 10; C1 numbers the records through."""
    lines = [criteo_line(number) for number in range(91)]
    training = [b"\n".join(lines[:57]) + b"\n", b"", b"\n".join(lines[57:])]
    evaluation = [b"".join(criteo_line(number) + b"\r\n" for number in range(1000, 1025))]
    return make_dataset(training, evaluation)


def numbers(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.ids[:, 0].tolist()]


def test_the_order_does_not_hang_on_how_the_blocks_are_listed(dataset: Dataset) -> None:
    listed = replace(dataset, training_blocks=dataset.training_blocks[::-1])
    sources = [BatchSource(each, CriteoTSV(), 16, 0) for each in (dataset, listed)]
    first, second = [numbers(list(source.batches(Split.TRAINING, 0, 0, 91))) for source in sources]
    assert first == second


def test_a_batch_has_the_features_of_its_records(dataset: Dataset, criteo_line: CriteoLine) -> None:
    source = BatchSource(dataset, CriteoTSV(), 16, 0)
    for batch in source.batches(Split.TRAINING, 0, 0, 91):
        for row, number in enumerate(batch.ids[:, 0].tolist()):
            fields = criteo_line(number).decode().split("\t")
            assert batch.labels[row] == float(fields[0])
            np.testing.assert_allclose(batch.dense[row], np.log1p([int(field) for field in fields[1:14]]), rtol=1e-6)
            assert batch.ids[row].tolist() == [int(field, 16) for field in fields[14:]]


def test_bad_records_shrink_only_their_own_batch(make_dataset: MakeDataset, criteo_line: CriteoLine) -> None:
    lines = [criteo_line(number) for number in range(50)]
    lines[3], lines[27], lines[49] = b"", b"what is this?", b"\r"
    dataset = make_dataset([b"\n".join(lines[:20]) + b"\n", b"\n".join(lines[20:]) + b"\n"])
    batches = list(BatchSource(dataset, CriteoTSV(), 8, 1).batches(Split.TRAINING, 0, 0, 50))
    assert sorted(numbers(batches)) == [number for number in range(50) if number not in (3, 27, 49)]
    for batch in batches:
        rows = batch.stop - batch.start - len(batch.bad_records)
        assert batch.labels.shape == (rows,)
        assert batch.dense.shape == (rows, 13)
        assert batch.ids.shape == (rows, 26)
    found = sorted((bad.file[-7:], bad.line) for batch in batches for bad in batch.bad_records)
    assert found == [("000.tsv", 4), ("001.tsv", 8), ("001.tsv", 30)]


def test_a_block_is_read_once_for_all_batches_of_a_shard(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    read_block = CriteoTSV.read_block

    def counted(self: CriteoTSV, file: object, block: object) -> LineBlock:
        read.append((block.file_number, block.offset))  # type: ignore[attr-defined]  # typed as the protocol has it
        return read_block(self, file, block)  # type: ignore[arg-type]  # as above

    monkeypatch.setattr(CriteoTSV, "read_block", counted)
    source = BatchSource(dataset, CriteoTSV(), 2, 0)
    for start in range(0, 90, 6):
        list(source.batches(Split.TRAINING, 0, start, start + 6))
    list(source.batches(Split.TRAINING, 0, 90, 91))
    assert len(read) == len(set(read)) == len(dataset.training_blocks)


@pytest.mark.parametrize(("start", "stop"), [(1, 16), (0, 15), (0, 92), (96, 112)])
def test_a_range_that_cuts_a_batch_is_refused(dataset: Dataset, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        list(BatchSource(dataset, CriteoTSV(), 16, 0).batches(Split.TRAINING, 0, start, stop))


def test_a_file_that_vanished_is_named(make_dataset: MakeDataset, criteo_line: CriteoLine) -> None:
    dataset = make_dataset([criteo_line(0) + b"\n"])
    (file,) = dataset.training_files
    dataset = replace(dataset, training_files=(replace(file, uri=f"{file.uri}.gone"),))
    with pytest.raises(DataUnavailableError, match=r"training-000\.tsv\.gone: cannot be read: No such file"):
        list(BatchSource(dataset, CriteoTSV(), 16, 0).batches(Split.TRAINING, 0, 0, 1))
