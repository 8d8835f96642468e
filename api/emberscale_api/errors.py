"""The errors whose text people read: input is malformed, or something required is unavailable.

    InvalidError        a manifest, settings, certificates, a request, a checkpoint, data, code of the user's own, ...
    UnavailableError    Redis, a database, the API server, storage, a port, a folder, ...

The errors of all components are below these two where a caller must tell them from others. What only passes between the
parts of one component, such as the end of a connection or of a lease, is not.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

_OF_DISKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})


class InvalidError(ValueError):
    """The input is malformed or contradicts itself; the text has one line per problem and says what is allowed.

    `trace` holds the frames of the user's own code, if that code failed.
    """

    def __init__(self, problems: str, trace: str = "") -> None:
        super().__init__(problems)
        self.trace = trace


class UnavailableError(Exception):
    """A required resource is missing, in use, or does not answer; the text names it. Retrying later may help."""


class UnwritableError(UnavailableError):
    """Files could not be written after processes had started; the text says which and why, in one line."""


@contextmanager
def os_errors_named(problem: str) -> Iterator[None]:
    """Turns an OSError into InvalidError: the problem, such as "job.yaml: cannot be read", and the system's reason."""
    try:
        yield
    except OSError as error:
        raise InvalidError(f"{problem}: {error.strerror or error}") from error


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, which is UTF-8. Raises InvalidError, which names the file."""
    try:
        with os_errors_named(f"{path}: cannot be read"):
            return path.read_text(encoding)
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path}: is not UTF-8 text") from error


def problem_of(error: BaseException) -> str:
    """Returns what an error says, or its kind if it says nothing, as a MemoryError of Python's own does."""
    return str(error) or type(error).__name__


def disk_problem(error: OSError) -> str | None:
    """Describes a problem of the disk, such as a full one; None for an error of another kind."""
    return error.strerror if error.errno in _OF_DISKS else None


def is_of_storage(error: BaseException) -> bool:
    """Whether the storage failed: with an OSError, an error of a library's own, or any error within a file system.

    For example, the library behind s3fs raises its own errors if it cannot connect, and RuntimeError once its session
    is closed. Other errors of Python, and those of this project, do not mean that the storage failed.
    """
    library = type(error).__module__.partition(".")[0]
    is_foreign = library != "builtins" and not library.startswith("emberscale")
    return isinstance(error, OSError) or (isinstance(error, Exception) and (is_foreign or _is_within_fsspec(error)))


def is_there(filesystem: Any, path: str) -> bool:
    """Whether a file or folder exists in an fsspec file system; raises the error of a look-up that fails.

    The file system's own `exists` takes any error for a missing file.
    """
    try:
        filesystem.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_within_fsspec(error: BaseException) -> bool:
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").partition(".")[0] == "fsspec" for frame in frames)
