"""The TrainingJob as a whole."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from emberscale_api.job.data import DataContinuation, DataSpec
from emberscale_api.job.model import ModelSpec
from emberscale_api.job.roles import MasterSpec, Role, RoleSpec
from emberscale_api.job.run_policy import (
    CheckpointSpec,
    FaultToleranceSpec,
    FaultToleranceStrategy,
    RunPolicy,
    ScalingMode,
    ScalingSpec,
    can_keep_parity,
)
from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.training import HotEmbeddingsMode, HotEmbeddingsSpec, OptimizersSpec, ShardingSpec, TrainingSpec

GROUP = "emberscale.io"
VERSION = "v1alpha1"
PLURAL = "trainingjobs"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"

NAME_PATTERN = "[a-z]([-a-z0-9]{0,51}[a-z0-9])?"
"""What a job's name must match as a whole: Services and pods are named after it."""
NAME_RULE = (
    "must be lower-case letters, digits and '-', start with a letter, end with a letter or digit, "
    "and have at most 53 characters"
)


def _job_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(NAME_RULE)
    return name


class ObjectMeta(ManifestPart):
    """The metadata that Emberscale reads; all other fields from Kubernetes are kept."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, AfterValidator(_job_name)]
    namespace: str = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class TrainingJobSpec(ManifestPart):
    """The desired state of a job; only `data.train` is required."""

    model: ModelSpec = ModelSpec()
    data: DataSpec
    training: TrainingSpec = TrainingSpec()
    optimizers: OptimizersSpec = OptimizersSpec()
    sharding: ShardingSpec = ShardingSpec()
    master: MasterSpec = MasterSpec()
    ps: RoleSpec = RoleSpec()
    worker: RoleSpec = RoleSpec()
    scaling: ScalingSpec = ScalingSpec()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    hot_embeddings: HotEmbeddingsSpec = HotEmbeddingsSpec()
    run_policy: RunPolicy = RunPolicy()
    suspend: bool = Field(
        default=False, description="On a cluster: true takes a checkpoint and deletes the pods; false resumes from it"
    )

    @model_validator(mode="after")
    def _servers_for_parity(self) -> Self:
        if self.fault_tolerance.strategy is not FaultToleranceStrategy.ERASURE_CODING:
            return self
        parity, role = self.fault_tolerance.parity, self.ps
        least = "replicas" if role.replicas is not None else "minReplicas"
        for field, count in ((least, role.initial_replicas), ("maxReplicas", role.max_replicas)):
            if count is None or can_keep_parity(count, parity):
                continue
            bound = f"at least {parity + 1}"
            raise ValueError(
                f"faultTolerance.parity ({parity}) needs {bound} parameter servers: set ps.{field} to {bound}"
            )
        return self

    @model_validator(mode="after")
    def _may_hold_rows(self) -> Self:
        obstacle = self.obstacle_to_rounds
        if obstacle and self.hot_embeddings.mode is HotEmbeddingsMode.ENABLED:
            raise ValueError(f"hotEmbeddings.mode (Enabled) does not work with {obstacle}: use Auto or Disabled")
        return self

    @property
    def allowed_parity(self) -> int:
        """The parity that the job keeps if it keeps any; 0: it may keep none.

        `Auto` may take it, but not where workers may train rounds on rows of their own, which parity rules out.
        """
        tolerance, rounds = self.fault_tolerance, self.hot_embeddings.mode is not HotEmbeddingsMode.DISABLED
        is_open = tolerance.strategy is FaultToleranceStrategy.AUTO and not rounds
        return tolerance.parity if is_open or tolerance.strategy is FaultToleranceStrategy.ERASURE_CODING else 0

    @property
    def obstacle_to_rounds(self) -> str:
        """The field, with its value, that keeps workers from training rounds on rows of their own; empty if none."""
        optimizers, embeddings = self.optimizers, self.model.embeddings
        types = {"optimizers.sparse": optimizers.sparse.type, "optimizers.dense": optimizers.dense.type}
        counts = {"model.embeddings": embeddings.admission.min_count}
        if optimizers.wide is not None and optimizers.wide.type is not None:
            types["optimizers.wide"] = optimizers.wide.type
        for name, table in embeddings.tables.items():
            if table.optimizer is not None and table.optimizer.type is not None:
                types[f"model.embeddings.tables.{name}.optimizer"] = table.optimizer.type
            if table.admission is not None:
                counts[f"model.embeddings.tables.{name}"] = table.admission.min_count
        for path, optimizer in types.items():
            if not optimizer.is_additive:
                return f"{path}.type ({optimizer})"
        for path, count in counts.items():
            if count > 1:
                return f"{path}.admission.minCount ({count})"
        if self.fault_tolerance.strategy is FaultToleranceStrategy.ERASURE_CODING:
            return f"faultTolerance.strategy ({self.fault_tolerance.strategy})"
        return ""

    @model_validator(mode="after")
    def _continues_something(self) -> Self:
        if self.checkpoint.initial_from is None and self.data.continuation is not DataContinuation.FRESH:
            raise ValueError(
                f"data.continuation ({self.data.continuation}) needs checkpoint.initialFrom, the checkpoint to start "
                "from"
            )
        return self

    @property
    def roles(self) -> Mapping[Role, MasterSpec | RoleSpec]:
        """The section of each role."""
        return {Role.MASTER: self.master, Role.PS: self.ps, Role.WORKER: self.worker}

    @property
    def leaves_sizes_open(self) -> bool:
        """Whether somebody else may decide on a number of processes, or on their cores or memory."""
        return self.scaling.mode is ScalingMode.AUTO and not (self.ps.is_sized and self.worker.is_sized)

    @property
    def leaves_replicas_open(self) -> bool:
        """Whether somebody else may decide on a number of processes."""
        return self.scaling.mode is ScalingMode.AUTO and None in (self.ps.replicas, self.worker.replicas)

    def resized(self, ps: int | None = None, worker: int | None = None) -> "TrainingJobSpec":
        """Returns the spec with these numbers of processes, which take the place of bounds.

        None leaves a role as it is; 0 leaves its number open. Raises ValidationError for a number that no manifest may
        have.
        """
        changes = {
            name: role.resized(replicas)
            for name, role, replicas in (("ps", self.ps, ps), ("worker", self.worker, worker))
            if replicas is not None and replicas != (role.replicas or 0)
        }
        if not changes:
            return self
        return type(self).model_validate({**dict(self), **changes, **(self.__pydantic_extra__ or {})}, extra="allow")


class TrainingJob(ManifestPart):
    """One DLRM to train."""

    api_version: Literal["emberscale.io/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: ObjectMeta
    spec: TrainingJobSpec

    def to_json(self) -> str:
        """The manifest with defaults filled in, for the job's processes; it keeps unknown fields."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, text: str) -> "TrainingJob":
        """The inverse of `to_json`. Fields that this version does not know are kept: the writer may be newer."""
        return cls.model_validate_json(text, extra="allow")
