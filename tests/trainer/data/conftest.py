"""Criteo lines in files, expanded and indexed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from emberscale_api.rpc.master_pb2 import Dataset
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.files import expand


@pytest.fixture(scope="session")
def criteo_line() -> Callable[[int], bytes]:
    """A good line, without a newline, that can be told from all others: C1 is its number."""

    def line(number: int) -> bytes:
        integers = "\t".join(str(number % (column + 7)) for column in range(13))
        categories = "\t".join(f"{number if column == 0 else number % (column + 3):08x}" for column in range(26))
        return f"{number % 2}\t{integers}\t{categories}".encode()

    return line


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dataset]:
    """Writes files of the given contents to a new folder, and indexes them."""

    def make(training: Sequence[bytes], evaluation: Sequence[bytes] = (), block_records: int = 10) -> Dataset:
        folder = tmp_path_factory.mktemp("dataset")
        dataset = Dataset()
        for split, contents in (("training", training), ("evaluation", evaluation)):
            files = expand(_write(folder, split, contents))
            blocks = [
                block
                for number, file in enumerate(files)
                for block in CriteoTSV().index_file(file, number, block_records)
            ]
            getattr(dataset, f"{split}_files").extend(files)
            getattr(dataset, f"{split}_blocks").extend(blocks)
            setattr(dataset, f"{split}_records", sum(block.records for block in blocks))
        return dataset

    return make


def _write(folder: Path, split: str, contents: Sequence[bytes]) -> list[str]:
    paths = [folder / f"{split}-{number:03d}.tsv" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]
