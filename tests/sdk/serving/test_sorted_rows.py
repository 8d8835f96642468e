"""Rows are sorted by their keys, however few fit into memory."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale._serving.table_file import RowSorter, TableFile

INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60)
@given(st.lists(INT64, unique=True, max_size=200), st.integers(1, 50), st.integers(1, 80))
def test_rows_come_back_in_order_and_few_at_a_time(keys: list[int], piece: int, in_memory: int) -> None:
    taken = np.array(keys, dtype=np.int64)
    weights = taken[:, None].astype(np.float32) * np.array([1, 2], np.float32)
    with TemporaryDirectory() as folder:
        sorter = RowSorter(Path(folder), in_memory)
        for start in range(0, len(taken), piece):
            sorter.add(taken[start : start + piece], weights[start : start + piece])
        pieces = list(sorter.sorted())
    found = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in pieces)])
    assert found.tolist() == sorted(keys)
    for sorted_keys, sorted_weights in pieces:
        assert np.array_equal(sorted_weights[:, 0], sorted_keys.astype(np.float32))
        # a step of the merge takes up to two rows of each run, and a run may exceed the memory by one piece
        assert len(sorted_keys) <= max(in_memory, 2 * -(-len(keys) // in_memory)) + piece


def test_a_table_file_is_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    keys = np.arange(-3, 4, dtype=np.int64)
    weights = np.linspace(0, 1, 21, dtype=np.float32).reshape(7, 3)
    with TableFile(tmp_path / "table.safetensors", 7, 3) as file:
        file.append((keys[:5], weights[:5]))
        file.append((keys[5:], weights[5:]))
    read = load_file(tmp_path / "table.safetensors")
    assert np.array_equal(read["keys"], keys)
    assert np.array_equal(read["weights"], weights)
