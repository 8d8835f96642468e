"""What the manifest means for the processes that train: one entry a table, in the order used on the wire."""

from dataclasses import dataclass

from emberscale_api.job.data import DataFormat
from emberscale_api.job.model import InitializerSpec
from emberscale_api.job.optimizer import OptimizerSpec, OptimizerType
from emberscale_api.job.training_job import TrainingJobSpec

CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: the rows of one categorical column."""

    number: int
    name: str
    dimension: int
    optimizer: OptimizerSpec
    initializer: InitializerSpec
    seed: int


@dataclass(frozen=True)
class ResolvedModel:
    """Columns and tables with every default applied; `tables[i]` belongs to `categorical[i]`."""

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    tables: tuple[TableSpec, ...]


class UnresolvableModelError(ValueError):
    """The manifest is well-formed but contradicts itself; `field` says where."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def resolve_model(spec: TrainingJobSpec) -> ResolvedModel:
    """Applies the table overrides to the columns of the data.

    Raises UnresolvableModelError for an override of a column that does not exist, for dimensions that the architecture
    cannot combine, and for an optimizer that cannot step what it is given.
    """
    columns = {DataFormat.CRITEO_TSV: (CRITEO_DENSE, CRITEO_CATEGORICAL)}
    dense, categorical = columns[spec.data.format]
    embeddings = spec.model.embeddings
    for name in embeddings.tables:
        if name not in categorical:
            raise UnresolvableModelError(
                f"spec.model.embeddings.tables.{name}",
                f"no such categorical column; there are {', '.join(categorical)}",
            )
    if spec.optimizers.dense.type in (OptimizerType.ROW_WISE_ADAGRAD, OptimizerType.FTRL):
        raise UnresolvableModelError(
            "spec.optimizers.dense.type",
            f"{spec.optimizers.dense.type} is for embeddings; use SGD, Momentum, Adagrad or Adam",
        )
    tables = []
    for number, name in enumerate(categorical):
        override = embeddings.tables.get(name)
        dimension = (override and override.dimension) or embeddings.dimension
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
                optimizer=(override and override.optimizer) or spec.optimizers.sparse,
                initializer=(override and override.initializer) or embeddings.initializer,
                seed=spec.training.seed,
            )
        )
    return ResolvedModel(dense=dense, categorical=categorical, tables=tuple(tables))
