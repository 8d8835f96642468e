"""The intent of a job: its manifest and policy, and the instances that they require."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job import ResourceRequirements, RoleSpec, TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.shape import GIB, RoleShape
from emberscale_operator.machine.instances import Resources
from emberscale_operator.machine.restarts import Backoff

_GROWTH = 1.5
_MIB = 1 << 20
_LEAVE_SECONDS, _LEAVE_SECONDS_A_GIB, _MOST_LEAVE_SECONDS = 60.0, 10.0, 585.0
"""The cluster autoscaler waits for 600 s by default."""


@dataclass(frozen=True)
class Policy:
    """The waits of the machine, and when it gives up.

    * `backoff`: waits before restarts.
    * `backoff_limit`: errors allowed for each role and index. The master, which knows more, usually gives up on its
      members first, but it cannot count its own errors.
    * `stop_grace`: seconds that members may take to end by themselves once the job has ended.
    * `silence`: seconds that an instance may leave calls unanswered before it is killed.
    * `start_silence`: seconds that a running master may take until its first answer; None leaves that to others.
    * `join_silence`: seconds that a running member may take until the master has heard of it; None leaves it to others.
    * `suspend_silence`: seconds without an answer of the master after which a job rests without a new checkpoint.
    * `suspend_limit`: seconds that a suspension may take in all; None for no limit.
    """

    backoff: Backoff = field(default_factory=Backoff)
    backoff_limit: int = 6
    stop_grace: float = 10.0
    silence: float = 60.0
    start_silence: float | None = None
    join_silence: float | None = None
    suspend_silence: float = 300.0
    suspend_limit: float | None = None


@dataclass(frozen=True)
class Demand:
    """Instances `0 .. replicas - 1` of a role are wanted, each with these resources."""

    role: Role
    replicas: int
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True)
class JobIntent:
    """The intent of a job.

    * `spec`: its manifest.
    * `suspend`: the job is to be suspended.
    * `policy`: patience and limits.
    * `own`: instances that serve this job alone, such as its Redis. They start first and end last.
    * `awaits_store`: the others start only once the job's own Redis has been ready.
    * `planned`: a brain plans the sizes that the manifest leaves open.
    * `revisions`: by role, the revision that a new instance would have now.
    * `keeps_ended`: instances that ended with the job stay if they hold its logs.
    * `ttl`: seconds after its end at which the job is deleted; None keeps it.
    * `memory_ceiling`: bytes beyond which no role's memory grows; None for no bound.
    * `waits`: what keeps the first parameter server that does not run from starting, for people; empty: nothing.
    """

    spec: TrainingJobSpec
    suspend: bool = False
    policy: Policy = field(default_factory=Policy)
    own: tuple[Demand, ...] = ()
    awaits_store: bool = False
    planned: bool = False
    revisions: Mapping[Role, str] = field(default_factory=dict)
    keeps_ended: bool = False
    ttl: float | None = None
    memory_ceiling: int | None = None
    waits: str = ""


def demands_of(
    spec: TrainingJobSpec,
    sizes: Mapping[Role, RoleShape] | None = None,
    applied_ps: int | None = None,
    grown: Mapping[Role, int] | None = None,
    planned: bool = False,
) -> tuple[Demand, ...]:
    """Returns the master, PS and workers that are wanted.

    * `sizes`: the master's plan, None until it is known; the manifest supplies what it leaves out. The manifest bounds
      it: it may have been edited after the master read it.
    * `applied_ps`: the number of PS that the master asks for; it differs from the manifest's while rows move.
    * `grown`: bytes of memory that a role needs because it ran out of less.
    * `planned`: a brain makes the first plan: a job that leaves sizes open begins with its master, which asks for it.
    """
    plan, needed = sizes or {}, grown or {}

    def demand(role: Role, replicas: int, requirements: ResourceRequirements) -> Demand:
        size = plan.get(role, RoleShape(0))
        cpu = size.cpu_cores or requirements.cpu_limit
        memory = size.memory_bytes or requirements.memory_limit
        if memory is not None and role in needed:
            memory = max(memory, needed[role])
        return Demand(role, replicas, Resources(None if cpu is None else round(cpu, 3), memory))

    master = demand(Role.MASTER, 1, spec.master.resources)
    if planned and spec.leaves_sizes_open and not any(size.replicas for size in plan.values()):
        return (master,)
    return (
        master,
        demand(Role.PS, applied_ps or replicas_of(spec.ps, plan.get(Role.PS)), spec.ps.resources),
        demand(Role.WORKER, replicas_of(spec.worker, plan.get(Role.WORKER)), spec.worker.resources),
    )


def replicas_of(role: RoleSpec, size: RoleShape | None) -> int:
    """Returns the manifest's number if it gives one, otherwise the plan's within the manifest's bounds."""
    if role.replicas is not None:
        return role.replicas
    replicas = size.replicas if size is not None and size.replicas else role.initial_replicas
    replicas = max(replicas, role.min_replicas or 1)
    return min(replicas, role.max_replicas) if role.max_replicas is not None else replicas


def memory_of(spec: TrainingJobSpec, role: Role, sizes: Mapping[Role, RoleShape]) -> int | None:
    """Returns the bytes that the plan, or else the manifest, gives a role; None where neither does."""
    of_manifest = spec.roles[role].resources.memory_limit if role in spec.roles else None
    return sizes.get(role, RoleShape(0)).memory_bytes or of_manifest


def grown_memory(limit: int) -> int:
    """Returns 1.5 times `limit`, the bytes that an instance of the role ran out of, in whole MiB."""
    return -(-int(limit * _GROWTH) // _MIB) * _MIB


def leave_seconds(resources: Resources) -> float:
    """Returns how long a parameter server may take to give away what fits into its memory."""
    return min(_LEAVE_SECONDS + _LEAVE_SECONDS_A_GIB * (resources.memory_bytes or 0) / GIB, _MOST_LEAVE_SECONDS)
