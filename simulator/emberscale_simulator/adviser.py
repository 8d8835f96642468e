"""The brain's advice on how often jobs save (`emberscale_brain.fault_tolerance`), as its service gives it."""

from emberscale_api.shape import JobProfile
from emberscale_brain.fault_tolerance import FailureRecord, FleetRecord, advise, failure_costs
from emberscale_brain.planner.types import JobId
from emberscale_simulator.schedulers.protocol import LearnsOverheads


class CheckpointAdviser(LearnsOverheads):
    """Remembers the failures of all jobs' servers, and the durations of starts and standstills.

    Every job whose mechanics leave `checkpointInterval` open follows the advice, whichever scheduler it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[JobId, FailureRecord] = {}
        self._fleet = FleetRecord()
        self._measured_until: dict[JobId, float] = {}
        self._speeds: dict[JobId, float] = {}

    def interval(
        self,
        job: JobId,
        owner: str,
        profile: JobProfile,
        begun_at: float,
        remaining_samples: int,
        checkpoint_cost: float,
    ) -> float | None:
        """Returns seconds between checkpoints, given the newest profile; None before the job's speed is known.

        `begun_at` is the time since when the job may have servers.
        """
        own = self._own.get(job, FailureRecord())
        ran = max(0.0, profile.time - self._measured_until.get(job, begun_at)) * profile.shape.ps
        new = FailureRecord(max(0, profile.failures - own.failures), ran)
        self._own[job] = own + new
        self._fleet.add(owner, new)
        self._measured_until[job] = profile.time
        if not profile.restarted:
            self._speeds[job] = profile.throughput
        speed = self._speeds.get(job, 0.0)
        if not speed:
            return None
        whole = profile.time - begun_at + remaining_samples / speed
        overheads = self.overheads(None)
        costs = failure_costs(
            profile.shape,
            whole,
            self._own[job],
            self._fleet.total,
            save=checkpoint_cost,
            load=overheads.ps_pause_seconds,
            reschedule=overheads.ps_start_seconds,
        )
        return advise(costs).checkpoint_interval
