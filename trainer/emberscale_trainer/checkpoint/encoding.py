"""The encoding of rows in a checkpoint's files: as in their slab, or with quantised weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberscale_api.checkpoint import DamagedCheckpointError, rows_suffix, weight_bits_of
from emberscale_api.job import TableSpec
from emberscale_trainer.table import MalformedBlockError, PackedRows, RowLayout, holds_sketches


@dataclass(frozen=True)
class RowEncoding:
    """The encoding of one table's rows in a file.

    * `layout`: their layout in memory.
    * `weight_bits`: the bits of a weight in the file; 0: records are as in memory.
    """

    layout: RowLayout
    weight_bits: int = 0

    @classmethod
    def to_write(cls, spec: TableSpec, weight_bits: int) -> "RowEncoding":
        """The encoding for a table: only the weights of embedding rows are quantised (Check-N-Run, section 4)."""
        is_exact = spec.column < 0 or holds_sketches(spec)
        return cls(RowLayout.of(spec), 0 if is_exact else weight_bits)

    @classmethod
    def of_file(cls, layout: RowLayout, name: str) -> "RowEncoding":
        """The encoding of a file, by its name."""
        return cls(layout, weight_bits_of(name))

    @cached_property
    def _packed(self) -> PackedRows | None:
        return PackedRows.of(self.layout, self.weight_bits) if self.weight_bits else None

    @property
    def suffix(self) -> str:
        """The suffix of such files."""
        return rows_suffix(self.weight_bits)

    def encode(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the bytes, uint8, of records, uint8 [n, layout.stride]. Raises UnquantizableError."""
        return records if self._packed is None else self._packed.pack(records)

    def decode(self, content: NDArray[np.uint8], name: str) -> Iterator[NDArray[np.uint8]]:
        """Yields the records of a file, uint8 [n, layout.stride], in parts; the next may overwrite each.

        Raises DamagedCheckpointError, which names the file.
        """
        if self._packed is not None:
            try:
                yield from self._packed.unpack(content)
            except MalformedBlockError as error:
                raise DamagedCheckpointError(f"{name}: {error}") from error
        elif len(content) % self.layout.stride:
            raise DamagedCheckpointError(f"{name} ends within a record")
        else:
            yield content.reshape(-1, self.layout.stride)
