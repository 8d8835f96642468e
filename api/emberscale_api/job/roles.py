"""The processes of a job: their number and resources, and what users may add to their pods.

On one machine there are no pods, and the template of a pod is ignored.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, cpu_cores, memory_bytes

CoreObject = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""A part of a Pod, passed on unchanged; Kubernetes validates it when the pod is created."""

Name = Annotated[str, Field(min_length=1, max_length=253)]

MAX_REPLICAS = 1024
"""The greatest number of processes of one role."""


class TolerationOperator(StrEnum):
    """How a toleration's value is compared."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ManifestPart):
    """As `tolerations` of a Pod."""

    key: str | None = Field(default=None, max_length=317)
    operator: TolerationOperator | None = None
    value: str | None = Field(default=None, max_length=63)
    effect: TaintEffect | None = None
    toleration_seconds: int | None = None


class VolumeMount(ManifestPart):
    """As `volumeMounts` of a container."""

    name: Name
    mount_path: str = Field(min_length=1, max_length=4096)
    sub_path: str | None = Field(default=None, max_length=4096)
    read_only: bool = False


class SecretName(ManifestPart):
    """The name of a Secret in the job's namespace."""

    name: Name


class EnvironmentVariable(ManifestPart):
    """As `env` of a container: a `value`, or `valueFrom` a Secret, a ConfigMap or a field of the pod."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern="^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: str | None = Field(default=None, max_length=32768)
    value_from: CoreObject | None = None


class PodTemplate(ManifestPart):
    """Merged into the pods of a role; on a conflict, Emberscale's own settings win."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(default_factory=dict, max_length=64)
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    image_pull_secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)
    node_selector: dict[str, Annotated[str, Field(max_length=63)]] = Field(default_factory=dict, max_length=64)
    affinity: CoreObject | None = None
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64)
    scheduler_name: Name | None = None
    runtime_class_name: Name | None = None
    service_account_name: Name | None = Field(
        default=None, description="Service account of the pods, for workload identity; its API token is not mounted"
    )
    volumes: tuple[CoreObject, ...] = Field(default=(), max_length=64, description="Volumes, as in the spec of a Pod")
    volume_mounts: tuple[VolumeMount, ...] = Field(default=(), max_length=64)
    env: tuple[EnvironmentVariable, ...] = Field(default=(), max_length=256)
    env_from: tuple[CoreObject, ...] = Field(default=(), max_length=64, description="As envFrom of a container")


class Role(StrEnum):
    """The parts of a job. Only jobs that share no Redis or brain with others have `REDIS` or `BRAIN`."""

    REDIS = "redis"
    BRAIN = "brain"
    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


MANIFEST_ROLES = (Role.MASTER, Role.PS, Role.WORKER)
"""The roles whose number or resources a manifest gives."""


@dataclass(frozen=True)
class MemberId:
    """Identifies one process; `incarnation` is never reused for the same role and index."""

    role: Role
    index: int = 0
    incarnation: str = ""

    @property
    def slot(self) -> str:
        """The member's name: role and index, as `worker-0`."""
        return slot_name(self.role, self.index)


@lru_cache(maxsize=4096)
def slot_name(role: Role, index: int) -> str:
    """Returns the name of a member's place in its job, such as `worker-0`."""
    return f"{role.value}-{index}"


LEAST_MEMORY = "1Mi"
"""No process starts with less: whoever asks for less has mistaken the unit."""
UNITS_OF_MEMORY = "512Mi are mebibytes, 512 bytes, and 512m thousandths of a byte"


class ResourceList(ManifestPart):
    """CPU and memory, as Kubernetes quantities such as 500m and 2Gi."""

    cpu: Quantity | None = Field(default=None, description="Cores, such as 2 or 500m")
    memory: Quantity | None = Field(default=None, description=f"Bytes, such as 2Gi, at least {LEAST_MEMORY}")

    @field_validator("memory")
    @classmethod
    def _enough_to_start(cls, memory: str | None) -> str | None:
        if memory is not None and memory_bytes(memory) < memory_bytes(LEAST_MEMORY):
            raise ValueError(f"must be at least {LEAST_MEMORY}, not {memory}: {UNITS_OF_MEMORY}")
        return memory


class ResourceRequirements(ManifestPart):
    """As `resources` of a Kubernetes container; a limit that is absent equals the request."""

    requests: ResourceList = ResourceList()
    limits: ResourceList = ResourceList()

    @model_validator(mode="after")
    def _requests_within_limits(self) -> Self:
        for name, amount in (("cpu", cpu_cores), ("memory", memory_bytes)):
            request, limit = getattr(self.requests, name), getattr(self.limits, name)
            if request is not None and limit is not None and amount(request) > amount(limit):
                raise ValueError(f"requests.{name} ({request}) must not be above limits.{name} ({limit})")
        return self

    @property
    def cpu_limit(self) -> float | None:
        """Cores; None if unspecified."""
        quantity = self.limits.cpu or self.requests.cpu
        return None if quantity is None else cpu_cores(quantity)

    @property
    def memory_limit(self) -> int | None:
        """Bytes; None if unspecified."""
        quantity = self.limits.memory or self.requests.memory
        return None if quantity is None else memory_bytes(quantity)


class RoleSpec(ManifestPart):
    """The number of processes of a role, and their resources.

    Give `replicas`, or bounds within which the brain chooses the number; without a plan, the start is `min_replicas`,
    or 1.
    """

    replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS, description="Fixed number of processes")
    min_replicas: int | None = Field(
        default=None, ge=1, le=MAX_REPLICAS, description="Least number of processes; 1 if absent"
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=MAX_REPLICAS, description="Greatest number of processes; no bound if absent"
    )
    resources: ResourceRequirements = ResourceRequirements()
    template: PodTemplate = PodTemplate()

    @model_validator(mode="after")
    def _one_way_to_size(self) -> Self:
        if self.replicas is not None and (self.min_replicas is not None or self.max_replicas is not None):
            raise ValueError("give either replicas, or minReplicas and maxReplicas")
        if self.min_replicas is not None and self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"minReplicas ({self.min_replicas}) must not be above maxReplicas ({self.max_replicas})")
        return self

    @property
    def is_sized(self) -> bool:
        """Whether the number of processes, their cores and their memory are all given."""
        return None not in (self.replicas, self.resources.cpu_limit, self.resources.memory_limit)

    @property
    def initial_replicas(self) -> int:
        """The number of processes to start with."""
        return self.replicas or self.min_replicas or 1

    def resized(self, replicas: int) -> "RoleSpec":
        """Returns the role with this number of processes; 0 leaves the number open.

        Raises ValidationError.
        """
        sized = {**dict(self), "replicas": replicas or None, "min_replicas": None, "max_replicas": None}
        return RoleSpec.model_validate({**sized, **(self.__pydantic_extra__ or {})}, extra="allow")


class MasterSpec(ManifestPart):
    """The resources and the pod template of the master; a job has exactly one."""

    resources: ResourceRequirements = ResourceRequirements()
    template: PodTemplate = PodTemplate()
