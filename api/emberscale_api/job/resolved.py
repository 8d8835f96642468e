"""What the manifest means for the processes that train: one entry a table, in the order used on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberscale_api.errors import InvalidError
from emberscale_api.job.data import ColumnMapping, DataSpec, DenseTransform
from emberscale_api.job.model import (
    AdmissionSpec,
    Architecture,
    EvictionSpec,
    InitializerOverride,
    InitializerSpec,
    InitializerType,
    Pooling,
    TableOverride,
)
from emberscale_api.job.training import OptimizerOverride, OptimizerSpec, OptimizerType
from emberscale_api.job.training_job import TrainingJobSpec

CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
WIDE_SUFFIX = ".wide"
CRITEO_COLUMNS = ColumnMapping(
    label="label", dense=CRITEO_DENSE, categorical=CRITEO_CATEGORICAL, dense_transform=DenseTransform.LOG1P
)

_ALL_IDS, _NO_ROWS = AdmissionSpec(), EvictionSpec()


@dataclass(frozen=True)
class TableSpec:
    """One embedding table. Its keys are the ids of a column, numbered as in `ColumnMapping.id_columns`.

    `pooling` is None where a record has one id.
    """

    number: int
    name: str
    column: int
    dimension: int
    optimizer: OptimizerSpec
    initializer: InitializerSpec
    seed: int
    pooling: Pooling | None = None
    admission: AdmissionSpec = _ALL_IDS
    eviction: EvictionSpec = _NO_ROWS


@dataclass(frozen=True)
class ResolvedModel:
    """Columns and tables with every default applied.

    `tables[i]` holds the embeddings of column i. In a model with a wide part, tables of dimension 1 follow, again one a
    column in their order: the weights of the same ids. They are tables of their own, not elements of the embeddings,
    so that a wide part has its own optimizer (Cheng et al. 2016, section 3.3) and the embeddings' row-wise accumulators
    do not see its gradients.
    """

    columns: ColumnMapping
    tables: tuple[TableSpec, ...]

    @property
    def embeddings(self) -> tuple[TableSpec, ...]:
        """The tables of embeddings, one a column."""
        return self.tables[: len(self.columns.id_columns)]


class UnresolvableModelError(InvalidError):
    """The manifest is well-formed but contradicts itself."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


def columns_of(data: DataSpec) -> ColumnMapping:
    """The columns of the manifest, or of the format if that fixes them."""
    return CRITEO_COLUMNS if data.columns is None else data.columns


def resolve_model(spec: TrainingJobSpec) -> ResolvedModel:
    """Applies the table overrides to the columns of the data.

    Raises UnresolvableModelError for an override of a column that does not exist, for dimensions that the architecture
    cannot combine, and for an optimizer that cannot step what it is given.
    """
    columns = columns_of(spec.data)
    if spec.optimizers.dense.type in (OptimizerType.ROW_WISE_ADAGRAD, OptimizerType.FTRL):
        raise UnresolvableModelError(
            "spec.optimizers.dense.type",
            f"{spec.optimizers.dense.type} is for embeddings; use SGD, Momentum, Adagrad or Adam",
        )
    _check_overrides(spec, columns)
    tables = [_embedding_table(spec, columns, number) for number in range(len(columns.id_columns))]
    architecture = spec.model.architecture
    if architecture is not None and architecture.needs_one_dimension:
        _check_dimensions(architecture, tables, spec.model.embeddings.dimension)
    if architecture is Architecture.DLRM and not columns.dense and len(tables) < 2:
        raise UnresolvableModelError("spec.model.architecture", "DLRM without dense features needs two columns of ids")
    if architecture is not None and architecture.has_wide_part:
        tables += [_wide_table(spec, table) for table in tables]
        _check_names(tables)
    return ResolvedModel(columns=columns, tables=tuple(tables))


def _check_overrides(spec: TrainingJobSpec, columns: ColumnMapping) -> None:
    for name, override in spec.model.embeddings.tables.items():
        if name not in columns.id_columns:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}",
                f"no such categorical or list column; there are {', '.join(columns.id_columns)}",
            )
        if override.pooling is not None and name in columns.categorical:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}.pooling",
                "only the columns in spec.data.columns.lists are pooled; this one has one id per record",
            )


def _embedding_table(spec: TrainingJobSpec, columns: ColumnMapping, number: int) -> TableSpec:
    name = columns.id_columns[number]
    embeddings = spec.model.embeddings
    override = embeddings.tables.get(name, TableOverride())
    return TableSpec(
        number=number,
        name=name,
        column=number,
        dimension=override.dimension or embeddings.dimension,
        optimizer=(override.optimizer or OptimizerOverride()).over(spec.optimizers.sparse),
        initializer=(override.initializer or InitializerOverride()).over(embeddings.initializer),
        seed=spec.training.seed,
        pooling=None if number < len(columns.categorical) else override.pooling or embeddings.pooling,
        admission=embeddings.admission if override.admission is None else override.admission,
        eviction=embeddings.eviction if override.eviction is None else override.eviction,
    )


def _wide_table(spec: TrainingJobSpec, embeddings: TableSpec) -> TableSpec:
    """Returns the table of the linear part beside an embedding table: one weight per row, which begins at zero."""
    columns = len(columns_of(spec.data).id_columns)
    return replace(
        embeddings,
        number=columns + embeddings.column,
        name=f"{embeddings.name}{WIDE_SUFFIX}",
        dimension=1,
        optimizer=(spec.optimizers.wide or OptimizerOverride()).over(spec.optimizers.sparse),
        initializer=InitializerSpec(type=InitializerType.ZEROS),
    )


def _check_dimensions(architecture: Architecture, tables: Sequence[TableSpec], dimension: int) -> None:
    for table in tables:
        if table.dimension != dimension:
            how = "takes dot products of" if architecture is Architecture.DLRM else "multiplies elements of"
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{table.name}.dimension",
                f"{architecture} {how} embeddings: all dimensions must be equal to spec.model.embeddings.dimension, "
                f"{dimension}; WideAndDeep and DCNv2 take any",
            )


def _check_names(tables: Sequence[TableSpec]) -> None:
    names = {table.name for table in tables}
    if len(names) < len(tables):
        raise UnresolvableModelError(
            "spec.data.columns", f"names that end in {WIDE_SUFFIX} are reserved for the wide part's tables"
        )
