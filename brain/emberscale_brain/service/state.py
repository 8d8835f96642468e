"""The brain's knowledge in memory: it takes changes, and returns a view of the cluster. No I/O and no clock.

The service and the planning process each hold one, fed with the same changes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.fault_tolerance import (
    FailureRecord,
    FaultToleranceAdvice,
    FleetRecord,
    Recovery,
    advise,
    failure_costs,
)
from emberscale_brain.history.changes import (
    COMPLETE,
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.planner.types import (
    ClusterCapacity,
    ClusterView,
    JobId,
    JobView,
    PastJob,
    Prices,
    Quota,
    ScalingOverheads,
)
from emberscale_brain.preferences import START_UPS_REMEMBERED

START_UPS_OF_ONE_JOB = 20
"""Of those of a role: they decide what changes are expected to cost all jobs."""
_NO_JOB = JobId("")  # past start-ups come without their jobs


@dataclass(slots=True)
class KnownJob:
    """A job that has not ended.

    `begun_at` is the time since when it may have servers. `sequence` is that of the latest profile, `measured_until`
    the latest time of any profile, and `scaled_at` the time of the last change of shape.
    """

    submitted: JobSubmitted
    profiles: deque[JobProfile]
    begun_at: float
    measured_until: float
    sequence: int = -1
    samples: int = 0
    rows: int = 0
    shape: JobShape | None = None
    scaled_at: float = 0.0
    plan: PlanMade | None = None
    record: FailureRecord = field(default_factory=FailureRecord)

    @property
    def remaining_samples(self) -> int:
        """Samples left over all epochs, at least 1 while the job runs."""
        return max(1, self.submitted.metadata.total_samples - self.samples)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of planning other than the jobs. A job may take `adoption_seconds` to adopt a new shape."""

    capacity: ClusterCapacity
    prices: Prices
    quotas: Mapping[str, Quota]
    network_bytes_per_second: float
    adoption_seconds: float


