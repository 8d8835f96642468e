"""Raw memory inside kernels: loads, stores and blocks of memory at int64 addresses.

The kernels work on many arrays at once (segments, sub-indexes, request buffers), more than can be passed as arguments;
they are reached by address. This module and `vector` are the only ones that turn an address into a pointer. Whoever
calls a kernel vouches for the addresses: TableStore keeps the arrays alive and checks all sizes first.

No alignment is assumed: in a request, 8-byte keys follow 4-byte counts. All integers are int64 inside kernels, so that
Numba never meets a mixture of signed and unsigned; `shift_right` is the unsigned shift.
"""

# mypy: allow-untyped-calls
# most of what extends Numba has no annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it ships none
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from emberscale_trainer.table.compiled import instruction

CACHE_LINE = 64


def address_of(array: NDArray[np.generic]) -> int:
    """Returns the address of an array's elements; the caller keeps the array alive while it uses the address."""
    return int(array.__array_interface__["data"][0])


_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


def _integer_load(bits: int) -> Any:
    @instruction
    def load(_typing: Any, address: Any) -> Any:
        def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            return value if bits == 64 else builder.zext(value, _INT64)

        return types.int64(types.int64), lower

    return load


def _integer_store(bits: int) -> Any:
    @instruction
    def store(_typing: Any, address: Any, value: Any) -> Any:
        def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            stored = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(stored, builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()), align=1)
            return target.get_dummy_value()

        return types.none(types.int64, types.int64), lower

    return store


def _float_load(numba_type: Any, llvm_type: Any) -> Any:
    @instruction
    def load(_typing: Any, address: Any) -> Any:
        def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], llvm_type.as_pointer()), align=1)

        return numba_type(types.int64), lower

    return load


def _store_float32(_typing: Any, address: Any, value: Any) -> Any:
    def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.FloatType().as_pointer()), align=1)
        return target.get_dummy_value()

    return types.none(types.int64, types.float32), lower


load_int64: Callable[[int], int] = _integer_load(64)
load_uint32: Callable[[int], int] = _integer_load(32)
load_uint8: Callable[[int], int] = _integer_load(8)
store_int64: Callable[[int, int], None] = _integer_store(64)
store_uint32: Callable[[int, int], None] = _integer_store(32)
store_uint8: Callable[[int, int], None] = _integer_store(8)
load_float32: Callable[[int], float] = _float_load(types.float32, ir.FloatType())
load_float64: Callable[[int], float] = _float_load(types.float64, ir.DoubleType())
store_float32: Callable[[int, float], None] = instruction(_store_float32)


def _shift_right(_typing: Any, value: Any, bits: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), lower


def _prefetch(_typing: Any, address: Any) -> Any:
    def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = ir.Constant(_INT32, 0), ir.Constant(_INT32, 3), ir.Constant(_INT32, 1)
        builder.call(function, [builder.inttoptr(arguments[0], _POINTER), read, keep, data])
        return target.get_dummy_value()

    return types.none(types.int64), lower


def _copy(_typing: Any, target_address: Any, source_address: Any, size: Any) -> Any:
    def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source, size = arguments
        cgutils.raw_memcpy(builder, builder.inttoptr(to, _POINTER), builder.inttoptr(source, _POINTER), size, 1)
        return target.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), lower


def _zero(_typing: Any, address: Any, size: Any) -> Any:
    def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(arguments[0], _POINTER), arguments[1], 0)
        return target.get_dummy_value()

    return types.none(types.int64, types.int64), lower


def _libc(name: str, signature: Any) -> Any:
    return types.ExternalFunction(name, signature)


float32: Callable[[float], float] = cast(Any, np.float32)
"""(number): rounded to float32; in Python all are floats, inside kernels they differ."""

shift_right: Callable[[int, int], int] = instruction(_shift_right)
"""(value, bits): the value as an unsigned number, shifted right by 0..63 bits."""

prefetch: Callable[[int], None] = instruction(_prefetch)
"""(address): asks for the cache line; never faults."""

copy: Callable[[int, int, int], None] = instruction(_copy)
"""(to, source, size in bytes): the two do not overlap."""

zero: Callable[[int, int], None] = instruction(_zero)
"""(address, size in bytes)"""

# libc's own, so that a sub-index can double inside a kernel without coming back to Python
allocate: Callable[[int, int], int] = _libc("aligned_alloc", types.int64(types.int64, types.int64))
"""(alignment, size): a new block, its content undefined; 0 if there is no memory."""

release: Callable[[int], None] = _libc("free", types.void(types.int64))
"""(address): gives a block of `allocate` back; 0 is let be."""
