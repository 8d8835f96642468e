"""The numbers of processes by role, and their resources."""

from dataclasses import dataclass

from emberscale_api.frozen import replace
from emberscale_api.job import RoleSpec, TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.running import ScalingStep
from emberscale_api.shape import RoleShape


@dataclass(frozen=True)
class RoleShapes:
    """A job's shape."""

    ps: RoleShape
    worker: RoleShape


@dataclass(frozen=True)
class Reshaping:
    """A change of shape under way: the old and new shape, and when it began on the job's clock.

    `joined`: the roles whose new members have all joined, or are no longer waited for.
    """

    before: RoleShapes
    after: RoleShapes
    began_at: float
    joined: frozenset[Role] = frozenset()


@dataclass(frozen=True)
class Scaling:
    """The origin of the shape, and its next change.

    * `sizes`: the shape in force; None while it is the manifest's own.
    * `target`: a shape with another number of parameter servers, for which the missing ones are being started;
      `target_since` is when that began; `missing_since` is since when one is missing, None: none is.
    * `changed_at`: when the shape changed last; the cooldown begins then. All on the job's clock, in seconds.
    * `refused_ps`: the number of parameter servers that the manifest asks for but that did not all start; it is tried
      again once the manifest asks for another number.
    * `waits`: what keeps the first new parameter server from starting, as the operator says; empty: nothing.
    * `reshaping`: the change that people follow; `steps`: the last steps of all changes; `next_step`: greater than the
      number of any step, including those that the store has lost.
    * `reason` (CamelCase), `message`, `plan_version` (of the brain's plan that was followed last, 0: none) and `since`
      (of the last change, in seconds since 1970) are for people.
    """

    sizes: RoleShapes | None = None
    target: RoleShapes | None = None
    target_since: float = 0.0
    missing_since: float | None = None
    waits_for_plan: bool = False
    reason: str = "Manifest"
    message: str = "as the manifest says"
    plan_version: int = 0
    expected_throughput: float = 0.0
    changed_at: float | None = None
    since: float = 0.0
    scalings: int = 0
    refused_ps: int = 0
    waits: str = ""
    reshaping: Reshaping | None = None
    steps: tuple[ScalingStep, ...] = ()
    next_step: int = 1


def manifest_sizes(spec: TrainingJobSpec) -> RoleShapes:
    """Returns the manifest's shape: for bounds their smallest numbers, without bounds one."""
    return RoleShapes(_manifest_size(spec.ps), _manifest_size(spec.worker))


def within_manifest(sizes: RoleShapes, spec: TrainingJobSpec) -> RoleShapes:
    """Returns the nearest shape that the manifest allows; numbers and resources that it states take precedence."""
    return RoleShapes(_within(sizes.ps, spec.ps), _within(sizes.worker, spec.worker))


def combined(sizes: RoleShapes, target: RoleShapes) -> RoleShapes:
    """Returns what must run for `target` to take effect while `sizes` still serves."""
    old, new = sizes.ps, target.ps
    memory = None if None in (old.memory_bytes, new.memory_bytes) else max(old.memory_bytes or 0, new.memory_bytes or 0)
    return RoleShapes(replace(new, replicas=max(old.replicas, new.replicas), memory_bytes=memory), sizes.worker)


def describe_change(before: RoleShapes, after: RoleShapes) -> str:
    """Describes the difference; empty if there is none."""
    parts = [
        f"{name} {old.describe()} -> {new.describe()}"
        for name, old, new in (("workers", before.worker, after.worker), ("PS", before.ps, after.ps))
        if old != new
    ]
    return ", ".join(parts)


def _manifest_size(role: RoleSpec) -> RoleShape:
    return RoleShape(role.initial_replicas, role.resources.cpu_limit, role.resources.memory_limit)


def _within(size: RoleShape, role: RoleSpec) -> RoleShape:
    replicas = max(size.replicas, role.min_replicas or 1)
    if role.max_replicas is not None:
        replicas = min(replicas, role.max_replicas)
    return RoleShape(
        role.replicas or replicas,
        role.resources.cpu_limit or size.cpu_cores,
        role.resources.memory_limit or size.memory_bytes,
    )
