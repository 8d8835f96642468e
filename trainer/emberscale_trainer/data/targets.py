"""Files to write, on any file system that fsspec knows; each appears whole or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from emberscale_trainer.data.files import open_filesystem, uri_of


@dataclass(frozen=True)
class Target:
    """A file that may be written: `name` is what people call it, `uri` what `expand` would call it once it is there."""

    name: str
    uri: str
    filesystem: Any
    path: str

    @classmethod
    def of(cls, name: str) -> "Target":
        """The target of a path or an fsspec URI. Raises DataUnavailableError for a file system that is not known."""
        filesystem, path = open_filesystem(name)
        return cls(name, uri_of(filesystem, path), filesystem, path)

    def __str__(self) -> str:
        return self.name

    @property
    def local(self) -> bool:
        """Whether it is a file of this machine."""
        return isinstance(self.filesystem, LocalFileSystem)

    def exists(self) -> bool:
        """Whether something is there. Raises OSError."""
        return bool(self.filesystem.exists(self.path))

    def is_folder(self) -> bool:
        """Whether a folder is there. Raises OSError."""
        return bool(self.filesystem.isdir(self.path))

    def size(self) -> int:
        """In bytes, once it is there. Raises OSError."""
        return int(self.filesystem.size(self.path))

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A local file to write, which takes the target's place when the context is left without an error.

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
