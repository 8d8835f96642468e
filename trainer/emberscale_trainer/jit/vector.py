"""Eight float32 in one register, as a Numba type.

LLVM by itself does not vectorise the loops over a row: it cannot know that weights, state and gradient do not overlap,
and rows are too short for a check at run time to pay off. With this type, one generic function serves eight elements or
one, since `+ - * /`, `root`, `least` and `greatest` accept both, and mixtures.
"""

# mypy: allow-untyped-calls
# most of what extends Numba has no annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it ships none
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from emberscale_trainer.jit import instruction
from emberscale_trainer.jit.memory import load_of, store_of

LANES = 8
VECTOR_BYTES = 32
WHOLE = ~(LANES - 1)
"""`n & WHOLE` is the largest multiple of LANES up to n."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class Float32x8Type(types.Type):
    """Numba's type of eight float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x8")


float32x8 = Float32x8Type()


@register_model(Float32x8Type)
class _Float32x8Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)


def _splat(builder: Any, value: Any) -> Any:
    if value.type == _VECTOR:
        return value
    lanes = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(lanes, value, ir.Constant(_INT32, 0))
    return _shuffled(builder, first, lanes, [0] * LANES)


def _shuffled(builder: Any, left: Any, right: Any, order: list[int]) -> Any:
    """Picks eight of the lanes of two vectors, numbered from 0 to 15."""
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_INT32, LANES), order))


def _register(python_operator: Any, instruction: str) -> None:
    mixtures = [(float32x8, float32x8), (float32x8, types.float32), (types.float32, float32x8)]

    class Arithmetic(ConcreteTemplate):
        cases = [signature(float32x8, *mixture) for mixture in mixtures]  # noqa: RUF012  # numba's own form

    infer_global(python_operator)(Arithmetic)

    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*(_splat(builder, argument) for argument in arguments))

    for mixture in mixtures:
        lower_builtin(python_operator, *mixture)(lower)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _register(_operator, _instruction)


def _sum8(builder: Any, lanes: Any) -> Any:
    for half in (4, 2, 1):  # in this order on every machine, so that results do not depend on it
        turned = _shuffled(builder, lanes, lanes, [*range(half, LANES), *range(half)])
        lanes = builder.fadd(lanes, turned)
    return builder.extract_element(lanes, ir.Constant(_INT32, 0))


def _called(builder: Any, name: str, *arguments: Any) -> Any:
    """Calls a function of LLVM whose arguments have the type of its result."""
    kind = arguments[0].type
    function_type = ir.FunctionType(kind, [kind] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _root(builder: Any, value: Any) -> Any:
    return _called(builder, "llvm.sqrt.v8f32" if value.type == _VECTOR else "llvm.sqrt.f32", value)


def _nearest(builder: Any, value: Any) -> Any:
    return _called(builder, "llvm.nearbyint.v8f32", value)


def _add_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    total, left, right = (_splat(builder, value) for value in (total, left, right))
    return _called(builder, "llvm.fmuladd.v8f32", left, right, total)


def _chosen(comparison: str) -> Any:
    def choose(builder: Any, left: Any, right: Any) -> Any:
        if _VECTOR in (left.type, right.type):
            left, right = _splat(builder, left), _splat(builder, right)
        return builder.select(builder.fcmp_ordered(comparison, left, right), left, right)

    def signature_of(left: Any, right: Any) -> Any:
        return (float32x8 if float32x8 in (left, right) else types.float32)(left, right)

    return instruction(signature_of, choose)


def _pick8(builder: Any, left: Any, right: Any, then: Any, otherwise: Any) -> Any:
    left, right, then, otherwise = (_splat(builder, value) for value in (left, right, then, otherwise))
    return builder.select(builder.fcmp_ordered("<", left, right), then, otherwise)


def _turn8(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    def row(address: Any, stride: Any, number: int) -> Any:
        at = builder.add(address, builder.mul(stride, ir.Constant(_INT64, number)))
        return builder.inttoptr(at, _VECTOR.as_pointer())

    rows = [builder.load(row(source, source_stride, number), align=1) for number in range(LANES)]
    # each step doubles the blocks that are in place, by a shuffle that takes one instruction
    pairs = [
        _shuffled(builder, rows[number], rows[number + 1], order)
        for number in range(0, LANES, 2)
        for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
    ]
    fours = [
        _shuffled(builder, pairs[number], pairs[number + 2], order)
        for number in (0, 1, 4, 5)
        for order in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
    ]
    columns = [
        _shuffled(builder, fours[number], fours[number + 4], order)
        for order in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        for number in range(4)
    ]
    for number, column in enumerate(columns):
        builder.store(column, row(target, target_stride, number), align=1)


def _join8(builder: Any, columns: Any, bits: Any, target: Any) -> None:
    narrow, wide = (ir.VectorType(kind, LANES) for kind in (_INT32, _INT64))

    def code(number: int) -> Any:
        at = builder.add(columns, ir.Constant(_INT64, VECTOR_BYTES * number))
        value = builder.load(builder.inttoptr(at, _VECTOR.as_pointer()), align=1)
        return builder.fptosi(value, narrow)

    def spread(size: Any, kind: Any) -> Any:
        lane = builder.insert_element(ir.Constant(kind, ir.Undefined), size, ir.Constant(_INT32, 0))
        return _shuffled(builder, lane, lane, [0] * LANES)

    def half(first: int) -> Any:
        one = spread(builder.trunc(bits, _INT32), narrow)
        joined = code(first + 3)
        for number in (first + 2, first + 1, first):
            joined = builder.or_(builder.shl(joined, one), code(number))
        return builder.zext(joined, wide)

    four = spread(builder.mul(bits, ir.Constant(_INT64, 4)), wide)
    joined = builder.or_(half(0), builder.shl(half(4), four))
    builder.store(joined, builder.inttoptr(target, wide.as_pointer()), align=1)


load8: Callable[[int], float] = load_of(float32x8, _VECTOR)
store8: Callable[[int, float], None] = store_of(float32x8, _VECTOR)
splat8: Callable[[float], float] = instruction(float32x8(types.float32), _splat)
sum8: Callable[[float], float] = instruction(types.float32(float32x8), _sum8)
root: Callable[[float], float] = instruction(lambda value: value(value), _root)
least: Callable[[float, float], float] = _chosen("<")
greatest: Callable[[float, float], float] = _chosen(">")
pick8: Callable[[float, float, float, float], float] = instruction(float32x8, _pick8)
"""(left, right, then, otherwise): lane by lane, `then` where left < right, and elsewhere `otherwise`."""
add_product: Callable[[float, float, float], float] = instruction(float32x8, _add_product)
"""total + left * right, rounded once where the machine can; any of them may be one float32."""
nearest: Callable[[float], float] = instruction(lambda value: value(value), _nearest)
"""(eight float32): each rounded to an integer, halves to the even one."""
join8: Callable[[int, int, int], None] = instruction(types.none(*[types.int64] * 3), _join8)
"""(columns, bits, target): of eight columns of eight float32, which are integers below 2^bits, bits being 1 to 8,
writes a string of bits for each lane as an int64: the code in column i has the bits from i * bits on."""
turn8: Callable[[int, int, int, int], None] = instruction(types.none(*[types.int64] * 4), _turn8)
"""(source, its stride, target, its stride, in bytes): eight rows of eight float32 become eight columns."""
