"""Measures a job between two moments: the profile that the brain learns from."""

from collections.abc import Mapping
from dataclasses import dataclass

from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.shape import JobProfile, JobShape, RoleShape
from emberscale_jobmaster.figures import committed_samples, phase_of, sizes_of
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.state import JobState

_LEAST_CORES = 0.05
_FULL = 0.95
"""The share of a window that must be training for the window to characterise the shape."""


@dataclass(frozen=True)
class Moment:
    """A job at one time. `now` and `training_seconds` are in seconds; CPU and stage seconds are since the job began.

    `samples` are those that were trained by then, as far as reports and leases tell; `trained` has each worker's
    reported samples, and the time of its last report.
    """

    now: float
    training: bool
    sizes: RoleShapes
    samples: int
    trained: Mapping[str, tuple[int, float]]
    training_seconds: float
    recoveries: int
    routing_version: int
    incarnations: frozenset[tuple[str, str]]
    cpu_seconds: Mapping[str, float]
    stage_seconds: Mapping[str, float]
    memory: Mapping[Role, int]
    rows: int
    total_samples: int
    failures: int


def moment(
    state: JobState, seen: Observations, spec: TrainingJobSpec, now: float, before: Moment | None = None
) -> Moment:
    """The current job, given the last moment; `now` is a time of the observations' clock."""
    live = state.members.live()
    sightings = {name: seen.sightings[name] for name in live if name in seen.sightings}
    stages: dict[str, float] = {}
    for name, sighting in sightings.items():
        if live[name].role is Role.WORKER:
            for stage, seconds in sighting.stage_seconds.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
    committed = committed_samples(state, spec)
    batches = sum(lease.stop - lease.committed for lease in state.ledger.leases.values())
    leased = min(batches * spec.training.batch_size, (state.epoch + 1) * state.training_records - committed)
    trained = {name: (s.trained, s.trained_at) for name, s in sightings.items() if s.trained_at is not None}
    return Moment(
        now=now,
        training=phase_of(state, spec) is JobPhase.TRAINING,
        sizes=sizes_of(state, spec),
        samples=_samples(before, committed, leased, trained, state.recoveries),
        trained=trained,
        training_seconds=state.clock.training_seconds,
        recoveries=state.recoveries,
        routing_version=state.routing.table.version,
        incarnations=frozenset((name, member.incarnation) for name, member in live.items()),
        cpu_seconds={name: sighting.vitals.cpu_seconds for name, sighting in sightings.items()},
        stage_seconds=stages,
        memory={
            role: max((s.vitals.memory_bytes for name, s in sightings.items() if live[name].role is role), default=0)
            for role in (Role.PS, Role.WORKER)
        },
        rows=sum(seen.rows(state.routing.table.owners).values()),
        total_samples=spec.training.epochs * state.training_records,
        failures=state.recoveries + state.reloads + state.rebuilt.count,
    )


def _samples(
    before: Moment | None, committed: int, leased: int, trained: Mapping[str, tuple[int, float]], recoveries: int
) -> int:
    """Returns the samples that are trained: those before and those reported since, within what the leases allow.

    A shard's samples are committed together, but its rows count as soon as they are pushed.
    """
    if before is None or before.recoveries != recoveries:
        return committed
    known = before.trained
    since = sum(max(0, samples - known[worker][0]) for worker, (samples, _) in trained.items() if worker in known)
    return min(max(before.samples + since, committed), committed + leased)


def measure(before: Moment, after: Moment, spec: TrainingJobSpec) -> JobProfile | None:
    """Returns what happened between two moments, without its time and the cost of checkpoints.

    Returns None if no time passed, or if the job did not train at both moments and a role has no CPU limit.
    """
    seconds = after.now - before.now
    if seconds <= 0:
        return None
    sizes, batch = after.sizes, spec.training.batch_size
    throughput = _throughput(before, after)
    used = {
        role: sum(
            max(0.0, cpu - before.cpu_seconds.get(name, cpu))
            for name, cpu in after.cpu_seconds.items()
            if name.startswith(f"{role.value}-")
        )
        / seconds
        for role in (Role.PS, Role.WORKER)
    }
    ps = _counted(sizes.ps, used[Role.PS], after.memory[Role.PS])
    worker = _counted(sizes.worker, used[Role.WORKER], after.memory[Role.WORKER])
    steady = before.routing_version == after.routing_version  # else some servers report rows from before the move
    undisturbed = (
        before.training
        and after.training
        and before.sizes == sizes
        and before.incarnations == after.incarnations
        and _complete(after)
        and before.recoveries == after.recoveries
        and steady
        and after.training_seconds - before.training_seconds >= _FULL * seconds - 1.0
        and throughput > 0
    )
    workers = sizes.worker.replicas
    stages = {
        stage: max(0.0, total - before.stage_seconds.get(stage, 0.0)) / (seconds * workers)
        for stage, total in after.stage_seconds.items()
    }
    if not (before.training and after.training) and None in (sizes.ps.cpu_cores, sizes.worker.cpu_cores):
        return None  # usage before training does not stand for the size of processes without limits
    return JobProfile(
        time=0.0,
        shape=JobShape(workers, sizes.ps.replicas, worker[0], ps[0], worker[1], ps[1]),
        batch_size=batch,
        iteration_seconds=workers * batch / throughput if throughput else 0.0,
        throughput=throughput,
        samples=after.samples,
        rows=after.rows if steady else 0,
        ps_memory=after.memory[Role.PS] if steady else 0,
        worker_memory=after.memory[Role.WORKER],
        worker_cpu_utilization=_utilization(used[Role.WORKER], workers, worker[0]),
        ps_cpu_utilization=_utilization(used[Role.PS], sizes.ps.replicas, ps[0]),
        stage_fractions=stages,
        restarted=not undisturbed,
        total_samples=after.total_samples,
        failures=after.failures,
    )


def _throughput(before: Moment, after: Moment) -> float:
    """Samples per second of all workers, each over the time between two of its own reports.

    Reports come with heartbeats. Rates over the window's own length would be wrong by up to a heartbeat interval.
    """
    total = 0.0
    for worker, (samples, at) in after.trained.items():
        earlier, since = before.trained.get(worker, (samples, at))
        if at > since:
            total += max(0, samples - earlier) / (at - since)
    return total


def _complete(moment: Moment) -> bool:
    """Whether exactly the members of the shape are alive."""
    live = {name for name, _ in moment.incarnations}
    wanted = {f"{Role.PS.value}-{index}" for index in range(moment.sizes.ps.replicas)}
    wanted |= {f"{Role.WORKER.value}-{index}" for index in range(moment.sizes.worker.replicas)}
    return live == wanted


def _counted(size: RoleShape, used_cores: float, used_memory: int) -> tuple[float, int]:
    """Returns the cores and memory of a process: its limits, or its usage if it has none."""
    cores = size.cpu_cores or max(_LEAST_CORES, used_cores / size.replicas)
    return cores, size.memory_bytes or used_memory


def _utilization(used: float, replicas: int, cores: float) -> float:
    return min(1.0, used / (replicas * cores))
