"""A job in words: its headline and figures, and remarks on what happened to it."""

import math
import signal

from emberscale._run.summary import phase_name
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import MemberExit, RunView
from emberscale_operator.machine import ExitReason


def figures(status: pb.JobStatus) -> list[str]:
    """Speed, loss, AUC, as far as they are known."""
    parts = []
    if status.phase == pb.TRAINING and status.samples_per_second > 0:
        parts.append(f"{status.samples_per_second:,.0f} samples/s")
    if status.samples and math.isfinite(status.loss):
        parts.append(f"loss {status.loss:.4f}")
    if status.samples and math.isfinite(status.auc):
        parts.append(f"AUC {status.auc:.4f}")
    return parts


def headline(snapshot: RunView) -> str:
    """The phase, and what it waits for."""
    status = snapshot.status
    if status is None:
        return "Starting"
    name = "Stopping" if snapshot.suspending else phase_name(status.phase)
    if status.phase == pb.TRAINING and status.epochs > 1:
        return f"{name} epoch {status.epoch + 1} of {status.epochs}"
    if status.phase == pb.EVALUATING:
        return f"{name}: {status.evaluated_samples:,} samples" if status.evaluated_samples else name
    return f"{name}: {status.message}" if status.message and status.phase != pb.TRAINING else name


def remarks(before: RunView | None, after: RunView) -> list[str]:
    """What happened from one snapshot to the next that a person should know."""
    lines = []
    if after.suspending and (before is None or not before.suspending):
        what = "taking a checkpoint" if _has_rows(after.status) else "there is nothing new to save"
        lines.append(f"stopping: {what}; Ctrl-C again stops at once")
    known = len(before.exits) if before is not None else 0
    lines.extend(exit_remark(ended) for ended in after.exits[known:] if not ended.disk_is_full)
    full = [number for number, ended in enumerate(after.exits) if ended.disk_is_full]
    if full and full[0] >= known:  # the cause of every such end, so it is said once
        lines.append("the disk of the run's folder is full and processes fail: free some space")
    old = before.status if before is not None else None
    new = after.status
    if new is None:
        return lines
    known_warnings = old.warnings if old is not None else ()
    lines.extend(f"warning: {warning}" for warning in new.warnings if warning not in known_warnings)
    if old is None:
        return lines
    if new.sizing.message != old.sizing.message and new.sizing.plan_version and _changes_shape(old, new):
        lines.append(f"plan: {new.sizing.message}")
    if new.recoveries > old.recoveries:
        lines.append(f"a parameter server was lost: training went back to checkpoint {new.checkpoint or 'none'}")
    if new.bad_records > old.bad_records:
        first = min(new.bad_record_samples, key=lambda record: (record.file, record.line), default=None)
        where = f", the first at {first.file}:{first.line}: {first.problem}" if first is not None else ""
        count = "1 malformed record was" if new.bad_records == 1 else f"{new.bad_records:,} malformed records were"
        lines.append(f"{count} found so far{where}")
    lines.extend(
        f"epoch {evaluation.epoch}: held-out AUC {evaluation.auc:.4f}, log loss {evaluation.logloss:.4f}, "
        f"normalised entropy {evaluation.normalized_entropy:.4f}, calibration {evaluation.calibration:.3f}"
        for evaluation in new.evaluations[len(old.evaluations) :]
    )
    return lines


def _has_rows(status: pb.JobStatus | None) -> bool:
    """Whether servers hold rows that no checkpoint may have."""
    return status is not None and status.phase in (pb.TRAINING, pb.EVALUATING, pb.SAVING)


def _changes_shape(old: pb.JobStatus, new: pb.JobStatus) -> bool:
    return new.sizing.scalings != old.sizing.scalings or not old.sizing.plan_version


def exit_remark(ended: MemberExit) -> str:
    """Why a process ended, and where to read more."""
    log = f"see logs/{ended.name}.log"
    match ended.reason:
        case ExitReason.OOM_KILLED if ended.memory_limit is not None and ended.grown is not None:
            limit, grown = ended.memory_limit / 2**20, ended.grown / 2**20
            return f"{ended.name} was killed: it used more than its limit of {limit:,.0f} MiB, now {grown:,.0f} MiB"
        case ExitReason.COMPLETED:
            return f"{ended.name} ended before the job did; {log}"
        case ExitReason.KILLED:
            return f"{ended.name} was killed by {_how(ended.code)}; it restarts"
        case _:
            return f"{ended.name} failed with {_how(ended.code)}; {log}"


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
