"""A whole model, from ids to logits, as a program that torch alone can run.

An id that was never trained on gets the same weights as in evaluation, computed by torch's own operations: the numbers
of `emberscale_trainer.table.initializers`, which describes the algorithm.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from emberscale_api.job import Pooling, ResolvedModel, TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import MIX_1, MIX_2
from emberscale_trainer.table.index import as_signed
from emberscale_trainer.table.initializers import GAMMA, table_seed

_HALF = 0xFFFFFFFF
_UNIT = 2.0**-32


class InitialWeights(nn.Module):
    """The initial weights of tables with the same dimension and initializer.

    `forward` takes ids int64 [n, tables] and returns float32 [n, tables, dimension].
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        super().__init__()
        self._initializer = specs[0].initializer
        self._dimension = specs[0].dimension
        steps = [as_signed(step * GAMMA & 2**64 - 1) for step in range(1, (self._dimension + 1) // 2 + 1)]
        self.register_buffer("_seeds", torch.tensor([table_seed(spec) for spec in specs]), persistent=False)
        self.register_buffer("_steps", torch.tensor(steps), persistent=False)
        self._seeds: Tensor
        self._steps: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Returns each id's initial weights."""
        kind, scale = self._initializer.type, self._initializer.scale
        if kind is InitializerType.ZEROS:
            return torch.zeros(*ids.shape, self._dimension)
        streams = _mix64(_mix64(ids) ^ self._seeds)
        bits = _mix64(streams[:, :, None] + self._steps)
        low, high = (bits & _HALF).double(), _shift_right(bits, 32).double()
        if kind is InitializerType.UNIFORM:
            first = ((low + 0.5) * (2 * _UNIT) - 1.0) * scale
            second = ((high + 0.5) * (2 * _UNIT) - 1.0) * scale
        else:  # Box-Muller
            radius = torch.sqrt(-2.0 * torch.log((low + 1.0) * _UNIT)) * scale
            angle = high * (2.0 * math.pi * _UNIT)
            first, second = radius * torch.cos(angle), radius * torch.sin(angle)
        return torch.stack([first, second], dim=3).flatten(2)[:, :, : self._dimension].float()


def _mix64(value: Tensor) -> Tensor:
    """`routing.mix64` on the 64 bits of each int64; products wrap."""
    value = (value ^ _shift_right(value, 30)) * as_signed(MIX_1)
    value = (value ^ _shift_right(value, 27)) * as_signed(MIX_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts in zeros, as for unsigned numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


Table = Mapping[str, Tensor]
"""`keys` int64 [rows], ascending, and `weights` float32 [rows, dimension]; at least one row."""

_EXAMPLE_ROWS = 3


class ServingModel(nn.Module):
    """The dense model behind a look-up of its embeddings, as evaluation computes it."""

    def __init__(self, dense_model: nn.Module, resolved: ResolvedModel) -> None:
        super().__init__()
        self.dense_model = dense_model
        self._resolved = resolved
        self._groups = _alike(resolved.tables)
        self.initial = nn.ModuleList(InitialWeights(group) for group in self._groups)

    def forward(
        self,
        dense: Tensor,
        ids: Tensor,
        tables: Mapping[str, Table],
        lists: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """Returns the logits, float32 [batch].

        `dense` float32 [batch, dense columns], `ids` int64 [batch, categorical columns], `tables` by name. `lists` has,
        for each list column, the ids of all samples, int64 [n], and the offsets of each sample's ids and of their end,
        int64 [batch + 1]; models without such columns leave it out.
        """
        vectors: dict[int, Tensor] = {}
        for group, initial in zip(self._groups, self.initial, strict=True):
            if group[0].pooling is None:
                wanted = ids[:, [spec.column for spec in group]]
                first = initial(wanted)
                for place, spec in enumerate(group):
                    column = wanted[:, place].contiguous()  # torch warns of a search for one that is not
                    vectors[spec.number] = look_up(tables[spec.name], column, first[:, place])
            else:
                (spec,) = group
                values, offsets = (lists or {})[self._resolved.columns.id_columns[spec.column]]
                found = look_up(tables[spec.name], values, initial(values[:, None])[:, 0])
                vectors[spec.number] = _pool(found, offsets, dense.shape[0], group[0].pooling)
        logits: Tensor = self.dense_model(dense, torch.cat([vectors[number] for number in sorted(vectors)], dim=1))
        return logits


def _alike(tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
    """Tables of single ids whose initial weights are made at once, and each table of lists by itself."""
    groups: dict[object, list[TableSpec]] = {}
    for table in tables:
        kind = (table.dimension, table.initializer) if table.pooling is None else table.number
        groups.setdefault(kind, []).append(table)
    return list(groups.values())


def look_up(table: Table, ids: Tensor, otherwise: Tensor) -> Tensor:
    """Returns the row of each id, float32 [n, dimension], or of `otherwise` for an id without a row."""
    keys = table["keys"]
    places = torch.searchsorted(keys, ids).clamp(max=keys.shape[0] - 1)
    return torch.where((keys[places] == ids)[:, None], table["weights"][places], otherwise)


def _pool(vectors: Tensor, offsets: Tensor, batch: int, pooling: Pooling) -> Tensor:
    samples = torch.searchsorted(offsets, torch.arange(vectors.shape[0]), right=True) - 1
    # of shapes that follow from `batch` alone: the program would refuse one sample if it compared `offsets` with it
    pooled = torch.zeros(batch, vectors.shape[1]).index_add(0, samples, vectors)
    if pooling is Pooling.SUM:
        return pooled
    lengths = torch.zeros(batch).index_add(0, samples, torch.ones(vectors.shape[0]))
    return pooled / lengths.clamp(min=1)[:, None]


def exported_program(model: ServingModel, resolved: ResolvedModel) -> ExportedProgram:
    """Exports the model as a graph for any batch size and any number of rows.

    Raises the errors of torch.export, such as for a user's own model that depends on more than shapes.
    """
    batch, columns = Dim("batch", min=1), resolved.columns
    samples = _EXAMPLE_ROWS
    arguments: list[object] = [
        torch.zeros(samples, len(columns.dense)),
        torch.zeros(samples, len(columns.categorical), dtype=torch.int64),
        {table.name: _example(table) for table in resolved.tables},
    ]
    rows = [Dim(f"rows_{table.number}", min=1) for table in resolved.tables]
    shapes: list[object] = [
        {0: batch},
        {0: batch},
        {
            table.name: {"keys": {0: rows[table.number]}, "weights": {0: rows[table.number]}}
            for table in resolved.tables
        },
    ]
    if columns.lists:
        offsets = torch.arange(samples + 1)
        arguments.append({column.name: (torch.zeros(samples, dtype=torch.int64), offsets) for column in columns.lists})
        shapes.append(
            {column.name: ({0: Dim(f"ids_{number}")}, {0: batch + 1}) for number, column in enumerate(columns.lists)}
        )
    return torch.export.export(model.eval(), tuple(arguments), dynamic_shapes=tuple(shapes))


def _example(table: TableSpec) -> dict[str, Tensor]:
    return {"keys": torch.arange(_EXAMPLE_ROWS), "weights": torch.zeros(_EXAMPLE_ROWS, table.dimension)}
