"""The kernels of DLRM's interactions: see `interaction`, whose functions call them.

Forward, a register holds one element of eight samples, so no sum crosses lanes and no lane is idle. Backward, it holds
eight elements of one vector: transposing vectors, gradients and triangle would cost more than it saves. Vectors that
are places in rows are prefetched one block or sample ahead: rows come from another thread, and few are in the cache.
"""

from emberscale_trainer.jit import part, typed_kernel
from emberscale_trainer.jit.memory import (
    CACHE_LINE,
    copy,
    float32,
    load_float32,
    load_uint32,
    prefetch,
    store_float32,
)
from emberscale_trainer.jit.vector import LANES, VECTOR_BYTES, WHOLE, add_product, load8, splat8, store8, turn8

TILE = 4
"""Rows of the triangle of pairs that are summed at once: enough independent sums to hide the latency of an addition."""

_FLOAT = 4
_LINE = VECTOR_BYTES
"""Bytes of one element of LANES samples."""


@part
def _place(rows: int, offsets: int, number: int) -> int:
    """Returns the address of the vector whose offset is int32 number `number`."""
    return rows + _FLOAT * load_uint32(offsets + 4 * number)


@part
def _prefetch_vectors(rows: int, offsets: int, first: int, stop: int, row_bytes: int) -> None:
    """Prefetches the vectors of the offsets from number `first` to `stop`."""
    for number in range(first, stop):
        at = _place(rows, offsets, number)
        for line in range(0, row_bytes, CACHE_LINE):
            prefetch(at + line)
        prefetch(at + row_bytes - 1)


@part
def _copy_vector(target: int, source: int, row_bytes: int, whole: int) -> None:
    for at in range(0, whole, VECTOR_BYTES):
        store8(target + at, load8(source + at))
    for at in range(whole, row_bytes, _FLOAT):
        store_float32(target + at, load_float32(source + at))


@part
def _add_vector(target: int, source: int, row_bytes: int, whole: int) -> None:
    for at in range(0, whole, VECTOR_BYTES):
        store8(target + at, load8(target + at) + load8(source + at))
    for at in range(whole, row_bytes, _FLOAT):
        store_float32(target + at, load_float32(target + at) + load_float32(source + at))


@part
def _turn(source: int, stride: int, width: int, target: int) -> None:
    """Transposes `width` floats of LANES samples, `stride` bytes apart, to lines of one element of all samples."""
    whole = width & WHOLE
    for column in range(0, whole, LANES):
        turn8(source + _FLOAT * column, stride, target + _LINE * column, _LINE)
    for column in range(whole, width):
        for sample in range(LANES):
            value = load_float32(source + stride * sample + _FLOAT * column)
            store_float32(target + _LINE * column + _FLOAT * sample, value)


