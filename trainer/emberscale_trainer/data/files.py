"""Finds the files that a manifest's paths name, and writes files, each of which appears whole or not at all."""

import glob
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from emberscale_api.dataset import DataFile
from emberscale_api.errors import is_there
from emberscale_trainer.data.records import DataUnavailableError

_SHOWN = 5


def expand(paths: Iterable[str]) -> list[DataFile]:
    """Returns the files that paths, globs and fsspec URIs name: sorted by URI, each once, with their sizes in bytes.

    Local files get absolute paths. Raises DataUnavailableError for a path that names no readable file.
    """
    found: dict[str, int] = {}
    for path in paths:
        found.update(_expand_one(path))
    return [DataFile(uri=uri, bytes=size) for uri, size in sorted(found.items())]


def open_filesystem(path: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a path or URI, and the path within it. Raises DataUnavailableError."""
    try:
        filesystem, inner = fsspec.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise DataUnavailableError(path, f"no file system for it: {error}") from error
    return filesystem, inner


def _expand_one(path: str) -> dict[str, int]:
    filesystem, inner = open_filesystem(path)
    try:
        if filesystem.isfile(inner):
            matches = [inner]
        elif glob.has_magic(inner):
            matches = [match for match in filesystem.glob(inner) if filesystem.isfile(match)]
        elif filesystem.isdir(inner):
            raise DataUnavailableError(
                path, f"is a folder, write {path.rstrip('/')}/*.tsv or so; {_listing(filesystem, inner)}"
            )
        else:
            matches = []
        if not matches:
            verb = "matches" if glob.has_magic(inner) else "is"
            raise DataUnavailableError(path, f"{verb} no file; {_nearest(filesystem, inner)}")
        return {uri_of(filesystem, match): _size(filesystem, match) for match in matches}
    except OSError as error:
        raise DataUnavailableError(path, f"cannot be read: {error.strerror or error}") from error


def uri_of(filesystem: Any, path: str) -> str:
    """Returns a file's name for every process: an absolute path if it is local, else a URI."""
    if not isinstance(filesystem, LocalFileSystem):
        return str(filesystem.unstrip_protocol(path))
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if ".." in folder.split("/") else path


def _size(filesystem: Any, path: str) -> int:
    if isinstance(filesystem, LocalFileSystem) and not os.access(path, os.R_OK):
        raise DataUnavailableError(path, "cannot be read: permission denied")
    size = filesystem.size(path)
    if size is None:
        raise DataUnavailableError(
            uri_of(filesystem, path), "its server does not tell its size, so no range can be read"
        )
    return int(size)


def _nearest(filesystem: Any, path: str) -> str:
    """Describes the contents of the closest existing folder above a path."""
    folder = path.rstrip("/")
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        if not glob.has_magic(folder) and filesystem.isdir(folder or "/"):
            return _listing(filesystem, folder or "/")
    return "nor is there a folder above it"


def _listing(filesystem: Any, folder: str) -> str:
    names = sorted(entry.rstrip("/").rpartition("/")[2] for entry in filesystem.ls(folder, detail=False))
    if not names:
        return f"{folder} is empty"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} holds {', '.join(names[:_SHOWN])}{more}"


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Reads exactly the bytes [offset, offset + length) of a file. Raises DataUnavailableError."""
    filesystem, path = open_filesystem(uri)
    try:
        data: bytes = filesystem.cat_file(path, start=offset, end=offset + length)
    except OSError as error:
        raise DataUnavailableError(uri, f"cannot be read: {error.strerror or error}") from error
    if len(data) != length:
        raise DataUnavailableError(uri, f"is shorter than when it was indexed: no byte {offset + length:,}")
    return data


@dataclass(frozen=True)
class Target:
    """A file to write: `name` is the user's name for it, `uri` the name that `expand` gives it once it exists."""

    name: str
    uri: str
    filesystem: Any
    path: str

    @classmethod
    def of(cls, name: str) -> "Target":
        """Returns the target of a path or an fsspec URI. Raises DataUnavailableError for an unknown file system."""
        filesystem, path = open_filesystem(name)
        return cls(name, uri_of(filesystem, path), filesystem, path)

    def __str__(self) -> str:
        return self.name

    @property
    def local(self) -> bool:
        """Whether the target is on this machine."""
        return isinstance(self.filesystem, LocalFileSystem)

    def exists(self) -> bool:
        """Whether a file or folder exists at the target. Raises OSError."""
        return is_there(self.filesystem, self.path)

    def is_folder(self) -> bool:
        """Whether the target is a folder. Raises OSError."""
        return bool(self.filesystem.isdir(self.path))

    def size(self) -> int:
        """Returns the file's size in bytes, once it exists. Raises OSError."""
        return int(self.filesystem.size(self.path))

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yields a local file to write, which replaces the target when the context is left without an error.

        Raises OSError.
        """
        hidden = Path(self.path).with_name(f".{Path(self.path).name}.partial")
        if self.local:
            try:
                yield hidden
                hidden.replace(self.path)
            finally:
                hidden.unlink(missing_ok=True)
            return
        with tempfile.TemporaryDirectory(prefix="emberscale-") as folder:
            draft = Path(folder, hidden.name)
            yield draft
            self.filesystem.put_file(str(draft), str(hidden))
            self.filesystem.mv(str(hidden), self.path)
