"""Numba, with this project's options and a cache that sees every source, and what it lacks for kernels.

A *kernel* is called from Python, or by another kernel, with arrays. An *entry* is called from Python with integers only
(numbers and addresses), so that a call costs well under a microsecond and no second signature ever exists. A *part* is
inlined into whatever calls it; a *routine* is called, which keeps rarely needed code out of the hot loops. Kernels and
entries run without the interpreter's lock.

* `memory`: loads, stores and blocks of memory at addresses; `vector`: eight floats in one register.
"""

import hashlib
import inspect
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# no exception on a division by zero: the check would keep the loops from being vectorised
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# without wrappers for Python and C, which take a quarter of the compile time
_ONLY_FOR_KERNELS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}

_ENTRIES: list[tuple[Any, Any]] = []
_WARMING = threading.Lock()


def part(function: F) -> F:
    """Compiles a function that is inlined wherever a kernel calls it."""
    return cast(F, njit(forceinline=True, **_ONLY_FOR_KERNELS)(function))


def routine(function: F) -> F:
    """Compiles a function that kernels call."""
    return cast(F, njit(**_ONLY_FOR_KERNELS)(function))


def entry(function: F) -> F:
    """Compiles an entry, which takes and returns int64 only, in `warm_up`."""
    dispatcher = _cached(function, **_OPTIONS)
    arguments = function.__code__.co_argcount
    _ENTRIES.append((dispatcher, types.int64(*[types.int64] * arguments)))
    return cast(F, dispatcher)


def kernel(function: F) -> F:
    """Compiles a kernel when it is first called, once for each combination of the arguments' types.

    Here alone, a division by zero raises ZeroDivisionError.
    """
    return cast(F, _cached(function, nogil=True))


def typed_kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a kernel when its module is imported, for one signature in Numba's notation."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = _cached(function, **_OPTIONS)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compiled


def instruction(signature: Any, emit: Callable[..., Any]) -> Any:
    """A Numba intrinsic: `emit(builder, *arguments)` emits LLVM code, and returns the result or None.

    `signature` is Numba's, or a function that makes it of the arguments' types.
    """

    def typed(_typing: Any, *arguments: Any) -> Any:
        def lower(target: Any, builder: Any, _signature: Any, values: Any) -> Any:
            result = emit(builder, *values)
            return target.get_dummy_value() if result is None else result

        return (signature(*arguments) if callable(signature) else signature), lower

    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # Numba looks the arguments up in it
    return intrinsic(typed)


def warm_up() -> None:
    """Compiles all entries of imported modules, or loads them from the cache. Takes seconds if the cache is empty."""
    with _WARMING:
        for dispatcher, signature in _ENTRIES:
            if not dispatcher.signatures:
                dispatcher.compile(signature)
                dispatcher.disable_compile()


def _cached(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a dispatcher that caches on disk; where no folder can be written, every process compiles.

    Numba's cache notices only changes of the file that contains the function. Here the stamp covers all files of its
    folder and of this one, so that a changed part is never served from a stale cache.
    """
    try:
        dispatcher: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in can be written
        return njit(**options)(function)
    folders = Path(__file__).parent, Path(function.__code__.co_filename).parent
    dispatcher._cache._cache_file._source_stamp = digest_of_sources(*folders)
    return dispatcher


@cache
def digest_of_sources(*folders: Path) -> str:
    """A hash over the names and contents of the Python files in folders, read once in the life of a process."""
    digest = hashlib.sha256()
    for source in (source for folder in folders for source in sorted(folder.glob("*.py"))):
        digest.update(f"{source.name} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()
