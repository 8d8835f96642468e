"""What a process does before it imports what it needs; so this imports next to nothing itself."""

import gc
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

KERNEL_CACHE = "NUMBA_CACHE_DIR"
"""Names the folder of compiled kernels; Numba reads it when it is imported."""


def kernel_cache(environment: Mapping[str, str]) -> Path | None:
    """Makes the folder of compiled kernels that a user's commands and jobs share; None if it cannot be written."""
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/nonexistent"), ".cache"))
    folder = Path(home, "emberscale", "numba")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def share_kernels(environment: MutableMapping[str, str]) -> None:
    """Makes Numba use the shared folder, unless the environment names another or the folder cannot be written."""
    folder = kernel_cache(environment)
    if folder is not None:
        environment.setdefault(KERNEL_CACHE, str(folder))


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses garbage collection for the imports of a process, and exempts their objects from it for good.

    Imports leave almost no garbage, and the search for it takes a seventh of their time. A collection in a process that
    is forked later would touch, and so copy, every shared page.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
