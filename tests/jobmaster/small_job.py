"""The small job of these tests: its manifest, and the results of its workers' tasks."""

from typing import Any

from emberscale_api.job import TrainingJob
from emberscale_api.rpc import master_pb2 as pb
from training_jobs import training_job

TOKEN = "a-token-of-this-job"
BATCH = 10
BINS = 16384
FILE = "/data/day_0"


def job(records: int = 400, evaluation: int = 0, **spec: Any) -> TrainingJob:
    """A job with small batches and frequent heartbeats; `records` is not in the manifest, only FakeWorker knows it."""
    sections: dict[str, Any] = {
        "data": {"train": [FILE], "evaluation": ["/data/test"] if evaluation else []},
        "training": {"batchSize": BATCH},
        "sharding": {"minBatches": 2, "maxBatches": 4, "leaseTimeout": 5, "heartbeatInterval": 0.05},
        "ps": {"replicas": 2},
        "worker": {"replicas": 2},
    }
    for section, values in spec.items():
        sections[section] = {**sections.get(section, {}), **values}
    return training_job(name="fake", **sections)


def discovered(task: pb.Task, evaluation: int = 0) -> pb.TaskResult:
    """The result of a DISCOVER task: a training file, and an evaluation file if there is evaluation data."""
    others = [pb.DataFile(uri="/data/test", bytes=evaluation)] if evaluation else []
    return pb.TaskResult(
        token=task.token, training_files=[pb.DataFile(uri=FILE, bytes=1 << 20)], evaluation_files=others
    )


def indexed(task: pb.Task, records: int) -> pb.TaskResult:
    """The result of an INDEX task: one block."""
    block = pb.Block(file_number=task.file_number, offset=0, length=task.file.bytes, records=records)
    return pb.TaskResult(token=task.token, blocks=[block])


def evaluated(task: pb.Task) -> pb.TaskResult:
    """The result of an EVALUATE task of a model that puts half of the samples right and half wrong."""
    samples = task.stop - task.start
    histogram = bytearray(4 * BINS)
    histogram[0:4] = (samples // 2).to_bytes(4, "little")
    histogram[-4:] = (samples - samples // 2).to_bytes(4, "little")
    empty = bytes(4 * BINS)
    return pb.TaskResult(
        token=task.token,
        evaluation=pb.Evaluation(
            samples=samples,
            loss_sum=0.5 * samples,
            prediction_sum=0.5 * samples,
            label_sum=samples,
            positives=bytes(histogram),
            negatives=empty,
        ),
    )
