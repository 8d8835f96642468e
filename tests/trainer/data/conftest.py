"""Criteo lines in files, expanded and indexed."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest

from emberscale_api.dataset import Block, DataFile, Dataset
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.files import expand


@pytest.fixture(scope="session")
def criteo_line() -> Callable[[int], bytes]:
    """Makes a valid line, without a newline, whose C1 is its number."""

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

        def index(split: str, contents: Sequence[bytes]) -> tuple[tuple[DataFile, ...], tuple[Block, ...]]:
            files = tuple(expand(_write(folder, split, contents)))
            blocks = (CriteoTSV().index_file(file, number, block_records) for number, file in enumerate(files))
            return files, tuple(chain.from_iterable(blocks))

        return Dataset(*index("training", training), *index("evaluation", evaluation))

    return make


def _write(folder: Path, split: str, contents: Sequence[bytes]) -> list[str]:
    paths = [folder / f"{split}-{number:03d}.tsv" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]
