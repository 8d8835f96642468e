"""What a person may add to the pods of a role. On one machine there are no pods, and all of this is ignored."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from emberscale_api.job.schema import ManifestPart

CoreObject = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""A part of a Pod that is passed on as it is; Kubernetes checks it when the pod is created."""

Name = Annotated[str, Field(min_length=1, max_length=253)]


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
    """Merged under what Emberscale itself says about a role's pods: where both speak, Emberscale stands."""

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
        default=None, description="Its token is not mounted; cloud credentials that hang on it work"
    )
    volumes: tuple[CoreObject, ...] = Field(default=(), max_length=64, description="As volumes of a Pod")
    volume_mounts: tuple[VolumeMount, ...] = Field(default=(), max_length=64)
    env: tuple[EnvironmentVariable, ...] = Field(default=(), max_length=256)
    env_from: tuple[CoreObject, ...] = Field(default=(), max_length=64, description="As envFrom of a container")
