"""What happened to a job that a person should know: lines that stay."""

import signal

from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import MemberExit, RunView
from emberscale_operator.machine import ExitReason


def remarks(before: RunView | None, after: RunView) -> list[str]:
    """What happened from one snapshot to the next that a person should know."""
    lines = []
    if after.suspending and (before is None or not before.suspending):
        lines.append("stopping: a checkpoint is being taken; Ctrl-C again stops at once")
    known = len(before.exits) if before is not None else 0
    lines.extend(exit_remark(ended) for ended in after.exits[known:])
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
        last = new.bad_record_samples[-1] if new.bad_record_samples else None
        where = f", the last at {last.file}:{last.line}: {last.problem}" if last is not None else ""
        count = "1 malformed record was" if new.bad_records == 1 else f"{new.bad_records:,} malformed records were"
        lines.append(f"{count} found so far{where}")
    lines.extend(
        f"epoch {evaluation.epoch}: held-out AUC {evaluation.auc:.4f}, log loss {evaluation.logloss:.4f}, "
        f"normalised entropy {evaluation.normalized_entropy:.4f}, calibration {evaluation.calibration:.3f}"
        for evaluation in new.evaluations[len(old.evaluations) :]
    )
    return lines


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
            return f"{ended.name} was killed by {_how(ended.code)}; it is started again"
        case _:
            return f"{ended.name} failed with {_how(ended.code)}; {log}"


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
