"""Blocks of rows with quantised weights, as a checkpoint stores them: as few bytes per row as possible.

A block has the rows of one call in this order, all numbers little-endian:

    header: 24 bytes         rows: uint32 | bytes of the counters: uint32 | smallest key: int64 |
                             bytes of a key: uint8 | bytes of a float of a range: uint8 | zeros: 6 bytes
    records, of one size     key - smallest key | low | step | codes | optimizer state
    counters                 pushes of all rows, then `touched` of all rows where the table has it

A key takes as many bytes as the largest difference in the block, 1 to 8. `low` and `step` are float16, or float32 if
float16 would change `low`, or the width of the range, of any row by more than a sixteenth of its step. The codes are a
string of bits: weight i has the bits from i * bits on, the lowest of a byte first. A weight is `low + code * step`, in
float32. A counter is stored as LEB128: seven bits per byte, the lowest first, the highest bit of a byte set if another
follows.

Everything except the weights is restored exactly, including the optimizer state: the paper, too, quantises only the
embedding vectors (Check-N-Run, section 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.errors import InvalidError
from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.jit.vector import LANES, VECTOR_BYTES
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES, RowLayout, keys_of
from emberscale_trainer.table.packing import (
    HALF_BYTES,
    START_PARTS,
    pack_counters,
    pack_records,
    unpack_counters,
    unpack_records,
)
from emberscale_trainer.table.quantization import QUANTIZERS, Quantizer, UnquantizableError

_HEADER = np.dtype(
    [("rows", "<u4"), ("counters", "<u4"), ("first_key", "<i8"), ("key", "u1"), ("float", "u1"), ("zeros", "u1", 6)]
)
_SLACK_BYTES = 16
"""Slack behind encoded records: kernels write keys, and the codes of eight weights, as eight bytes at a time."""

_MOST_COUNTER_BYTES = 5


class MalformedBlockError(InvalidError):
    """The bytes are no blocks of rows of this table."""


@dataclass(frozen=True)
class PackedRows:
    """The form of blocks of one table's rows."""

    quantizer: Quantizer
    layout: RowLayout

    @classmethod
    def of(cls, layout: RowLayout, bits: int) -> "PackedRows":
        """Returns the form of a table's rows. Raises UnquantizableError for a number of bits without a quantiser."""
        if bits not in QUANTIZERS:
            raise UnquantizableError(
                f"weights cannot be stored in {bits} bits, but in {', '.join(map(str, QUANTIZERS))}"
            )
        return cls(QUANTIZERS[bits], layout)

    def _record_bytes(self, key_bytes: int, float_bytes: int) -> int:
        codes = self.quantizer.code_bytes(self.layout.dimension)
        return key_bytes + 2 * float_bytes + codes + FLOAT_BYTES * self.layout.state

    @property
    def _counters(self) -> tuple[int, ...]:
        """The offsets of the counters in a record in memory."""
        return (self.layout.pushes_offset, *([self.layout.touched_offset] if self.layout.evicted else []))

    def pack(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns a block, uint8 [size], of contiguous records, uint8 [n, layout.stride]; an empty one of no records.

        Raises UnquantizableError.
        """
        width = self.layout.stride
        if records.dtype != np.uint8 or records.shape[1:] != (width,) or not records.flags.c_contiguous:
            raise ValueError(f"records are contiguous uint8 [n, {width}], not {records.dtype} {list(records.shape)}")
        if not len(records):
            return np.empty(0, np.uint8)
        keys = keys_of(records)
        first_key = int(keys.min())
        key_bytes = max(1, -(-(int(keys.max()) - first_key).bit_length() // 8))
        # a range of 8 bits has too many values for float16: the last one would be off by more than the tolerance
        for float_bytes in (HALF_BYTES, FLOAT_BYTES) if self.quantizer.bits < 8 else (FLOAT_BYTES,):
            block = self._pack(records, first_key, key_bytes, float_bytes)
            if block is not None:
                return block
        raise AssertionError("a range that is finite can be stored as float32")

    def _pack(
        self, records: NDArray[np.uint8], first_key: int, key_bytes: int, float_bytes: int
    ) -> NDArray[np.uint8] | None:
        """Returns the block; None if its ranges do not fit into `float_bytes` bytes."""
        layout, quantizer, count = self.layout, self.quantizer, len(records)
        body = count * self._record_bytes(key_bytes, float_bytes)
        most = _HEADER.itemsize + body + _MOST_COUNTER_BYTES * len(self._counters) * count
        block = np.empty(most + _SLACK_BYTES, np.uint8)
        scratch = np.zeros(VECTOR_BYTES * (-(-layout.dimension // LANES) * LANES + 2), np.uint8)
        start = address_of(block) + _HEADER.itemsize
        done = pack_records(
            address_of(records),
            count,
            layout.stride,
            start,
            first_key,
            key_bytes,
            float_bytes,
            layout.dimension,
            FLOAT_BYTES * layout.state,
            quantizer.bits,
            int(quantizer.symmetric),
            quantizer.bins,
            round(quantizer.start * START_PARTS),
            quantizer.cuts,
            quantizer.fits,
            address_of(scratch),
        )
        if done < 0:
            return None
        if done < count:
            weights = layout.fields(records[done : done + 1])["weights"]
            raise UnquantizableError(
                f"the weights of a row lie between {weights.min():g} and {weights.max():g}, which cannot be quantised"
            )
        end = start + body
        for offset in self._counters:
            end = pack_counters(address_of(records) + offset, count, layout.stride, end)
        size = end - address_of(block)
        header = block[: _HEADER.itemsize].view(_HEADER)
        header[0] = (count, end - start - body, first_key, key_bytes, float_bytes, 0)
        return block[:size]

    def unpack(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        """Yields the records of each block in `content`, uint8 [n, layout.stride], with the weights' quantised values.

        The next overwrites each, so that they are still in the cache when they are used. Raises MalformedBlockError.
        """
        records = self.layout.empty(0)
        for start, header in self._blocks(content):
            count = int(header["rows"])
            if count > len(records):
                records = self.layout.empty(count)
            self._unpack(content, start, header, records[:count])
            yield records[:count]

    def _blocks(self, packed: NDArray[np.uint8]) -> list[tuple[int, np.void]]:
        """Returns the offset of the records of each block, and its header."""
        found, at = [], 0
        while at < len(packed):
            start = at + _HEADER.itemsize
            if start > len(packed):
                raise MalformedBlockError("it ends within the header of a block")
            header = packed[at:start].view(_HEADER)[0]
            if not 1 <= header["key"] <= KEY_BYTES or header["float"] not in (HALF_BYTES, FLOAT_BYTES):
                raise MalformedBlockError("it has a block whose header makes no sense")
            size = int(header["rows"]) * self._record_bytes(int(header["key"]), int(header["float"]))
            at = start + size + int(header["counters"])
            if at > len(packed):
                raise MalformedBlockError("it ends within a block")
            found.append((start, header))
        return found

    def _unpack(self, packed: NDArray[np.uint8], start: int, header: np.void, rows: NDArray[np.uint8]) -> None:
        layout = self.layout
        key_bytes, float_bytes = int(header["key"]), int(header["float"])
        body = address_of(packed) + start
        unpack_records(
            body,
            len(rows),
            address_of(rows),
            layout.stride,
            int(header["first_key"]),
            key_bytes,
            float_bytes,
            layout.dimension,
            FLOAT_BYTES * layout.state,
            self.quantizer.bits,
        )
        at = body + len(rows) * self._record_bytes(key_bytes, float_bytes)
        end = at + int(header["counters"])
        for offset in self._counters:
            at = at and unpack_counters(at, end, len(rows), address_of(rows) + offset, layout.stride)
        if at != end:
            raise MalformedBlockError("it has a block with more or fewer counters than rows")
