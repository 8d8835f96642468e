"""A death at every file operation of a checkpoint, and of the removal of earlier ones.

Three deaths: of a process, whose writes all stay; of a machine, whose disk loses all or any part of what was not
flushed; and of a process that writes to an object store, in which an object exists as a whole or not at all.
"""

import builtins
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.trainer.checkpoint.test_chain_damage import MODES, Life

from emberscale_api.job import IncrementalMode


class KilledError(BaseException):
    """The process is dead: nothing that it does has an effect."""


class Fate:
    """Lets `left` operations through; the next has part of its effect or none, and later ones have none."""

    def __init__(self) -> None:
        self.left: int | None = None

    def counted(self, operation: Callable[..., Any], in_part: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Wraps an operation, which counts and may be the last; `in_part` is its effect before the death."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self.left is None:
                return operation(*arguments, **options)
            self.left -= 1
            if self.left == -1 and in_part is not None:
                in_part(*arguments, **options)
            if self.left < 0:
                raise KilledError
            return operation(*arguments, **options)

        return call


def path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").resolve()


class Disk:
    """The part of a folder that is on the disk: the content of flushed files, and the names in flushed folders."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._kept: dict[int, int] = {}  # open files, so that the system does not reuse their inode numbers
        self.flush_all()

    def flush(self, path: Path) -> None:
        number = path.stat().st_ino
        if number not in self._kept:
            self._kept[number] = os.open(path, os.O_RDONLY)
        if path.is_dir():
            self._names[number] = {one.name: one.stat().st_ino for one in path.iterdir()}
        else:
            self._contents[number] = path.read_bytes()

    def flush_all(self) -> None:
        """Flushes all files and folders, as if they had been written long ago."""
        for path in [self._root, *self._root.rglob("*")]:
            self.flush(path)

    def lose(self, survives: Callable[[], bool]) -> None:
        """Kills the machine. Unflushed content of a file, or names of a folder, stay only if `survives` says so."""
        contents = {path.stat().st_ino: path.read_bytes() for path in self._root.rglob("*") if path.is_file()}
        names = {
            path.stat().st_ino: {one.name: one.stat().st_ino for one in path.iterdir()}
            for path in [self._root, *self._root.rglob("*")]
            if path.is_dir()
        }
        files = {number: contents[number] for number in contents if survives()}
        folders = {number: names[number] for number in names if survives()}
        top = self._root.stat().st_ino
        for path in sorted(self._root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self._restore(self._root, top, {**self._contents, **files}, {**self._names, **folders}, names)
        self.close()
        self._contents, self._names = {}, {}
        self.flush_all()

    def _restore(
        self,
        folder: Path,
        number: int,
        contents: dict[int, bytes],
        names: dict[int, dict[str, int]],
        live: dict[int, dict[str, int]],
    ) -> None:
        for name, child in names.get(number, {}).items():
            path = folder / name
            if child in names or child in live:
                path.mkdir()
                self._restore(path, child, contents, names, live)
            else:
                path.write_bytes(contents.get(child, b""))

    def close(self) -> None:
        for descriptor in self._kept.values():
            os.close(descriptor)
        self._kept = {}


@contextmanager
def local_files(fate: Fate, flush: Callable[[Path], None]) -> Iterator[None]:
    """Counts operations that change local files; `flush` replaces real flushes, which take a disk seconds."""
    opened = io.open

    def tear(descriptor: int) -> None:
        if not path_of(descriptor).is_dir():
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)

    def create(*arguments: Any, **options: Any) -> None:
        opened(*arguments, **options).close()

    written = fate.counted(opened, create)

    def open_counted(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return (written if "w" in mode else opened)(path, mode, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fate.counted(lambda descriptor: flush(path_of(descriptor)), tear))
        for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir"):
            patch.setattr(os, name, fate.counted(getattr(os, name)))
        patch.setattr(builtins, "open", open_counted)
        patch.setattr(io, "open", open_counted)
        yield


class Objects(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An object store: each object exists as a whole or not at all."""

    protocol = "mortal"
    store: dict[str, Any] = {}  # noqa: RUF012  # as MemoryFileSystem has it
    pseudo_dirs = [""]  # noqa: RUF012
    fate = Fate()

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return super().open(path, mode, **options)
        store = self

        class Object(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    content = self.getvalue()
                    super().close()
                    store.pipe_file(path, content)

        return Object()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        self.fate.counted(self._put, self._put)(path, value)  # at a death, the object is stored and the answer lost

    def _put(self, path: str, value: bytes) -> None:
        with super().open(path, "wb") as file:
            file.write(value)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes objects one request at a time, as in a store without bulk removal; a death can follow any of them."""
        for one in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            gone = super().rm
            self.fate.counted(gone, gone)(one)


fsspec.register_implementation("mortal", Objects, clobber=True)


def lives_through_every_death(
    life: Life, fate: Fate, died: Callable[[int], None], survivors: str, saves: int = 1
) -> int:
    """Dies once at each operation of a checkpoint. Returns the number of operations.

    After each death, `saves` checkpoints are taken; with two, nothing builds on the first of them.
    """
    random, newest = np.random.default_rng(7), ""
    for steps in itertools.count():
        life.push(random.integers(0, 40, 5).tolist())
        fate.left = steps
        try:
            life.save()
        except KilledError:
            fate.left = None
            died(steps)
            after, refused = life.newest()
            assert not refused  # an incomplete checkpoint does not count, and the others are untouched
            assert after in (newest, f"{life.number:08}")
            if survivors == "servers":
                life.master_dies(lost=steps % 3)
            else:
                life.all_die(after)
        else:
            fate.left = None
            return steps
        for _ in range(saves):
            life.push(random.integers(0, 40, 5).tolist())
            life.save()
        newest = f"{life.number:08}"
        assert life.newest() == (newest, {})
    raise AssertionError("the loop has no end")


@pytest.mark.parametrize("survivors", ["none", "servers"])
@pytest.mark.parametrize("mode", MODES)
def test_a_process_may_die_at_any_operation(tmp_path: Path, mode: IncrementalMode, survivors: str) -> None:
    fate = Fate()
    with local_files(fate, lambda _: None):
        steps = lives_through_every_death(Life(tmp_path, mode, keep=1), fate, lambda _: None, survivors)
    assert steps > 30


@pytest.mark.parametrize(("mode", "share"), list(zip(MODES, (0.0, 0.3, 0.7), strict=True)))
def test_a_machine_may_die_at_any_operation(tmp_path: Path, mode: IncrementalMode, share: float) -> None:
    """Its disk keeps `share` of what was not flushed."""
    fate, random, disk = Fate(), np.random.default_rng(11), Disk(tmp_path)

    def died(_: int) -> None:
        disk.lose(lambda: bool(random.random() < share))

    try:
        with local_files(fate, disk.flush):
            steps = lives_through_every_death(Life(tmp_path, mode, keep=1), fate, died, "none")
    finally:
        disk.close()
    assert steps > 30


@pytest.mark.parametrize("survivors", ["none", "servers"])
@pytest.mark.parametrize("mode", MODES)
def test_who_writes_to_a_store_of_objects_may_die_at_any_of_them(mode: IncrementalMode, survivors: str) -> None:
    Objects.store.clear()
    life = Life("mortal://checkpoints", mode, keep=1)
    steps = lives_through_every_death(life, Objects.fate, lambda _: None, survivors, saves=2)
    assert steps > (20 if mode is IncrementalMode.ONE_SHOT else 10)
