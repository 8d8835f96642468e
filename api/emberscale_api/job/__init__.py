"""The TrainingJob manifest, `emberscale.io/v1alpha1`."""

from emberscale_api.job.continuity import Difference, Keeper, broken_fields, differences, fixed_fields
from emberscale_api.job.data import (
    ColumnMapping,
    CSVSpec,
    DataFormat,
    DataSpec,
    DenseTransform,
    ListColumn,
    ListOverflow,
    ShufflingSpec,
)
from emberscale_api.job.duration import parse_duration
from emberscale_api.job.manifest import ManifestError, apply_overrides, load_manifest, parse_manifest
from emberscale_api.job.model import (
    Architecture,
    EmbeddingSpec,
    InitializerOverride,
    InitializerSpec,
    InitializerType,
    ModelSpec,
    Pooling,
    TableOverride,
)
from emberscale_api.job.quantity import cpu_cores, memory_bytes, memory_quantity
from emberscale_api.job.resolved import ResolvedModel, TableSpec, columns_of, resolve_model
from emberscale_api.job.roles import MasterSpec, PodTemplate, ResourceRequirements, RoleSpec
from emberscale_api.job.run_policy import (
    CheckpointSpec,
    CleanPodPolicy,
    FaultToleranceSpec,
    FaultToleranceStrategy,
    RunPolicy,
    ScalingMode,
    ScalingSpec,
)
from emberscale_api.job.training import (
    OptimizerOverride,
    OptimizerSpec,
    OptimizersSpec,
    OptimizerType,
    ShardingSpec,
    TrainingSpec,
)
from emberscale_api.job.training_job import API_VERSION, KIND, ObjectMeta, TrainingJob, TrainingJobSpec

__all__ = [
    "API_VERSION",
    "KIND",
    "Architecture",
    "CSVSpec",
    "CheckpointSpec",
    "CleanPodPolicy",
    "ColumnMapping",
    "DataFormat",
    "DataSpec",
    "DenseTransform",
    "Difference",
    "EmbeddingSpec",
    "FaultToleranceSpec",
    "FaultToleranceStrategy",
    "InitializerOverride",
    "InitializerSpec",
    "InitializerType",
    "Keeper",
    "ListColumn",
    "ListOverflow",
    "ManifestError",
    "MasterSpec",
    "ModelSpec",
    "ObjectMeta",
    "OptimizerOverride",
    "OptimizerSpec",
    "OptimizerType",
    "OptimizersSpec",
    "PodTemplate",
    "Pooling",
    "ResolvedModel",
    "ResourceRequirements",
    "RoleSpec",
    "RunPolicy",
    "ScalingMode",
    "ScalingSpec",
    "ShardingSpec",
    "ShufflingSpec",
    "TableOverride",
    "TableSpec",
    "TrainingJob",
    "TrainingJobSpec",
    "TrainingSpec",
    "apply_overrides",
    "broken_fields",
    "columns_of",
    "cpu_cores",
    "differences",
    "fixed_fields",
    "load_manifest",
    "memory_bytes",
    "memory_quantity",
    "parse_duration",
    "parse_manifest",
    "resolve_model",
]