@part
def _whole_pairs(count: int) -> int:
    """Returns the number of pairs of so many vectors, rounded up to whole registers."""
    return (count * (count - 1) // 2 + LANES - 1) & WHOLE


@part
def _row(triangle: int, row: int) -> int:
    """Returns the address of a row's pairs in a triangle of lines."""
    return triangle + _LINE * (row * (row - 1) // 2)


@part
def _forward_block(
    first: int, others: int, first_width: int, others_width: int, dimension: int, scratch: int, out: int
) -> None:
    """Computes the rows of LANES samples; triangle rows beyond the last vector come from zeros, and are dropped."""
    count = (first_width + others_width) // dimension
    tiles = (count + TILE - 1) // TILE * TILE
    vector_bytes = _LINE * dimension
    vectors, products = scratch, scratch + tiles * vector_bytes
    _turn(first, _FLOAT * first_width, first_width, vectors)
    _turn(others, _FLOAT * others_width, others_width, vectors + _LINE * first_width)
    for tile in range(0, tiles, TILE):
        own = vectors + tile * vector_bytes
        row0, row1 = _row(products, tile), _row(products, tile + 1)
        row2, row3 = _row(products, tile + 2), _row(products, tile + 3)
        for column in range(0, tile, 2):
            sum00 = sum01 = sum10 = sum11 = splat8(float32(0))
            sum20 = sum21 = sum30 = sum31 = splat8(float32(0))
            other = vectors + column * vector_bytes
            for element in range(0, vector_bytes, _LINE):
                value0, value1 = load8(other + element), load8(other + vector_bytes + element)
                at = own + element
                value = load8(at)
                sum00, sum01 = add_product(sum00, value, value0), add_product(sum01, value, value1)
                value = load8(at + vector_bytes)
                sum10, sum11 = add_product(sum10, value, value0), add_product(sum11, value, value1)
                value = load8(at + 2 * vector_bytes)
                sum20, sum21 = add_product(sum20, value, value0), add_product(sum21, value, value1)
                value = load8(at + 3 * vector_bytes)
                sum30, sum31 = add_product(sum30, value, value0), add_product(sum31, value, value1)
            at = _LINE * column
            store8(row0 + at, sum00)
            store8(row0 + at + _LINE, sum01)
            store8(row1 + at, sum10)
            store8(row1 + at + _LINE, sum11)
            store8(row2 + at, sum20)
            store8(row2 + at + _LINE, sum21)
            store8(row3 + at, sum30)
            store8(row3 + at + _LINE, sum31)
        sum10 = sum20 = sum21 = sum30 = sum31 = sum32 = splat8(float32(0))
        for element in range(0, vector_bytes, _LINE):
            at = own + element
            value0, value1 = load8(at), load8(at + vector_bytes)
            value2, value3 = load8(at + 2 * vector_bytes), load8(at + 3 * vector_bytes)
            sum10 = add_product(sum10, value1, value0)
            sum20, sum21 = add_product(sum20, value2, value0), add_product(sum21, value2, value1)
            sum30, sum31 = add_product(sum30, value3, value0), add_product(sum31, value3, value1)
            sum32 = add_product(sum32, value3, value2)
        at = _LINE * tile
        store8(row1 + at, sum10)
        store8(row2 + at, sum20)
        store8(row2 + at + _LINE, sum21)
        store8(row3 + at, sum30)
        store8(row3 + at + _LINE, sum31)
        store8(row3 + at + 2 * _LINE, sum32)
    pairs = _whole_pairs(count)
    stride = _FLOAT * (first_width + pairs)
    for sample in range(LANES):
        copy(out + stride * sample, first + _FLOAT * first_width * sample, _FLOAT * first_width)
    for column in range(0, pairs, LANES):
        turn8(products + _LINE * column, _LINE, out + _FLOAT * (first_width + column), stride)


@typed_kernel("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def forward(first, others, offsets, batch, first_width, others_width, dimension, scratch, out):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Writes the rows of the next layer's input, each `first_width` floats and all pairs, in whole registers.

    `first`, `others`, `offsets`, `scratch` and `out` are addresses. If that of the offsets is not 0, `others` is that
    of the rows of a lookup. `scratch` begins with zeros.
    """
    # Numba types this from the signature above.
    count = (first_width + others_width) // dimension
    out_bytes = _FLOAT * (first_width + _whole_pairs(count))
    first_bytes, others_bytes = _FLOAT * first_width, _FLOAT * others_width
    tables, row_bytes, whole = others_width // dimension, _FLOAT * dimension, _FLOAT * (dimension & WHOLE)
    some_first = scratch
    some_others = some_first + LANES * first_bytes
    some_out = some_others + LANES * others_bytes
    room = some_out + LANES * out_bytes
    for sample in range(0, batch, LANES):
        samples = min(LANES, batch - sample)
        of_first, of_others = first + first_bytes * sample, others + others_bytes * sample
        target = out + out_bytes * sample
        if offsets:
            following = sample + samples
            _prefetch_vectors(others, offsets, tables * following, tables * min(following + LANES, batch), row_bytes)
            for place in range(samples * tables):
                source = _place(others, offsets, sample * tables + place)
                _copy_vector(some_others + row_bytes * place, source, row_bytes, whole)
            of_others = some_others
        elif samples < LANES:
            copy(some_others, of_others, others_bytes * samples)
            of_others = some_others
        if samples < LANES:
            copy(some_first, of_first, first_bytes * samples)
            of_first, target = some_first, some_out
        _forward_block(of_first, of_others, first_width, others_width, dimension, room, target)
        if samples < LANES:
            copy(out + out_bytes * sample, some_out, out_bytes * samples)


@part
def _pair(gradient: int, sum_row: float, sum_column: float, row: float, column: float) -> tuple[float, float]:
    """Adds one pair's gradient times the other vector to the sums of both vectors."""
    weight = load_float32(gradient)
    return add_product(sum_row, weight, column), add_product(sum_column, weight, row)


@typed_kernel("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def backward(  # type: ignore[no-untyped-def]  # Numba infers the types
    gradient,
    stride,
    first,
    others,
    offsets,
    batch,
    first_width,
    others_width,
    dimension,
    scratch,
    tiled,
    of_first,
    of_others,
):
    """Writes the gradients of both kinds of vectors; adds those of the vectors of a lookup to `of_others`, its rows'.

    All but `stride`, `batch` to `dimension`, and `tiled` are addresses. The rows of `gradient` begin `stride` floats
    apart. Otherwise as `forward`.
    """
    # Numba types this from the signature above.
    #
    # Four rows of the triangle of gradients at a time: each of their pairs adds to the row's sum, which stays in a
    # register, and to that of its column, which an earlier tile has begun. Rows that fill the last tile are zero.
    width = first_width + others_width
    count = width // dimension
    row_bytes, tables = 4 * dimension, others_width // dimension
    whole = row_bytes // VECTOR_BYTES * VECTOR_BYTES
    vectors = scratch
    result = scratch + tiled * row_bytes
    nothing = result + tiled * row_bytes
    for sample in range(batch):
        copy(vectors, first + 4 * first_width * sample, 4 * first_width)
        if offsets:
            following = sample + 1
            _prefetch_vectors(others, offsets, tables * following, tables * min(following + 1, batch), row_bytes)
            _prefetch_vectors(of_others, offsets, tables * sample, tables * following, row_bytes)
            for table in range(tables):
                source = _place(others, offsets, sample * tables + table)
                _copy_vector(vectors + 4 * first_width + row_bytes * table, source, row_bytes, whole)
        else:
            copy(vectors + 4 * first_width, others + 4 * others_width * sample, 4 * others_width)
        passed = gradient + 4 * stride * sample
        triangle = passed + 4 * first_width
        for tile in range(0, count, TILE):
            row0 = triangle + 2 * tile * (tile - 1)
            row1 = row0 + 4 * tile if tile + 1 < count else nothing
            row2 = row1 + 4 * (tile + 1) if tile + 2 < count else nothing
            row3 = row2 + 4 * (tile + 2) if tile + 3 < count else nothing
            own = vectors + tile * row_bytes
            target = result + tile * row_bytes
            for element in range(0, whole, VECTOR_BYTES):
                at = own + element
                vector0, vector1 = load8(at), load8(at + row_bytes)
                vector2, vector3 = load8(at + 2 * row_bytes), load8(at + 3 * row_bytes)
                sum0 = sum1 = sum2 = sum3 = splat8(float32(0))
                source = vectors + element
                column = result + element
                for offset in range(0, 4 * tile, 4):
                    values, total = load8(source), load8(column)
                    sum0, total = _pair(row0 + offset, sum0, total, vector0, values)
                    sum1, total = _pair(row1 + offset, sum1, total, vector1, values)
                    sum2, total = _pair(row2 + offset, sum2, total, vector2, values)
                    sum3, total = _pair(row3 + offset, sum3, total, vector3, values)
                    store8(column, total)
                    source += row_bytes
                    column += row_bytes
                inside = 4 * tile
                sum1, sum0 = _pair(row1 + inside, sum1, sum0, vector1, vector0)
                sum2, sum0 = _pair(row2 + inside, sum2, sum0, vector2, vector0)
                sum3, sum0 = _pair(row3 + inside, sum3, sum0, vector3, vector0)
                sum2, sum1 = _pair(row2 + inside + 4, sum2, sum1, vector2, vector1)
                sum3, sum1 = _pair(row3 + inside + 4, sum3, sum1, vector3, vector1)
                sum3, sum2 = _pair(row3 + inside + 8, sum3, sum2, vector3, vector2)
                at = target + element
                store8(at, sum0)
                store8(at + row_bytes, sum1)
                store8(at + 2 * row_bytes, sum2)
                store8(at + 3 * row_bytes, sum3)
        for element in range(whole, row_bytes, 4):
            for row in range(count):
                total = float32(0)
                for other in range(count):
                    if other != row:
                        high, low = max(row, other), min(row, other)
                        weight = load_float32(triangle + 2 * high * (high - 1) + 4 * low)
                        total += weight * load_float32(vectors + other * row_bytes + element)
                store_float32(result + row * row_bytes + element, total)
        for element in range(0, 4 * first_width, 4):
            value = load_float32(result + element) + load_float32(passed + element)
            store_float32(of_first + 4 * first_width * sample + element, value)
        if offsets:
            for table in range(tables):
                target = _place(of_others, offsets, sample * tables + table)
                _add_vector(target, result + 4 * first_width + row_bytes * table, row_bytes, whole)
        else:
            copy(of_others + 4 * others_width * sample, result + 4 * first_width, 4 * others_width)
