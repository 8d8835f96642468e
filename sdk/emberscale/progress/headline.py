"""What a job does and how well, in a few words."""

import math

from emberscale.summary import phase_name
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import RunView


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
        return f"{name}: {status.evaluated_samples:,} samples"
    return f"{name}: {status.message}" if status.message and status.phase != pb.TRAINING else name
