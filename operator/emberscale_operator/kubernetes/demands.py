"""What a job's plan asks for, within the bounds of its manifest as it is now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from emberscale_api.job import ResourceRequirements, RoleSpec, TrainingJobSpec
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.machine import Demand, Instance, Resources, Role

_MIB = 1 << 20
NUMBERS: Mapping[Role, "pb.Role.ValueType"] = {Role.MASTER: pb.MASTER, Role.PS: pb.PS, Role.WORKER: pb.WORKER}
"""Roles as the master's protocol numbers them."""


def demands_of(
    spec: TrainingJobSpec,
    plan: pb.Plan | None,
    applied_ps: int | None,
    grown: Mapping[Role, int],
    planned_by_brain: bool = False,
) -> tuple[Demand, ...]:
    """The pods that are wanted.

    `plan` is the master's, None until it was heard. The manifest bounds it, since it may have been edited after the
    master read it. `applied_ps` is the number of parameter servers that the job runs with until it goes through a
    checkpoint. `grown` is the memory, in bytes, that a role needs because it ran out of less. A job that leaves sizes
    open and is `planned_by_brain` begins with its master, which asks for the first plan.
    """
    planned = {role.role: role for role in plan.roles} if plan is not None else {}
    waits = planned_by_brain and spec.leaves_sizes_open and (plan is None or _wants_nobody(plan))

    def demand(role: Role, replicas: int, requirements: ResourceRequirements) -> Demand:
        of_plan = planned.get(NUMBERS[role])
        cpu = (of_plan.cpu_cores if of_plan else 0) or requirements.cpu_limit
        memory = (of_plan.memory_bytes if of_plan else 0) or requirements.memory_limit
        if memory is not None and role in grown:
            memory = max(memory, grown[role])
        return Demand(role, replicas, Resources(None if cpu is None else round(cpu, 3), memory))

    if waits:
        return (demand(Role.MASTER, 1, spec.master.resources),)
    return (
        demand(Role.MASTER, 1, spec.master.resources),
        demand(Role.PS, applied_ps or wanted_replicas(spec.ps, planned.get(pb.PS)), spec.ps.resources),
        demand(Role.WORKER, wanted_replicas(spec.worker, planned.get(pb.WORKER)), spec.worker.resources),
    )


def wanted_replicas(role: RoleSpec, plan: pb.RolePlan | None) -> int:
    """The number in the manifest if there is one, otherwise the plan's within the manifest's bounds."""
    if role.replicas is not None:
        return role.replicas
    replicas = plan.replicas if plan is not None and plan.replicas else role.initial_replicas
    replicas = max(replicas, role.min_replicas or 1)
    return min(replicas, role.max_replicas) if role.max_replicas is not None else replicas


def _wants_nobody(plan: pb.Plan) -> bool:
    return not any(role.replicas for role in plan.roles if role.role in (pb.PS, pb.WORKER))


def quantity(memory_bytes: int) -> str:
    """Bytes as people write them: `1536Mi`."""
    return f"{memory_bytes // _MIB}Mi" if memory_bytes % _MIB == 0 else str(memory_bytes)


def quantities(resources: Resources) -> tuple[str, str]:
    """Cores and memory as people write them: `1.5`, `1536Mi`; empty where there is no limit."""
    cpu, memory = resources.cpu_cores, resources.memory_bytes
    return "" if cpu is None else f"{cpu:g}", "" if memory is None else quantity(memory)


def masked(instances: Sequence[Instance], demands: Sequence[Demand]) -> tuple[Instance, ...]:
    """Instances without limits that nobody asked for: a LimitRange's are not ours to take away."""
    wanted = {demand.role: demand.resources for demand in demands}

    def mask(instance: Instance) -> Instance:
        of_role = wanted.get(instance.id.role)
        if of_role is None:
            return instance
        seen = instance.resources
        cpu = seen.cpu_cores if of_role.cpu_cores is not None else None
        memory = seen.memory_bytes if of_role.memory_bytes is not None else None
        return replace(instance, resources=Resources(cpu, memory))

    return tuple(mask(instance) for instance in instances)
