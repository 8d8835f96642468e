"""A run's model is its last checkpoint."""

import shutil
from pathlib import Path

import fsspec
import pytest

from emberscale._run.checkpoints import ModelUnavailableError, export_model


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for number in (1, 2):
        folder = tmp_path / "checkpoints" / f"{number:08}" / "ps-0"
        folder.mkdir(parents=True)
        (folder / "table-0.rows").write_bytes(bytes([number]) * 100)
        (folder.parent / "manifest.json").write_text(f"{number}")
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_files_are_there_and_outlive_the_checkpoint(checkpoints: Path, tmp_path: Path, scheme: str) -> None:
    export_model(f"{scheme}{checkpoints}", "00000002", tmp_path / "model")
    shutil.rmtree(checkpoints)
    assert (tmp_path / "model" / "ps-0" / "table-0.rows").read_bytes() == b"\2" * 100


def test_damage_to_a_checkpoint_does_not_reach_the_model(checkpoints: Path, tmp_path: Path) -> None:
    export_model(str(checkpoints), "00000001", tmp_path / "model")
    with (checkpoints / "00000001" / "ps-0" / "table-0.rows").open("r+b") as file:
        file.write(b"?")
    assert (tmp_path / "model" / "ps-0" / "table-0.rows").read_bytes() == b"\1" * 100


def test_an_older_model_is_replaced_whole(checkpoints: Path, tmp_path: Path) -> None:
    export_model(str(checkpoints), "00000001", tmp_path / "model")
    (tmp_path / "model" / "stray").touch()
    export_model(str(checkpoints), "00000002", tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["manifest.json", "ps-0"]
    assert (tmp_path / "model" / "manifest.json").read_text() == "2"


def test_a_checkpoint_that_is_gone_leaves_the_model_alone(checkpoints: Path, tmp_path: Path) -> None:
    export_model(str(checkpoints), "00000001", tmp_path / "model")
    with pytest.raises(ModelUnavailableError, match="00000009"):
        export_model(str(checkpoints), "00000009", tmp_path / "model")
    assert (tmp_path / "model" / "manifest.json").read_text() == "1"


def test_a_remote_checkpoint_is_fetched(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/00000001/ps-0/table-0.rows", b"rows")
    memory.pipe_file("/bucket/00000001/manifest.json", b"{}")
    export_model("memory://bucket", "00000001", tmp_path / "model")
    assert (tmp_path / "model" / "ps-0" / "table-0.rows").read_bytes() == b"rows"
