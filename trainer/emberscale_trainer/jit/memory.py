"""Raw memory inside kernels: loads, stores and blocks of memory at int64 addresses.

The kernels work on many arrays at once (segments, sub-indexes, request buffers), more than they can take as arguments,
so they access them by address. Only this module and `vector` turn an address into a pointer. The caller of a kernel is
responsible for the addresses: it keeps the arrays alive and checks all sizes first.

No alignment is assumed: in a request, 8-byte keys follow 4-byte counts. All integers are int64 inside kernels, so that
Numba never sees a mixture of signed and unsigned integers; `shift_right` is the unsigned shift.
"""

# mypy: allow-untyped-calls
# most of what extends Numba has no annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it ships none
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from emberscale_trainer.jit import instruction

CACHE_LINE = 64

_address_of = ctypes.addressof
_byte_in: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer  # arrays are typed as buffers from Python 3.12 on


def address_of(array: NDArray[np.generic]) -> int:
    """Returns the address of an array's elements; the caller keeps the array alive while it uses the address."""
    try:
        # Takes a third of the time of the interface below, which matters in small batches.
        return _address_of(_byte_in(array))
    except (TypeError, ValueError):
        # An array that is empty, read-only, or not contiguous offers no such buffer.
        return int(array.__array_interface__["data"][0])


_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


def load_of(numba_type: Any, kind: Any) -> Any:
    """An instruction that loads a value of an LLVM type from an address; an integer becomes an int64."""

    def load(builder: Any, address: Any) -> Any:
        value = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
        return builder.zext(value, _INT64) if isinstance(kind, ir.IntType) else value

    return instruction(numba_type(types.int64), load)


def store_of(numba_type: Any, kind: Any) -> Any:
    """An instruction that stores a value of an LLVM type to an address; of an int64 the low bits."""

    def store(builder: Any, address: Any, value: Any) -> None:
        stored = builder.trunc(value, kind) if isinstance(kind, ir.IntType) else value
        builder.store(stored, builder.inttoptr(address, kind.as_pointer()), align=1)

    return instruction(types.none(types.int64, numba_type), store)


load_int64: Callable[[int], int] = load_of(types.int64, _INT64)
load_uint32: Callable[[int], int] = load_of(types.int64, _INT32)
load_uint8: Callable[[int], int] = load_of(types.int64, ir.IntType(8))
store_int64: Callable[[int, int], None] = store_of(types.int64, _INT64)
store_uint32: Callable[[int, int], None] = store_of(types.int64, _INT32)
store_uint8: Callable[[int, int], None] = store_of(types.int64, ir.IntType(8))
load_float32: Callable[[int], float] = load_of(types.float32, ir.FloatType())
load_float64: Callable[[int], float] = load_of(types.float64, ir.DoubleType())
store_float32: Callable[[int, float], None] = store_of(types.float32, ir.FloatType())


def _element_address(_typing: Any, array: Any, index: Any) -> Any:
    def lower(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(target, builder, value=arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), _INT64)

    return types.int64(array, index), lower


def _shift_right(builder: Any, value: Any, bits: Any) -> Any:
    return builder.lshr(value, bits)


def _prefetch(builder: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = ir.Constant(_INT32, 0), ir.Constant(_INT32, 3), ir.Constant(_INT32, 1)
    builder.call(function, [builder.inttoptr(address, _POINTER), read, keep, data])


def _copy(builder: Any, to: Any, source: Any, size: Any) -> None:
    cgutils.raw_memcpy(builder, builder.inttoptr(to, _POINTER), builder.inttoptr(source, _POINTER), size, 1)


def _zero(builder: Any, address: Any, size: Any) -> None:
    cgutils.memset(builder, builder.inttoptr(address, _POINTER), size, 0)


element_address: Callable[[NDArray[Any], int], int] = cast(Any, intrinsic(_element_address))
"""(array of one dimension, index): the address of an element, inside kernels; not checked."""

float32: Callable[[float], float] = cast(Any, np.float32)
"""(number): rounded to float32; Python has only floats, but kernels distinguish float32 and float64."""

shift_right: Callable[[int, int], int] = instruction(types.int64(types.int64, types.int64), _shift_right)
"""(value, bits): the value as an unsigned number, shifted right by 0..63 bits."""

prefetch: Callable[[int], None] = instruction(types.none(types.int64), _prefetch)
"""(address): prefetches the cache line; never faults."""

copy: Callable[[int, int, int], None] = instruction(types.none(types.int64, types.int64, types.int64), _copy)
"""(to, source, size in bytes): copies; the two must not overlap."""

zero: Callable[[int, int], None] = instruction(types.none(types.int64, types.int64), _zero)
"""(address, size in bytes)"""

# libc's own, so that a sub-index can double inside a kernel without coming back to Python
allocate: Callable[[int, int], int] = cast(
    Any, types.ExternalFunction("aligned_alloc", types.int64(types.int64, types.int64))
)
"""(alignment, size): allocates a block with undefined content; 0 if there is no memory."""

release: Callable[[int], None] = cast(Any, types.ExternalFunction("free", types.void(types.int64)))
"""(address): frees a block of `allocate`; ignores 0."""
