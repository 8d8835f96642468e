"""Converts between the master's messages and the worker's leases, results and statistics."""

from emberscale_api.dataset import Split
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import wire_bad_record, wire_block, wire_file
from emberscale_trainer.worker.leases import FinishedTask, ShardLease
from emberscale_trainer.worker.statistics import EvaluationTotals, WorkerStatistics

_SPLITS = {pb.TRAIN: Split.TRAINING, pb.EVALUATE: Split.EVALUATION}


def lease_of(task: pb.Task) -> ShardLease | None:
    """The lease that a task grants; None for one that prepares data."""
    split = _SPLITS.get(task.kind)
    return None if split is None else ShardLease(task.token, split, task.epoch, task.start, task.stop, task.shard)


def wire_result(finished: FinishedTask) -> pb.TaskResult:
    """What a task came to."""
    return pb.TaskResult(
        token=finished.token,
        training_files=map(wire_file, finished.training_files),
        evaluation_files=map(wire_file, finished.evaluation_files),
        blocks=map(wire_block, finished.blocks),
        evaluation=_wire_evaluation(finished.evaluation) if finished.evaluation is not None else None,
    )


def report_work(request: pb.HeartbeatRequest, statistics: WorkerStatistics) -> None:
    """Moves the work since the last heartbeat into this one."""
    done = statistics.take()
    negatives, positives = done.histogram.tolist() if done.batches else ((), ())
    request.delta_sequence = done.sequence
    request.worker.MergeFrom(
        pb.WorkerDelta(
            samples=done.samples,
            batches=done.batches,
            loss_sum=done.loss_sum,
            positives=positives,
            negatives=negatives,
            stage_seconds=statistics.total_stages,
            truncated_records=done.truncated_records,
            traffic=pb.WorkerTraffic(**vars(statistics.total_traffic)),
        )
    )
    request.bad_records.extend(map(wire_bad_record, done.bad_records))


def _wire_evaluation(totals: EvaluationTotals) -> pb.Evaluation:
    negatives, positives = totals.histogram.astype("<u4")
    return pb.Evaluation(
        samples=totals.samples,
        loss_sum=totals.loss_sum,
        prediction_sum=totals.prediction_sum,
        label_sum=totals.label_sum,
        positives=positives.tobytes(),
        negatives=negatives.tobytes(),
    )