@dataclass(slots=True)
class BrainState:
    """Mutable. `profiles_per_job` and `past_jobs` bound the memory; `fleet` counts all jobs, including ended ones."""

    profiles_per_job: int
    past_jobs: int
    jobs: dict[JobId, KnownJob] = field(default_factory=dict)
    history: deque[PastJob] = field(init=False)
    start_ups: dict[str, deque[StartUpObserved]] = field(init=False)
    fleet: FleetRecord = field(default_factory=FleetRecord)

    def __post_init__(self) -> None:
        self.history = deque(maxlen=self.past_jobs)
        self.start_ups = {role: deque(maxlen=START_UPS_REMEMBERED) for role in ("worker", "ps")}

    def apply(self, change: Change) -> None:
        """Applies a change. Submissions of known jobs, and all but start-ups of unknown jobs, have no effect."""
        match change:
            case JobSubmitted():
                if change.job not in self.jobs:
                    self.jobs[change.job] = KnownJob(
                        change,
                        deque(maxlen=self.profiles_per_job),
                        begun_at=change.submitted_at,
                        measured_until=change.submitted_at,
                        shape=change.current,
                        scaled_at=change.submitted_at,
                    )
            case ProfileReported():
                self._apply_profile(change)
            case StartUpObserved():
                self._apply_start_up(change)
            case PlanMade():
                job = self.jobs.get(change.job)
                if job is not None and (job.plan is None or change.version >= job.plan.version):
                    job.plan = change
                    if job.shape is None and change.planned.shape is not None:  # it waited for room until now
                        job.begun_at = job.measured_until = max(job.begun_at, change.made_at)
            case JobEnded():
                self._apply_end(change)

    def remember(self, past: Sequence[PastJob]) -> None:
        """Adds jobs that ended before those that this state knows, the oldest first, as far as there is room."""
        room = self.past_jobs - len(self.history)
        self.history.extendleft(reversed(past[-room:] if room else []))

    def remember_start_ups(self, role: str, past: Sequence[tuple[float, float]]) -> None:
        """Adds (seconds, paused seconds) of start-ups before this state began, the oldest first."""
        self.start_ups[role].extend(
            StartUpObserved(_NO_JOB, role, float(place), seconds, paused)
            for place, (seconds, paused) in enumerate(past)
        )

    def recall(self, job: JobId, earlier: Sequence[ProfileReported]) -> bool:
        """Prepends profiles from before this brain knew the job, oldest first. Returns whether there were any."""
        known = self.jobs[job]
        first = known.profiles[0].time if known.profiles else float("inf")
        older = [report for report in earlier if report.profile.time < first]
        room = self.profiles_per_job - len(known.profiles)
        known.profiles.extendleft(report.profile for report in reversed(older[-room:] if room else []))
        known.sequence = max([known.sequence, *(report.sequence for report in older)])
        return bool(room and older)

    def view(self, job: JobId, now: float, adoption_seconds: float) -> JobView:
        """Returns a job as planners see it.

        A job that got a plan for another shape less than `adoption_seconds` ago, and has not reported it yet, counts
        with the new shape and is fixed: the change is in progress.
        """
        known = self.jobs[job]
        submitted, current, fixed = known.submitted, known.shape, known.submitted.fixed
        planned = None if known.plan is None else known.plan.planned.shape
        if known.plan is not None and planned is not None and planned != current:
            on_its_way = 0 <= now - known.plan.made_at < adoption_seconds  # a clock set back must not freeze it
            if on_its_way or current is None:
                current, fixed = planned, fixed or on_its_way
        return JobView(
            id=job,
            owner=submitted.owner,
            metadata=submitted.metadata,
            remaining_samples=known.remaining_samples,
            current=current,
            bounds=submitted.bounds,
            profiles=tuple(known.profiles),
            submitted_at=submitted.submitted_at,
            last_scaled_at=known.scaled_at,
            priority=submitted.priority,
            fixed=fixed,
        )

    def cluster_view(self, conditions: Conditions, now: float) -> ClusterView:
        """Returns all jobs in the order of submission, with everything that planners may see."""
        by_submission = sorted(self.jobs, key=lambda job: (self.jobs[job].submitted.submitted_at, job))
        return ClusterView(
            jobs=tuple(self.view(job, now, conditions.adoption_seconds) for job in by_submission),
            capacity=conditions.capacity,
            prices=conditions.prices,
            quotas=conditions.quotas,
            overheads=self.overheads(),
            history=tuple(self.history),
            network_bytes_per_second=conditions.network_bytes_per_second,
        )

    def job_changes(self, job: JobId) -> list[Change]:
        """Returns the changes that bring another state's knowledge of the job up to date; none if it has ended."""
        known = self.jobs.get(job)
        if known is None:
            return []
        first = known.sequence - len(known.profiles) + 1
        profiles = [ProfileReported(job, first + place, profile) for place, profile in enumerate(known.profiles)]
        return [known.submitted, *profiles, *([] if known.plan is None else [known.plan])]

    def overhead_changes(self) -> list[Change]:
        """Returns the changes that give another state the same start-ups."""
        return [start_up for taken in self.start_ups.values() for start_up in taken]

    def overheads(self) -> ScalingOverheads:
        """Medians of the latest start-ups, or the defaults without any."""
        starts = {role: [one.seconds for one in taken] for role, taken in self.start_ups.items()}
        pauses = {role: [one.paused_seconds for one in taken] for role, taken in self.start_ups.items()}
        return ScalingOverheads.learned(starts, pauses)

    def fault_tolerance(self, job: JobId, overheads: ScalingOverheads) -> FaultToleranceAdvice | None:
        """Returns the best recovery of a job; None before its speed is measured or its plan expects one."""
        known = self.jobs[job]
        planned = None if known.plan is None else known.plan.planned
        chosen = None if planned is None else planned.explanation.chosen
        expected = 0.0 if chosen is None else chosen.throughput
        speed = next((profile.throughput for profile in reversed(known.profiles) if not profile.restarted), expected)
        shape = known.shape or (None if planned is None else planned.shape)
        if shape is None or not speed:
            return None
        latest = known.profiles[-1] if known.profiles else None
        ran = 0.0 if latest is None else latest.time - known.begun_at
        metadata = known.submitted.metadata
        costs = failure_costs(
            shape,
            ran + known.remaining_samples / speed,
            known.record,
            self.fleet.total,
            save=0.0 if latest is None else latest.checkpoint_cost,
            load=overheads.ps_pause_seconds,
            reschedule=overheads.ps_start_seconds,
            target_pls=metadata.target_pls,
            saves_priority_rows=metadata.saves_priority_rows,
            parity=max(1, metadata.parity),
            async_parity=metadata.async_parity,
        )
        offered = {Recovery.PARTIAL: costs.target_pls > 0, Recovery.CODED: metadata.parity > 0}
        return advise(costs, offered=[way for way, allowed in offered.items() if allowed])

    def _apply_profile(self, change: ProfileReported) -> None:
        job = self.jobs.get(change.job)
        if job is None or change.sequence <= job.sequence:
            return
        profile = change.profile
        ran = max(0.0, profile.time - job.measured_until) * profile.shape.ps
        job.measured_until = max(job.measured_until, profile.time)
        new = FailureRecord(max(0, profile.failures - job.record.failures), ran)
        job.record += new
        self.fleet.add(job.submitted.owner, new)
        job.profiles.append(profile)
        job.sequence = change.sequence
        job.samples = profile.samples
        job.rows = max(job.rows, profile.rows)
        if profile.total_samples:
            known = replace(job.submitted.metadata, total_samples=profile.total_samples)
            job.submitted = replace(job.submitted, metadata=known)
        if profile.shape != job.shape:
            job.shape = profile.shape
            job.scaled_at = profile.time

    def _apply_start_up(self, change: StartUpObserved) -> None:
        """Adds a start-up. A repeated report, by a reporter that got no answer, counts once."""
        taken = self.start_ups.get(change.role)
        if taken is None or any((one.job, one.time) == (change.job, change.time) for one in taken):
            return
        own = [one for one in taken if one.job == change.job != _NO_JOB]
        if len(own) >= START_UPS_OF_ONE_JOB:
            taken.remove(own[0])
        taken.append(change)

    def _apply_end(self, change: JobEnded) -> None:
        job = self.jobs.pop(change.job, None)
        if job is None or change.phase != COMPLETE or change.final_shape is None:
            return
        self.history.append(
            PastJob(
                id=change.job,
                owner=job.submitted.owner,
                metadata=job.submitted.metadata,
                final_shape=change.final_shape,
                fit=change.fit,
                finished_at=change.finished_at,
                rows=change.rows,
            )
        )
