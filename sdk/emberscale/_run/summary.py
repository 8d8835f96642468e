"""The summary of a run."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from emberscale._run.audit import AuditReport
from emberscale._run.hot import hot_document
from emberscale._run.record import RunStatus
from emberscale_api.checkpoint import is_flash
from emberscale_api.job.roles import Role
from emberscale_api.job.running import FlashStatus, JobPlan, JobStatus, Sizing, expected_restore_seconds
from emberscale_api.job.status import EvaluationResult
from emberscale_api.metrics import WORKER_STAGES
from emberscale_operator.local.snapshot import RunOutcome


@dataclass(frozen=True)
class Summary:
    """The summary object of a run; its fields are those of summary.json.

    `auc` and `logloss` are those of the last evaluation (`measured_on: evaluation`), or else progressive ones over a
    recent window of the training itself. `normalized_entropy` is the log loss relative to that of always predicting the
    mean label, `calibration` the mean prediction relative to the mean label; `evaluations` has one entry per epoch.
    `samples_per_second` is over the time spent training. `stages` are seconds summed over workers; `peak_memory_bytes`
    by process; `restarts` by role. `truncated_records` counts records with a list that was cut to its maxLength.
    `traffic` are the `bytes` that workers exchanged with parameter servers, and their `rounds` of `round_batches`:
    `round_bytes` of keys and rows, against the `single_bytes` that these batches would have taken one by one.
    `samples` counts all samples that are known to be trained; `checkpoint_samples` those in `checkpoint`, as `audit`
    counts them: a resume continues there.
    `warnings` are signs that the job is not as intended, each with a remedy. `plan` is the final shape of the job and
    its reason. `flash` is the newest flash checkpoint and its cost; None if there was none.
    `checkpoints` are the newest persistent ones, oldest first: the `seconds` that each took, the `held_seconds` for
    which it held pushes, the `written_bytes` in its own folder, and the `bytes` that a restore reads;
    `restore_seconds` is the time to read the newest of them, at the rate at which they were written. `pls` is the
    portion of lost samples (CPR equation 3), and `forgotten` the loss of each partial recovery, or of a
    rebuild from parity that lagged.
    """

    name: str
    phase: str
    reason: str
    message: str
    samples: int
    expected_samples: int
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    calibration: float | None
    measured_on: str | None
    samples_per_second: float
    wall_seconds: float
    training_seconds: float
    stages: Mapping[str, float]
    rows: Mapping[str, int]
    peak_memory_bytes: Mapping[str, int]
    restarts: Mapping[str, int]
    bad_records: int
    truncated_records: int
    traffic: Mapping[str, int]
    recoveries: int
    warnings: tuple[str, ...]
    checkpoint: str | None
    checkpoint_samples: int | None
    evaluations: tuple[Mapping[str, float], ...]
    plan: Mapping[str, Any]
    flash: Mapping[str, Any] | None = None
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    restore_seconds: float | None = None
    admission: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For tables with admission or eviction: `admitted` ids, `refused` pushes and `evicted` rows."""
    pls: float = 0.0
    forgotten: tuple[Mapping[str, Any], ...] = ()
    rebuilds: int = 0
    """The number of parameter servers whose rows were rebuilt from parity."""
    hot_embeddings: Mapping[str, Any] = field(default_factory=dict)
    """Whether rounds are trained, and their savings: see `hot_document`. Empty if the manifest disables them."""
    origin: Mapping[str, Any] | None = None
    """The checkpoint of another job from which this one started; None if it started from nothing."""

    def as_document(self) -> dict[str, Any]:
        """Returns the summary in plain types, for JSON."""
        return asdict(self)


