"""Edits of the manifest of a run, which other commands make while it is under way."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from emberscale_api.job import TrainingJob
from emberscale_operator.local.folder import RunFolder


def edit_manifest(path: Path, edit: Callable[[TrainingJob], TrainingJob]) -> tuple[TrainingJob, TrainingJob]:
    """Replaces a manifest file; returns what it was and what it is. Edits at the same time follow each other.

    Whoever reads the file sees the old manifest or the new one, also after a power failure. Raises OSError, and what
    `edit` raises.
    """
    with _alone_in(path.parent) as folder:
        before = TrainingJob.from_json(path.read_text(encoding="utf-8"))
        after = edit(before)
        beside = path.with_name(f".{path.name}.new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(after.to_json())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        os.fsync(folder)
    return before, after


def end_edits(folder: RunFolder) -> None:
    """Removes the token that a run has left, without which its manifest is not edited; an edit under way is waited for.

    Raises OSError.
    """
    if folder.state.is_dir():
        with _alone_in(folder.state):
            folder.token.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """Waits for other editors of a manifest in the folder; yields the folder's descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
