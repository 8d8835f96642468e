"""Compiles the kernels of the data side, and supplies what Numba lacks for them."""

# mypy: allow-untyped-calls
# most of what extends Numba has no annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it ships none
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)


def kernel(function: F) -> F:
    """Compiles a function that runs without the interpreter's lock, and caches it on disk if the disk is writable.

    Numba notices only changes of the function's own file, so the functions that it calls must be in the same file.
    """
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no folder to cache in can be written: compile in every process
        return cast(F, njit(nogil=True)(function))


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    def lower(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(target, builder, value=arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), _POINTER)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, of_data = ir.Constant(_INT32, 0), ir.Constant(_INT32, 3), ir.Constant(_INT32, 1)
        builder.call(function, [address, read, keep, of_data])
        return target.get_dummy_value()

    return types.none(array, index), lower


prefetch: Callable[[Any, int], None] = cast(Any, intrinsic(_prefetch))
"""(array, index): prefetches the cache line of an element; for kernels. Never faults."""


def _load_word(_typing: Any, array: Any, index: Any) -> Any:
    def lower(_target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(_target, builder, value=arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(address, align=1)

    return types.uint64(array, index), lower


load_word: Callable[[Any, int], np.uint64] = cast(Any, intrinsic(_load_word))
"""(array of bytes, index): loads the eight bytes from there on, the first one lowest; for kernels. Not checked."""
