"""Converts between the master's messages and the worker's leases, results and statistics."""

from emberscale_api.dataset import Split
from emberscale_api.frozen import replace
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import message_of
from emberscale_trainer.worker.leases import FinishedTask, ShardLease
from emberscale_trainer.worker.statistics import EvaluationTotals, WorkerStatistics

_SPLITS = {pb.TRAIN: Split.TRAINING, pb.EVALUATE: Split.EVALUATION}


def lease_of(task: pb.Task) -> ShardLease | None:
    """The lease that a task grants; None for one that prepares data."""
    split = _SPLITS.get(task.kind)
    return None if split is None else ShardLease(task.token, split, task.epoch, task.start, task.stop, task.shard)


def wire_result(finished: FinishedTask) -> pb.TaskResult:
    """Converts the result of a task."""
    totals = finished.evaluation
    evaluation = None if totals is None else _wire_evaluation(totals)
    return message_of(pb.TaskResult, finished, evaluation=evaluation, bad_records=())


def report_work(
    request: pb.HeartbeatRequest, statistics: WorkerStatistics, rounds: RoundsDecision | None = None
) -> None:
    """Adds the work since the last heartbeat to this one, and whether `rounds` are trained, and why."""
    done = statistics.take()
    negatives, positives = done.histogram.tolist() if done.batches else ((), ())
    request.delta_sequence = done.sequence
    request.worker.MergeFrom(
        message_of(
            pb.WorkerDelta,
            done,
            positives=positives,
            negatives=negatives,
            stage_seconds=statistics.total_stages,
            traffic=replace(statistics.total_traffic, batches=statistics.total_batches),
            rounds=rounds,
        )
    )
    request.bad_records.extend(message_of(pb.BadRecord, record) for record in done.bad_records)


def _wire_evaluation(totals: EvaluationTotals) -> pb.Evaluation:
    negatives, positives = totals.histogram.astype("<u4")
    return message_of(pb.Evaluation, totals, positives=positives.tobytes(), negatives=negatives.tobytes())
