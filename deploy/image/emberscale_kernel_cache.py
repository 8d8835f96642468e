"""Where Numba finds the compiled kernels in the image.

They are compiled while the image is built and kept in a folder that pods, whose root is read-only, cannot write. Numba
only takes a cache that it can write, and rightly so: on another kind of CPU it compiles again. So the first process of
a container copies them to `NUMBA_CACHE_DIR`, which must be writable (a few MB).

The image sets `NUMBA_CACHE_LOCATOR_CLASSES=emberscale_kernel_cache.SeededCacheLocator` and `EMBERSCALE_KERNELS`, the
folder they are copied from.
"""

import os
import shutil
import tempfile
from pathlib import Path

from numba.core.caching import UserProvidedCacheLocator

KERNELS = "EMBERSCALE_KERNELS"


class SeededCacheLocator(UserProvidedCacheLocator):
    """A cache in `NUMBA_CACHE_DIR` that starts with what the image holds."""

    def ensure_cache_path(self) -> None:
        """Copies the image's kernels of this source folder, once. Raises OSError where nothing can be written."""
        cache = Path(self.get_cache_path())  # type: ignore[no-untyped-call]  # Numba ships none
        seed = Path(os.environ.get(KERNELS, ""), cache.name)
        if seed.is_dir() and not cache.exists():
            _copy_whole(seed, cache)
        super().ensure_cache_path()  # type: ignore[no-untyped-call]  # Numba ships none


def _copy_whole(source: Path, target: Path) -> None:
    """Copies a folder such that it is there whole or not at all, also when several processes do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        copy = Path(scratch, target.name)
        shutil.copytree(source, copy, copy_function=shutil.copyfile)
        try:
            copy.rename(target)
        except OSError:
            if not target.is_dir():
                raise
