"""What happened to jobs and their pods since this operator started, counted when it happens."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_operator.kubernetes.pod_state import PodView

_COMPLETION_BUCKETS = (60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 259200)


class Tallies:
    """Ends of jobs by reason, their completion times, and ends of pods that were still wanted, by cause."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ends = Counter(
            "emberscale_jobs_ended", "TrainingJobs that ended, by reason", ["reason"], registry=registry
        )
        self._completion = Histogram(
            "emberscale_job_completion_seconds",
            "From a job's start to its completion (JCT)",
            buckets=_COMPLETION_BUCKETS,
            registry=registry,
        )
        self._failures = Counter(
            "emberscale_pod_failures",
            "Pods that ended unplanned, by role and cause",
            ["role", "reason"],
            registry=registry,
        )
        self._reconciliations = Counter(
            "emberscale_operator_reconciliations", "Reconciliations of jobs", registry=registry
        )
        # a series that is there from the start has its first increase seen, too
        self._ends.labels("Completed")

    def job_reconciled(self) -> None:
        """A job was looked at."""
        self._reconciliations.inc()

    def job_ended(self, status: TrainingJobStatus) -> None:
        """A job has become Complete or Failed."""
        complete = status.phase is JobPhase.COMPLETE
        self._ends.labels("Completed" if complete else status.reason).inc()
        if complete and status.start_time is not None and status.completion_time is not None:
            self._completion.observe((status.completion_time - status.start_time).total_seconds())

    def pod_ended(self, view: PodView) -> None:
        """A pod ended and nobody had asked for it."""
        if view.cause != "Completed":
            self._failures.labels(str(view.id.role), view.cause).inc()
