"""The processes of a job: how many, and with what resources."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from emberscale_api.job.pod_template import PodTemplate
from emberscale_api.job.quantity import Quantity, cpu_cores, memory_bytes
from emberscale_api.job.schema import ManifestPart


class Role(StrEnum):
    """The parts of a job. `REDIS` and `BRAIN` belong to this job alone, where there are none to share."""

    REDIS = "redis"
    BRAIN = "brain"
    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


class ResourceList(ManifestPart):
    """CPU and memory as Kubernetes quantities."""

    cpu: Quantity | None = None
    memory: Quantity | None = None


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
        """Cores, or None where nothing is said."""
        quantity = self.limits.cpu or self.requests.cpu
        return None if quantity is None else cpu_cores(quantity)

    @property
    def memory_limit(self) -> int | None:
        """Bytes, or None where nothing is said."""
        quantity = self.limits.memory or self.requests.memory
        return None if quantity is None else memory_bytes(quantity)


class RoleSpec(ManifestPart):
    """Either `replicas`, or bounds within which the number is chosen; the start is `min_replicas`."""

    replicas: int | None = Field(default=None, ge=1, le=1024)
    min_replicas: int | None = Field(default=None, ge=1, le=1024)
    max_replicas: int | None = Field(default=None, ge=1, le=1024)
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
        """How many to start with."""
        return self.replicas or self.min_replicas or 1


class MasterSpec(ManifestPart):
    """There is exactly one master."""

    resources: ResourceRequirements = ResourceRequirements()
    template: PodTemplate = PodTemplate()
