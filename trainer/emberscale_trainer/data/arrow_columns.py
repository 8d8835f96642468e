"""Converts Arrow columns to the numbers that training takes, and checks their types."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from emberscale_api.job import ColumnMapping, DenseTransform, ListOverflow
from emberscale_trainer.data.decoded import (
    DecodedBlock,
    IdColumn,
    IdColumns,
    fill_dense,
    fill_ids,
    fill_log1p_of_integers,
)
from emberscale_trainer.data.hashing import hash_texts
from emberscale_trainer.data.records import MISSING_ID, DataUnavailableError, IdLists, wrong_column


def check_schema(uri: str, schema: pa.Schema, columns: ColumnMapping) -> None:
    """Raises DataUnavailableError for a column that is missing, repeated, or of the wrong type."""
    fields = [
        ("label", columns.label, _is_number, "a label is a number or a boolean, 0 or 1"),
        *(("dense", name, _is_number, "dense features are numbers or booleans") for name in columns.dense),
        *(("categorical", name, _is_id, _IDS) for name in columns.categorical),
        *(("lists", one.name, _is_list, f"lists hold ids: {_IDS}") for one in columns.lists),
    ]
    for role, name, accepts, allowed in fields:
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            raise wrong_column(uri, role, name, len(found), [f"{one.name} ({one.type})" for one in schema])
        kind = schema.field(found[0]).type
        if not accepts(kind):
            advice = ""
            if role == "categorical" and kinds.is_floating(kind):
                advice = "; pandas makes integers with missing values floats, unless they are of its type Int64"
            if role == "categorical" and _is_list(kind):
                advice = "; name it in spec.data.columns.lists"
            raise DataUnavailableError(
                uri, f"column {name!r}, which spec.data.columns.{role} names, is {kind}; {allowed}{advice}"
            )


_IDS = "ids are integers, booleans, strings or bytes, dictionaries of them included"


def _is_number(kind: pa.DataType) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind) or kinds.is_decimal(kind))


def _is_id(kind: pa.DataType) -> bool:
    if kinds.is_dictionary(kind):
        return _is_id(kind.value_type)
    return bool(kinds.is_integer(kind) or kinds.is_boolean(kind) or _is_text(kind))


def _is_text(kind: pa.DataType) -> bool:
    return any(
        check(kind)
        for check in (
            kinds.is_string,
            kinds.is_large_string,
            kinds.is_string_view,
            kinds.is_binary,
            kinds.is_large_binary,
            kinds.is_binary_view,
            kinds.is_fixed_size_binary,
        )
    )


def _is_list(kind: pa.DataType) -> bool:
    accepted = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    return bool(accepted and _is_id(kind.value_type))


def decode(table: pa.Table, columns: ColumnMapping, raw: bool, file: str, first_record: int) -> DecodedBlock:
    """Decodes the columns of a table that `check_schema` has accepted; see docs/data.md for the rules."""
    records = table.num_rows
    problems: dict[int, str] = {}
    labels = np.empty(records, dtype=np.float64)
    fill_dense(*_values(_native(_whole(table, columns.label))), np.nan, False, labels)
    for record in np.flatnonzero((labels != 0) & (labels != 1)).tolist():
        shown = "missing" if np.isnan(labels[record]) else f"{labels[record]:g}, neither 0 nor 1"
        problems[record] = f"the label, {columns.label}, is {shown}"
    dense = np.empty((len(columns.dense), records), dtype=np.float64 if raw else np.float32)
    for row, name, transform in zip(dense, columns.dense, columns.transforms, strict=True):
        array = _whole(table, name)
        _decode_dense(array, transform, raw, row)
        if not kinds.is_integer(array.type):
            for record in _not_finite(array):
                problems.setdefault(record, f"{name} is {array[record].as_py()}, not a finite number of 32 bits")
    ids = IdColumns([_id_column(_whole(table, name)) for name in columns.categorical])
    lists = []
    for column in columns.lists:
        one = decode_lists(_whole(table, column.name))
        lists.append(one)
        if column.overflow is ListOverflow.REFUSE:
            lengths = np.diff(one.offsets)
            for record in np.flatnonzero(lengths > column.max_length).tolist():
                problems.setdefault(
                    record, f"{column.name} has {lengths[record]:,} ids, more than maxLength {column.max_length:,}"
                )
    longest = tuple(column.max_length for column in columns.lists)
    return DecodedBlock(file, first_record, labels.astype(np.float32), dense, ids, tuple(lists), longest, problems)


def _id_column(array: pa.Array) -> IdColumn:
    """64-bit integers where they are, all else decoded."""
    if kinds.is_uint64(array.type):
        array = array.view(pa.int64())
    if kinds.is_int64(array.type):
        return IdColumn(*_values(array))
    ids = np.empty(len(array), dtype=np.int64)
    decode_ids(array, ids)
    return IdColumn(ids, _NO_BITS, 0)


def decode_ids(array: pa.Array, into: npt.NDArray[np.int64]) -> None:
    """Writes integers unchanged (unsigned 64-bit ones by their bits), the hashes of texts, and MISSING_ID for nulls."""
    kind = array.type
    if kinds.is_dictionary(kind):
        known = np.full(len(array.dictionary) + 1, MISSING_ID, dtype=np.int64)
        decode_ids(array.dictionary, known[:-1])
        places = np.empty(len(array), dtype=np.int64)
        fill_ids(*_values(array.indices.cast(pa.int64())), -1, places)
        np.take(known, places, out=into)
    elif _is_text(kind):
        _hash(array, into)
        if array.null_count:
            into[array.is_null().to_numpy(zero_copy_only=False)] = MISSING_ID
    else:
        if kinds.is_uint64(kind):
            array = array.view(pa.int64())
        elif not kinds.is_int64(kind) and not kinds.is_int32(kind):
            array = array.cast(pa.int64()) if kinds.is_integer(kind) else array.cast(pa.int8()).cast(pa.int64())
        fill_ids(*_values(array), MISSING_ID, into)


def decode_lists(array: pa.Array) -> IdLists:
    """Decodes the ids of each list; null lists are empty, and null ids are left out."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    items = array.flatten()
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
    if items.null_count:
        there = items.is_valid().to_numpy(zero_copy_only=False)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(there)])
        offsets, items = before[offsets], items.drop_null()
    values = np.empty(len(items), dtype=np.int64)
    decode_ids(items, values)
    return IdLists(values, offsets)


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _values(array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8], int]:
    """Returns the values of a column of numbers (undefined for nulls), its validity bitmap, and its first bit there."""
    validity, data = array.buffers()
    numpy_type = array.type.to_pandas_dtype()
    values = np.frombuffer(data, dtype=numpy_type)[array.offset : array.offset + len(array)] if data else _NONE
    if not array.null_count or not validity:
        return values, _NO_BITS, 0
    return values, np.frombuffer(validity, dtype=np.uint8), array.offset


