"""The TrainingJob manifest, `emberscale.io/v1alpha1`."""

from emberscale_api.job.continuity import Difference, Keeper, broken_fields, differences, fixed_fields
from emberscale_api.job.data import (
    ColumnMapping,
    CSVSpec,
    DataContinuation,
    DataFormat,
    DataSpec,
    DenseTransform,
    ListColumn,
    ListOverflow,
)
from emberscale_api.job.manifest import ManifestError, apply_overrides, load_manifest, parse_manifest
from emberscale_api.job.model import (
    AdmissionSpec,
    Architecture,
    EvictionSpec,
    InitializerSpec,
    InitializerType,
    ModelSpec,
    Pooling,
)
from emberscale_api.job.resolved import ResolvedModel, TableSpec, resolve_model
from emberscale_api.job.roles import MasterSpec, PodTemplate, ResourceRequirements, RoleSpec
from emberscale_api.job.run_policy import (
    CleanPodPolicy,
    FaultToleranceStrategy,
    FlashMode,
    IncrementalMode,
    Quantization,
    RecoveryPriority,
    RunPolicy,
    ScalingMode,
    ScalingSpec,
)
from emberscale_api.job.training import (
    OptimizerSpec,
    OptimizerType,
    ShardingSpec,
)
from emberscale_api.job.training_job import API_VERSION, KIND, TrainingJob, TrainingJobSpec
from emberscale_api.job.units import cpu_cores, memory_bytes, memory_quantity, parse_duration

__all__ = [
    "API_VERSION",
    "KIND",
    "AdmissionSpec",
    "Architecture",
    "CSVSpec",
    "CleanPodPolicy",
    "ColumnMapping",
    "DataContinuation",
    "DataFormat",
    "DataSpec",
    "DenseTransform",
    "Difference",
    "EvictionSpec",
    "FaultToleranceStrategy",
    "FlashMode",
    "IncrementalMode",
    "InitializerSpec",
    "InitializerType",
    "Keeper",
    "ListColumn",
    "ListOverflow",
    "ManifestError",
    "MasterSpec",
    "ModelSpec",
    "OptimizerSpec",
    "OptimizerType",
    "PodTemplate",
    "Pooling",
    "Quantization",
    "RecoveryPriority",
    "ResolvedModel",
    "ResourceRequirements",
    "RoleSpec",
    "RunPolicy",
    "ScalingMode",
    "ScalingSpec",
    "ShardingSpec",
    "TableSpec",
    "TrainingJob",
    "TrainingJobSpec",
    "apply_overrides",
    "broken_fields",
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
