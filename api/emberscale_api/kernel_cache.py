"""The folder of compiled kernels that all commands and jobs of a user share."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
"""Numba reads it when it is imported."""


def kernel_cache(environment: Mapping[str, str]) -> Path | None:
    """Makes the folder in the user's cache folder; None if it cannot be written."""
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/nonexistent"), ".cache"))
    folder = Path(home, "emberscale", "numba")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def share_kernels(environment: MutableMapping[str, str]) -> None:
    """Makes Numba use the folder, unless the environment names another or the folder cannot be written."""
    folder = kernel_cache(environment)
    if folder is not None:
        environment.setdefault(VARIABLE, str(folder))
