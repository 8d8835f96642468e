"""What the manifest means for the processes that train: one entry a table, in the order used on the wire."""

from dataclasses import dataclass

from emberscale_api.job.data import ColumnMapping, DataSpec
from emberscale_api.job.model import InitializerSpec, Pooling, TableOverride
from emberscale_api.job.optimizer import OptimizerSpec, OptimizerType
from emberscale_api.job.training_job import TrainingJobSpec

CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
_CRITEO_COLUMNS = ColumnMapping(label="label", dense=CRITEO_DENSE, categorical=CRITEO_CATEGORICAL)


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: the rows of one column of ids. `pooling` is None where a record has one id."""

    number: int
    name: str
    dimension: int
    optimizer: OptimizerSpec
    initializer: InitializerSpec
    seed: int
    pooling: Pooling | None = None


@dataclass(frozen=True)
class ResolvedModel:
    """Columns and tables with every default applied; `tables[i]` belongs to `columns.id_columns[i]`."""

    columns: ColumnMapping
    tables: tuple[TableSpec, ...]


class UnresolvableModelError(ValueError):
    """The manifest is well-formed but contradicts itself; `field` says where."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def columns_of(data: DataSpec) -> ColumnMapping:
    """The columns that the manifest names, or those that the format fixes."""
    return _CRITEO_COLUMNS if data.columns is None else data.columns


def resolve_model(spec: TrainingJobSpec) -> ResolvedModel:
    """Applies the table overrides to the columns of the data.

    Raises UnresolvableModelError for an override of a column that does not exist, for dimensions that the architecture
    cannot combine, and for an optimizer that cannot step what it is given.
    """
    columns = columns_of(spec.data)
    embeddings = spec.model.embeddings
    for name, override in embeddings.tables.items():
        if name not in columns.id_columns:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}",
                f"no such categorical or list column; there are {', '.join(columns.id_columns)}",
            )
        if override.pooling is not None and name in columns.categorical:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}.pooling",
                "a record has one id in this column: only those in spec.data.columns.lists are pooled",
            )
    if spec.optimizers.dense.type in (OptimizerType.ROW_WISE_ADAGRAD, OptimizerType.FTRL):
        raise UnresolvableModelError(
            "spec.optimizers.dense.type",
            f"{spec.optimizers.dense.type} is for embeddings; use SGD, Momentum, Adagrad or Adam",
        )
    tables = []
    for number, name in enumerate(columns.id_columns):
        override = embeddings.tables.get(name, TableOverride())
        dimension = override.dimension or embeddings.dimension
        if dimension != embeddings.dimension:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}.dimension",
                "DLRM takes dot products of embeddings: all dimensions must be equal",
            )
        tables.append(
            TableSpec(
                number=number,
                name=name,
                dimension=dimension,
                optimizer=override.optimizer or spec.optimizers.sparse,
                initializer=override.initializer or embeddings.initializer,
                seed=spec.training.seed,
                pooling=None if number < len(columns.categorical) else override.pooling or embeddings.pooling,
            )
        )
    return ResolvedModel(columns=columns, tables=tuple(tables))
