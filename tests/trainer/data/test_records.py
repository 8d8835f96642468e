"""Room for the records of a batch."""

import numpy as np

from emberscale_api.job import ColumnMapping, ListColumn
from emberscale_trainer.data.records import empty_columns

TWO_LISTS = ColumnMapping(label="y", lists=(ListColumn(name="a"), ListColumn(name="b")))


def test_lists_grow_across_views_of_the_rows() -> None:
    columns = empty_columns(3, TWO_LISTS)
    columns.rows(0, 2).lists[0].append(np.array([7, 8, 9]), np.array([3, 0]), np.array([True, False]))
    columns.rows(2, 3).lists[0].append(np.array([5]), np.array([1]), np.array([False]))
    first, second = (room.lists() for room in columns.lists)
    assert first.values.tolist() == [7, 8, 9, 5]
    assert first.offsets.tolist() == [0, 3, 3, 4]
    assert columns.lists[0].cut.tolist() == [True, False, False]
    assert second.values.size == 0
    assert second.offsets.tolist() == [0]


def test_a_record_whose_lists_were_all_cut_counts_once() -> None:
    columns = empty_columns(3, TWO_LISTS)
    for room, cut in zip(columns.lists, ([True, False, False], [True, True, False]), strict=True):
        room.append(np.array([7, 8, 9]), np.array([1, 1, 1]), np.array(cut))
    assert columns.truncated_records == 2
