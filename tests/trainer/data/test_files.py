import errno
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from emberscale_trainer.data.files import Target, expand
from emberscale_trainer.data.records import DataUnavailableError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.tsv", "a.tsv", "notes.txt", "sub/c.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(paths: list[str], folder: Path) -> list[str]:
    return [os.path.relpath(file.uri, folder) for file in expand(paths)]


def test_globs_and_paths_are_sorted_and_each_file_comes_once(folder: Path) -> None:
    assert names([f"{folder}/b.tsv", f"{folder}/*.tsv"], folder) == ["a.tsv", "b.tsv"]
    assert names([f"{folder}/**/*.tsv"], folder) == ["a.tsv", "b.tsv", "sub/c.tsv"]
    assert names([f"file://{folder}/a.tsv", f"{folder}/a.tsv"], folder) == ["a.tsv"]


def test_sizes_are_in_bytes(folder: Path) -> None:
    assert [file.bytes for file in expand([f"{folder}/sub/*"])] == [len("sub/c.tsv")]


def test_relative_paths_start_at_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "sub")
    assert [file.uri for file in expand(["c.tsv", "../*.tsv"])] == [
        f"{folder}/a.tsv",
        f"{folder}/b.tsv",
        f"{folder}/sub/c.tsv",
    ]


def test_a_name_with_glob_characters_is_taken_literally_if_it_exists(folder: Path) -> None:
    (folder / "day[1].tsv").write_text("x")
    assert names([f"{folder}/day[1].tsv"], folder) == ["day[1].tsv"]


def test_other_file_systems_keep_their_scheme() -> None:
    with fsspec.open("memory://expand-test/a.tsv", "wb") as stream:
        stream.write(b"12345")
    assert [(file.uri, file.bytes) for file in expand(["memory://expand-test/*.tsv"])] == [
        ("memory:///expand-test/a.tsv", 5)
    ]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("{}/*.csv", r"matches no file; .* holds a\.tsv, b\.tsv, notes\.txt, sub$"),
        ("{}/day_0.tsv", r"day_0\.tsv: is no file; .* holds a\.tsv, b\.tsv, notes\.txt, sub$"),
        ("{}/no/such/folder/*.tsv", r"matches no file; .* holds a\.tsv"),
        ("{}/sub", r"sub: is a folder, write .*/sub/\*\.tsv or so; .* holds c\.tsv$"),
        ("nosuchscheme://bucket/a", "nosuchscheme://bucket/a: no file system for it: .*nosuchscheme"),
    ],
)
def test_a_path_without_files_is_named_with_what_is_there(folder: Path, path: str, problem: str) -> None:
    with pytest.raises(DataUnavailableError, match=problem):
        expand([path.format(folder)])


def test_a_long_listing_is_cut(folder: Path) -> None:
    for number in range(10):
        (folder / f"day_{number}").touch()
    with pytest.raises(DataUnavailableError, match=r"holds a\.tsv, b\.tsv, day_0, day_1, day_2 and 9 more$"):
        expand([f"{folder}/none"])


def test_a_target_that_cannot_be_looked_up_does_not_count_as_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion would replace the file without --overwrite."""

    def info(self: LocalFileSystem, path: str, **options: Any) -> dict[str, Any]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(LocalFileSystem, "info", info)
    with pytest.raises(OSError, match="tale"):
        Target.of(f"{folder}/a.tsv").exists()