_NONE, _NO_BITS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8)
_NATIVE = (pa.int64(), pa.int32(), pa.float64(), pa.float32())


def _native(array: pa.Array) -> pa.Array:
    if array.type in _NATIVE:
        return array
    array = array.cast(pa.int8()) if kinds.is_boolean(array.type) else array
    return array.cast(pa.float64(), safe=False)


def _decode_dense(array: pa.Array, transform: DenseTransform, raw: bool, into: npt.NDArray[Any]) -> None:
    """Writes float64 with NaN where missing if raw, else float32 with 0 where missing."""
    log1p = transform is DenseTransform.LOG1P and not raw
    if log1p and kinds.is_integer(_native(array).type):
        fill_log1p_of_integers(*_values(_native(array)), into)
        return
    fill_dense(*_values(_native(array)), np.nan if raw else 0.0, log1p, into)


def _not_finite(array: pa.Array) -> list[int]:
    """Returns the records whose value is not null and no finite number of 32 bits."""
    with np.errstate(over="ignore"):
        found = np.flatnonzero(~np.isfinite(_values(_native(array))[0].astype(np.float32, copy=False)))
    if found.size and array.null_count:
        found = found[array.is_valid().to_numpy(zero_copy_only=False)[found]]
    return found.tolist()


def _hash(array: pa.Array, into: npt.NDArray[np.int64]) -> None:
    if kinds.is_string_view(array.type):
        array = array.cast(pa.large_string())
    elif kinds.is_binary_view(array.type) or kinds.is_fixed_size_binary(array.type):
        array = array.cast(pa.large_binary())
    wide = kinds.is_large_string(array.type) or kinds.is_large_binary(array.type)
    _, offset_buffer, text_buffer = array.buffers()
    if len(array):
        offsets = np.frombuffer(offset_buffer, dtype=np.int64) if wide else np.frombuffer(offset_buffer, dtype=np.int32)
        text = np.frombuffer(text_buffer, dtype=np.uint8) if text_buffer else np.empty(0, dtype=np.uint8)
        hash_texts(text, offsets[array.offset : array.offset + len(array) + 1], into)


def nullable_ids(ids: npt.NDArray[np.int64]) -> pa.Array:
    """Returns a column of ids, with nulls for MISSING_ID."""
    return pa.array(ids, mask=ids == MISSING_ID)


def holds_texts(kind: pa.DataType) -> bool:
    """Whether the ids of a column of this type are hashes, including those in lists and dictionaries."""
    if kinds.is_dictionary(kind) or _is_list(kind):
        return holds_texts(kind.value_type)
    return _is_text(kind)


def distinct_texts(column: pa.ChunkedArray) -> set[bytes]:
    """The distinct texts of a column that holds texts, list items one by one."""
    array = column.combine_chunks()
    if _is_list(array.type):
        array = array.flatten()
    texts = array.unique().to_pylist()
    return {one.encode() if isinstance(one, str) else one for one in texts if one is not None}
