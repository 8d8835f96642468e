"""The loops over ids: counting them, and looking them up among the hot ones.

Tables are open-addressed with linear probing. Their sizes are powers of two, and the hash is the finaliser of
splitmix64, so that consecutive ids do not cluster.
"""

import numpy as np
import numpy.typing as npt

from emberscale_api.routing import MIX_1, MIX_2
from emberscale_trainer.jit import kernel

_MIX_1, _MIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@kernel
def _slot_of(key: int, mask: int) -> int:
    value = np.uint64(key)
    value = (value ^ (value >> _S30)) * _MIX_1
    value = (value ^ (value >> _S27)) * _MIX_2
    return int(np.int64(value ^ (value >> _S31)) & mask)


@kernel
def count_ids(
    ids: npt.NDArray[np.int64],
    start: int,
    keys: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    entries: int,
    limit: int,
) -> tuple[int, int]:
    """Counts ids[start:] until the table has `limit` entries.

    keys and counts int64[2^k]; a count of 0 is an empty slot. Returns the index of the first id that was not counted
    (ids.size if all were) and the number of entries in the table.
    """
    mask = keys.size - 1
    for place in range(start, ids.size):
        key = ids[place]
        slot = _slot_of(key, mask)
        while counts[slot] and keys[slot] != key:
            slot = (slot + 1) & mask
        if not counts[slot]:
            if entries == limit:
                return place, entries
            keys[slot] = key
            entries += 1
        counts[slot] += 1
    return ids.size, entries


@kernel
def move_counts(
    keys: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    new_keys: npt.NDArray[np.int64],
    new_counts: npt.NDArray[np.int64],
) -> None:
    """Copies every entry into a larger, empty table."""
    mask = new_keys.size - 1
    for old in range(keys.size):
        if counts[old]:
            slot = _slot_of(keys[old], mask)
            while new_counts[slot]:
                slot = (slot + 1) & mask
            new_keys[slot] = keys[old]
            new_counts[slot] = counts[old]


@kernel
def fill_set(keys: npt.NDArray[np.int64], empty: int, slots: npt.NDArray[np.int64]) -> None:
    """Puts distinct keys, none of them `empty`, into slots int64[2^k], all of them `empty` before."""
    mask = slots.size - 1
    for place in range(keys.size):
        slot = _slot_of(keys[place], mask)
        while slots[slot] != empty:
            slot = (slot + 1) & mask
        slots[slot] = keys[place]


@kernel
def tag_ids(
    ids: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    empties: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    tags: npt.NDArray[np.bool_],
) -> None:
    """Clears the tag of each record with an id, in one of `columns`, that is not in the column's set.

    ids int64[n, c]. The set of columns[i] is slots[begins[i] : begins[i] + masks[i] + 1]. Columns are checked in the
    given order, and a record only until it is cold.
    """
    for record in range(ids.shape[0]):
        for number in range(columns.size):
            key = ids[record, columns[number]]
            slot = _slot_of(key, masks[number])
            found = slots[begins[number] + slot]
            while found != key and found != empties[number]:
                slot = (slot + 1) & masks[number]
                found = slots[begins[number] + slot]
            if found == empties[number]:
                tags[record] = False
                break


@kernel
def tag_lists(
    values: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    empty: int,
    slots: npt.NDArray[np.int64],
    tags: npt.NDArray[np.bool_],
) -> None:
    """The same for one column of lists (see IdLists); an empty list leaves its record's tag unchanged."""
    mask = slots.size - 1
    for record in range(tags.size):
        for place in range(offsets[record], offsets[record + 1]):
            if not tags[record]:
                break
            key = values[place]
            slot = _slot_of(key, mask)
            while slots[slot] != key and slots[slot] != empty:
                slot = (slot + 1) & mask
            if slots[slot] == empty:
                tags[record] = False
