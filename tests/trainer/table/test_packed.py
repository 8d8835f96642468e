"""Blocks of rows with quantised weights: the bytes of a row, what is restored exactly, and what is refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from emberscale_trainer.table import MalformedBlockError, PackedRows, RowLayout
from emberscale_trainer.table.quantization import Quantizer
from packed_rows import unpacked

HEADER = 24
LAYOUT = RowLayout(64, 1)


def rows(count: int, layout: RowLayout = LAYOUT, keys: int = 2**62, pushes: int = 100) -> NDArray[np.uint8]:
    """Makes rows as training leaves them, with keys and pushes below the given ones."""
    random = np.random.default_rng(count)
    records = layout.empty(count)
    fields = layout.fields(records)
    fields["key"] = random.integers(-keys, keys, count)
    fields["weights"] = random.normal(0, 0.05, (count, layout.dimension))
    fields["state"] = random.random((count, layout.state))
    fields["pushes"] = random.integers(1, pushes, count)
    if layout.evicted:
        fields["touched"] = random.integers(0, pushes, count)
    return records


@given(
    st.integers(1, 40), st.integers(0, 40), st.booleans(), st.integers(0, 20), st.sampled_from([2, 3, 4, 8]), st.data()
)
def test_everything_but_the_weights_of_a_record_comes_back_exactly(
    dimension: int, state: int, evicted: bool, count: int, bits: int, data: st.DataObject
) -> None:
    layout = RowLayout(dimension, state, evicted)
    records = np.frombuffer(data.draw(st.randoms()).randbytes(count * layout.stride), np.uint8)
    records = records.reshape(-1, layout.stride).copy()
    fields = layout.fields(records)
    fields["weights"] = np.linspace(-1, 1, dimension)
    packed = PackedRows.of(layout, bits)
    back = layout.fields(unpacked(packed, packed.pack(records)))
    assert len(back) == count
    for name in layout.dtype.names or ():
        if name != "weights":
            assert back[name].tobytes() == fields[name].tobytes()
    assert np.abs(back["weights"] - fields["weights"]).max(initial=0) < 1


@pytest.mark.parametrize(
    ("keys", "pushes", "expected"),
    [
        (2**62, 100, 8 + 4 + 16 + 4 + 1),
        (2**31, 100, 4 + 4 + 16 + 4 + 1),
        (2**15, 100, 2 + 4 + 16 + 4 + 1),
        (2**62, 2, 8 + 4 + 16 + 4 + 1),
    ],
)
def test_a_row_takes_the_bytes_that_its_key_and_counts_need(keys: int, pushes: int, expected: int) -> None:
    packed = PackedRows.of(LAYOUT, 2)
    assert len(packed.pack(rows(1000, keys=keys, pushes=pushes))) == HEADER + 1000 * expected


def test_a_row_of_dimension_64_with_any_key_takes_an_eighth_of_float32() -> None:
    records = rows(1000)
    assert len(PackedRows.of(LAYOUT, 2).pack(records)) <= records.nbytes / 8


@pytest.mark.parametrize("counter", [1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**28, 2**32 - 1])
@pytest.mark.parametrize("evicted", [False, True])
def test_counters_of_every_size_come_back(counter: int, evicted: bool) -> None:
    layout = RowLayout(5, 0, evicted)
    records = rows(9, layout)
    layout.fields(records)["pushes"][4] = counter
    if evicted:
        layout.fields(records)["touched"][7] = counter
    packed = PackedRows.of(layout, 4)
    back = layout.fields(unpacked(packed, packed.pack(records)))
    for name in ("pushes", "touched") if evicted else ("pushes",):
        assert np.array_equal(back[name], layout.fields(records)[name])


@pytest.mark.parametrize("extreme", [(-(2**63), 2**63 - 1), (2**63 - 1, 2**63 - 1), (-1, 0), (0, 255), (0, 256)])
def test_keys_at_the_ends_of_their_range_come_back(extreme: tuple[int, int]) -> None:
    records = rows(3)
    LAYOUT.fields(records)["key"] = [extreme[1], extreme[0], extreme[1]]
    packed = PackedRows.of(LAYOUT, 3)
    back = LAYOUT.fields(unpacked(packed, packed.pack(records)))
    assert np.array_equal(back["key"], LAYOUT.fields(records)["key"])


@pytest.mark.parametrize(
    "weights",
    [
        np.linspace(0, 1e6, 64),  # above the largest float16
        np.linspace(0, 1e-9, 64),  # below the smallest float16
        1000 + np.linspace(0, 0.01, 64),  # far from zero, relative to the range
        np.full(64, 0.1),
    ],
)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_one_row_whose_range_is_no_float16_makes_all_of_a_block_float32(
    weights: NDArray[np.float64], bits: int
) -> None:
    records = rows(20)
    packed = PackedRows.of(LAYOUT, bits)
    half = len(packed.pack(records))
    LAYOUT.fields(records)["weights"][13] = weights
    content = packed.pack(records)
    assert len(content) == half + 4 * len(records)
    exact = LAYOUT.fields(records)["weights"].astype(np.float64)
    off = np.abs(LAYOUT.fields(unpacked(packed, content))["weights"] - exact)
    assert (off <= np.ptp(exact, axis=1, keepdims=True) / 2 + np.abs(exact) * 2**-20).all()


def test_float16_costs_next_to_nothing_of_the_error() -> None:
    records = rows(4000)
    narrow, wide = (PackedRows.of(LAYOUT, 4).pack(part) for part in (records, np.concatenate([records, _huge()])))
    errors = []
    for content in (narrow, wide):
        back = LAYOUT.fields(unpacked(PackedRows.of(LAYOUT, 4), content))["weights"][:4000]
        errors.append(np.linalg.norm(back - LAYOUT.fields(records)["weights"], axis=1).mean())
    assert errors[0] <= 1.001 * errors[1]


def _huge() -> NDArray[np.uint8]:
    record = rows(1)
    LAYOUT.fields(record)["weights"] *= 1e9
    return record


def test_the_codes_of_a_record_are_a_string_of_bits_the_lowest_first() -> None:
    layout = RowLayout(9, 0)
    records = layout.empty(1)
    layout.fields(records)["weights"] = [0, 1, 2, 3, 4, 5, 6, 7, 5]
    content = PackedRows(Quantizer(3), layout).pack(records)
    assert content[HEADER + 1 : HEADER + 5].view(np.float16).tolist() == [0, 1]
    bits = np.unpackbits(content[HEADER + 5 : HEADER + 9], bitorder="little")[: 9 * 3].reshape(9, 3)
    assert (bits @ [1, 2, 4]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5]


def test_blocks_follow_one_another() -> None:
    packed = PackedRows.of(LAYOUT, 4)
    blocks = [packed.pack(rows(count)) for count in (3, 0, 17, 1)]
    alone = [unpacked(packed, block) for block in blocks]
    assert unpacked(packed, np.concatenate(blocks)).tobytes() == np.concatenate(alone).tobytes()


def test_blocks_that_are_cut_short_are_refused() -> None:
    packed = PackedRows.of(LAYOUT, 4)
    content = packed.pack(rows(50))
    for size in range(1, len(content)):
        with pytest.raises(MalformedBlockError):
            unpacked(packed, content[:size])


def test_a_damaged_block_is_refused_or_read_without_what_lies_behind_its_end() -> None:
    packed = PackedRows.of(LAYOUT, 4)
    content = packed.pack(rows(50))
    outcomes: list[bytes | None] = []
    for place in (*range(HEADER), *range(len(content) - 50, len(content))):
        for bit in range(8):
            damaged = content.copy()
            damaged[place] ^= 1 << bit
            first, second = (_unpacked_before(behind, damaged, packed) for behind in (0, 0x7F))
            assert first == second, (place, bit)
            outcomes.append(first)
    assert None in outcomes[: 8 * HEADER], "some headers make no sense"
    assert any(outcomes[: 8 * HEADER]), "others tell of another first key"


def _unpacked_before(behind: int, content: NDArray[np.uint8], packed: PackedRows) -> bytes | None:
    """Returns the rows of a block that other bytes follow in memory; None if it is refused."""
    room = np.full(2 * len(content) + 1024, behind, np.uint8)
    room[: len(content)] = content
    try:
        return unpacked(packed, room[: len(content)]).tobytes()
    except MalformedBlockError:
        return None


@pytest.mark.parametrize("evicted", [False, True])
def test_a_block_with_fewer_or_more_counters_than_rows_is_refused(evicted: bool) -> None:
    """Wrong counters would change rows: without pushes a row does not exist, and `touched` says when it is evicted."""
    layout = RowLayout(64, 1, evicted)
    packed = PackedRows.of(layout, 4)
    content = packed.pack(rows(50, layout, pushes=1000))
    counters = int(content[4:8].view("<u4")[0])
    for off in (*range(-counters, 0), 1, 2, 200):
        damaged = np.concatenate([content[: len(content) + min(off, 0)], np.ones(max(off, 0), np.uint8)])
        damaged[4:8].view("<u4")[0] = counters + off
        with pytest.raises(MalformedBlockError, match="counters"):
            unpacked(packed, damaged)


@pytest.mark.parametrize("counters", [[0x80], [0xFF] * 6, [0xFF] * 5 + [0], [1, 0x80]])
def test_a_counter_without_an_end_is_refused(counters: list[int]) -> None:
    packed = PackedRows.of(LAYOUT, 4)
    content = packed.pack(rows(1, pushes=2))
    damaged = np.concatenate([content[:-1], np.array(counters, np.uint8)])
    damaged[4:8].view("<u4")[0] = len(counters)
    with pytest.raises(MalformedBlockError, match="counters"):
        unpacked(packed, damaged)


@pytest.mark.parametrize(
    "records", [np.zeros((2, 3), np.uint8), np.zeros((2, 544), np.uint8)[:, ::2], np.zeros((2, 272), "f4")]
)
def test_bytes_of_another_form_are_refused_before_a_kernel_reads_them(records: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        PackedRows.of(LAYOUT, 4).pack(records)
