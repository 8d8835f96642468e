"""The TrainingJob manifest, `emberscale.io/v1alpha1`.

* `training_job`: the whole. `data`, `model`, `training`, `roles`, `run_policy`: its parts, on `schema` and `units`.
* `manifest`, `newer`, `yaml_text`: reading it. `continuity`: what must not change.
* `crd`, `crd_rules`: its definition in Kubernetes.
* `resolved`, `dense`: its meaning for processes that train. `status`, `running`, `rounds`: what a job reports.
"""

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
    DEFAULT_TARGET_PLS,
    MOST_PARITY,
    MOST_STRIPE_WIDTH,
    CleanPodPolicy,
    Durability,
    FaultToleranceStrategy,
    FlashMode,
    IncrementalMode,
    Quantization,
    RecoveryPriority,
    RunPolicy,
    ScalingMode,
    can_keep_parity,
    stripe_width,
)
from emberscale_api.job.training import (
    HotEmbeddingsMode,
    HotEmbeddingsSpec,
    OptimizerSpec,
    OptimizerType,
)
from emberscale_api.job.training_job import API_VERSION, KIND, TrainingJob, TrainingJobSpec
from emberscale_api.job.units import cpu_cores, memory_bytes, memory_quantity, parse_duration

__all__ = [
    "API_VERSION",
    "DEFAULT_TARGET_PLS",
    "KIND",
    "MOST_PARITY",
    "MOST_STRIPE_WIDTH",
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
    "Durability",
    "EvictionSpec",
    "FaultToleranceStrategy",
    "FlashMode",
    "HotEmbeddingsMode",
    "HotEmbeddingsSpec",
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
    "TableSpec",
    "TrainingJob",
    "TrainingJobSpec",
    "apply_overrides",
    "broken_fields",
    "can_keep_parity",
    "cpu_cores",
    "differences",
    "fixed_fields",
    "load_manifest",
    "memory_bytes",
    "memory_quantity",
    "parse_duration",
    "parse_manifest",
    "resolve_model",
    "stripe_width",
]
