"""Eight float32 in one register, as a Numba type.

Left to itself, LLVM does not vectorise the loops over a row: it cannot know that weights, state and gradient do not
overlap, and rows are too short for checking it at run time to pay. With this type one generic function serves eight
elements or one, since `+ - * /`, `root`, `least` and `greatest` take both, and mixtures.
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

from emberscale_trainer.table.compiled import instruction

LANES = 8
VECTOR_BYTES = 32
WHOLE = ~(LANES - 1)
"""`n & WHOLE` is the largest multiple of LANES up to n."""

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
    first = builder.insert_element(lanes, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, lanes, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


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


def _load8(_typing: Any, address: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _VECTOR.as_pointer()), align=1)

    return float32x8(types.int64), lower


def _store8(_typing: Any, address: Any, value: Any) -> Any:
    def lower(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _VECTOR.as_pointer()), align=1)
        return target.get_dummy_value()

    return types.none(types.int64, float32x8), lower


def _splat8(_typing: Any, value: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return float32x8(types.float32), lower


def _sum8(_typing: Any, value: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        lanes = arguments[0]
        for half in (4, 2, 1):  # in this order on every machine, so that results do not depend on it
            order = [*range(half, LANES), *range(half)]
            turned = builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(ir.IntType(32), LANES), order))
            lanes = builder.fadd(lanes, turned)
        return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))

    return types.float32(float32x8), lower


def _root(_typing: Any, value: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        name = "llvm.sqrt.v8f32" if kind == _VECTOR else "llvm.sqrt.f32"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
        return builder.call(function, [arguments[0]])

    return value(value), lower


def _chosen(comparison: str) -> Any:
    def choose(_typing: Any, left: Any, right: Any) -> Any:
        def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            first, second = arguments
            if _VECTOR in (first.type, second.type):
                first, second = _splat(builder, first), _splat(builder, second)
            return builder.select(builder.fcmp_ordered(comparison, first, second), first, second)

        result = float32x8 if float32x8 in (left, right) else types.float32
        return result(left, right), lower

    return instruction(choose)


def _pick8(_typing: Any, left: Any, right: Any, then: Any, otherwise: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        left, right, then, otherwise = (_splat(builder, argument) for argument in arguments)
        return builder.select(builder.fcmp_ordered("<", left, right), then, otherwise)

    return float32x8(left, right, then, otherwise), lower


def _turn8(_typing: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, source_stride, target, target_stride = arguments

        def row(address: Any, stride: Any, number: int) -> Any:
            at = builder.add(address, builder.mul(stride, ir.Constant(ir.IntType(64), number)))
            return builder.inttoptr(at, _VECTOR.as_pointer())

        def mixed(left: Any, right: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), LANES), order))

        rows = [builder.load(row(source, source_stride, number), align=1) for number in range(LANES)]
        # each step doubles the blocks that are in place, by a shuffle that takes one instruction
        pairs = [
            mixed(rows[number], rows[number + 1], order)
            for number in range(0, LANES, 2)
            for order in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
        ]
        fours = [
            mixed(pairs[number], pairs[number + 2], order)
            for number in (0, 1, 4, 5)
            for order in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        ]
        columns = [
            mixed(fours[number], fours[number + 4], order)
            for order in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
            for number in range(4)
        ]
        for number, column in enumerate(columns):
            builder.store(column, row(target, target_stride, number), align=1)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), lower


load8: Callable[[int], float] = instruction(_load8)
store8: Callable[[int, float], None] = instruction(_store8)
splat8: Callable[[float], float] = instruction(_splat8)
sum8: Callable[[float], float] = instruction(_sum8)
root: Callable[[float], float] = instruction(_root)
least: Callable[[float, float], float] = _chosen("<")
greatest: Callable[[float, float], float] = _chosen(">")
pick8: Callable[[float, float, float, float], float] = instruction(_pick8)
"""(left, right, then, otherwise): lane by lane, `then` where left < right, and elsewhere `otherwise`."""
turn8: Callable[[int, int, int, int], None] = instruction(_turn8)
"""(source, its stride, target, its stride, in bytes): eight rows of eight float32 become eight columns."""


def _add_product(_typing: Any, total: Any, left: Any, right: Any) -> Any:
    def lower(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = [_splat(builder, argument) for argument in arguments]
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v8f32")
        return builder.call(function, [values[1], values[2], values[0]])

    return float32x8(total, left, right), lower


add_product: Callable[[float, float, float], float] = instruction(_add_product)
"""total + left * right, rounded once where the machine can; any of them may be one float32."""
