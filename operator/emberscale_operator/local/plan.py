"""What a plan asks for, in the reconciler's words."""

from collections.abc import Mapping
from dataclasses import replace

from emberscale_api.job import ResourceRequirements, TrainingJobSpec
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.machine import Demand, Policy, Resources, Role

_ROLES = {pb.MASTER: Role.MASTER, pb.PS: Role.PS, pb.WORKER: Role.WORKER}
MESSAGE_ROLES = {role: number for number, role in _ROLES.items()}
ENDED_PHASES = frozenset({pb.SUSPENDED, pb.COMPLETE, pb.FAILED})


def resources_of(requirements: ResourceRequirements) -> Resources:
    """The limits that a manifest gives."""
    return Resources(requirements.cpu_limit, requirements.memory_limit)


def initial_demands(spec: TrainingJobSpec) -> tuple[Demand, ...]:
    """What runs until the master says otherwise."""
    return (
        master_demand(spec),
        Demand(Role.PS, spec.ps.initial_replicas, resources_of(spec.ps.resources)),
        Demand(Role.WORKER, spec.worker.initial_replicas, resources_of(spec.worker.resources)),
    )


def master_demand(spec: TrainingJobSpec) -> Demand:
    """The one process that runs while it is not known how many others there are to be."""
    return Demand(Role.MASTER, 1, resources_of(spec.master.resources))


def demands_of(plan: pb.Plan | None, spec: TrainingJobSpec, grown: Mapping[Role, int]) -> tuple[Demand, ...]:
    """What a plan of the master asks for; what it leaves open, and all before there is one, is as in the manifest.

    `grown` is the memory, in bytes, that a role needs because it ran out of less.
    """
    planned = {} if plan is None else {_ROLES[role.role]: role for role in plan.roles if role.role in _ROLES}
    return tuple(
        _with_memory(
            demand
            if demand.role is Role.MASTER or demand.role not in planned
            else _planned(planned[demand.role], demand.resources),
            grown.get(demand.role, 0),
        )
        for demand in initial_demands(spec)
    )


def _with_memory(demand: Demand, least: int) -> Demand:
    limit = demand.resources.memory_bytes
    if limit is None or limit >= least:
        return demand
    return replace(demand, resources=replace(demand.resources, memory_bytes=least))


def _planned(plan: pb.RolePlan, manifest: Resources) -> Demand:
    return Demand(
        _ROLES[plan.role],
        plan.replicas,
        Resources(plan.cpu_cores or manifest.cpu_cores, plan.memory_bytes or manifest.memory_bytes),
    )


def policy_of(spec: TrainingJobSpec) -> Policy:
    """The limits that the manifest sets on restarts."""
    return Policy(backoff_limit=spec.run_policy.backoff_limit)