def finite_json(document: Any) -> str:
    """Returns JSON text; numbers that JSON cannot represent are null."""
    return json.dumps(_finite(document), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flash(flash: FlashStatus | None) -> dict[str, Any] | None:
    if flash is None or not flash.checkpoint:
        return None
    return {name: getattr(flash, name) for name in ("checkpoint", "seconds", "held_seconds", "written_bytes", "bytes")}


def summarize(name: str, outcome: RunOutcome, wall_seconds: float, saved: AuditReport | None = None) -> Summary:
    """Puts the master's last status and the observations of the processes together.

    `saved` is the audit of the newest checkpoint, which may be newer than the status, and has then more samples: a
    run that is stopped at once takes no further status. None if there is none.
    """
    status = outcome.status or JobStatus()
    quality, measured_on = _quality(status)
    return Summary(
        name=name,
        phase=RunStatus.INTERRUPTED if outcome.phase is None else outcome.phase,
        reason=outcome.reason,
        message=outcome.message,
        samples=status.samples if saved is None else max(status.samples, saved.total.once),
        expected_samples=status.expected_samples,
        auc=quality.auc,
        logloss=quality.logloss,
        normalized_entropy=quality.normalized_entropy,
        calibration=quality.calibration,
        measured_on=measured_on,
        samples_per_second=status.samples / status.training_seconds if status.training_seconds > 0 else 0.0,
        wall_seconds=wall_seconds,
        training_seconds=status.training_seconds,
        stages=_stages(status),
        rows=dict(sorted(status.rows.items())),
        admission={table: asdict(counts) for table, counts in sorted(status.admission.items())},
        peak_memory_bytes=_peaks(outcome, status),
        restarts=dict(outcome.restarts),
        bad_records=status.bad_records,
        truncated_records=status.truncated_records,
        traffic=asdict(status.traffic),
        hot_embeddings=hot_document(status),
        recoveries=status.recoveries,
        rebuilds=status.protection.rebuilds if status.protection is not None else 0,
        warnings=status.warnings,
        pls=status.pls,
        forgotten=tuple(map(asdict, status.forgotten)),
        flash=_flash(status.flash),
        checkpoints=tuple(cost.model_dump() for cost in status.checkpoints),
        restore_seconds=expected_restore_seconds(status.checkpoints),
        checkpoint=saved.checkpoint if saved is not None else _persistent(status.checkpoint),
        checkpoint_samples=saved.total.once if saved is not None else None,
        origin=saved.origin.model_dump(mode="json") if saved is not None and saved.origin is not None else None,
        evaluations=tuple(result.model_dump() for result in status.evaluations),
        plan=plan_document(outcome.plan, status.sizing),
    )


def _persistent(checkpoint: str) -> str | None:
    """Returns the id of a checkpoint that outlives the run; None for another one, or for none."""
    return checkpoint if checkpoint and not is_flash(checkpoint) else None


def plan_document(plan: JobPlan | None, sizing: Sizing) -> dict[str, Any]:
    """Returns a plan in plain types: numbers and resources by role, and the reason."""
    shape = {
        str(role): {"replicas": one.replicas, "cpu": one.cpu_cores, "memory_bytes": one.memory_bytes}
        for role, one in (plan.shapes if plan is not None else {}).items()
        if role is not Role.MASTER
    }
    return {
        **shape,
        "reason": sizing.reason,
        "message": sizing.message,
        "version": sizing.plan_version,
        "expected_samples_per_second": sizing.expected_samples_per_second or None,
        "scalings": sizing.scalings,
    }


def _quality(status: JobStatus) -> tuple[EvaluationResult, str | None]:
    """Returns the last evaluation, or else the progressive loss and AUC; and the data of the measurement."""
    if status.evaluations:
        return status.evaluations[-1], "evaluation"
    if not status.samples:
        return EvaluationResult(epoch=0, samples=0), None
    auc, loss = (value if math.isfinite(value) else None for value in (status.auc, status.loss))
    recent = EvaluationResult(epoch=0, samples=0, auc=auc, logloss=loss)
    return recent, None if auc is None and loss is None else "training"


def _stages(status: JobStatus) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for member in status.members:
        if member.member.role is Role.WORKER:
            seconds.update(member.stage_seconds)
    return {stage: float(seconds[stage]) for stage in WORKER_STAGES}


def _peaks(outcome: RunOutcome, status: JobStatus) -> dict[str, int]:
    peaks = dict(outcome.peak_memory)
    for member in status.members:
        name = member.member.slot
        peaks[name] = max(peaks.get(name, 0), member.peak_memory_bytes)
    return dict(sorted(peaks.items()))
