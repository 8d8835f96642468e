"""The roof of a job: how fast its workers' code computes when nothing has to be pulled, pushed or read."""

import math
import threading
import time

import numpy as np
import torch

from emberscale._profiling.job_profile import Roof
from emberscale_api.dataset import Dataset, Split
from emberscale_api.job import TrainingJob, resolve_model
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.data.source import Batch, BatchSource
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.table import TableStore
from emberscale_trainer.worker.compute import ModelReplica
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner
from emberscale_trainer.worker.servers import Pulled

_BATCHES = 16
"""Distinct batches that are computed in turn: enough that they do not stay in the cache."""

_ONE_SERVER = RoutingTable(1, 1, (PsAddress(0, "", "", ""),), (0,) * BUCKETS, (0,) * DENSE_PIECES)

Ready = tuple[Batch, KeyPlan, Pulled]


def measure_roof(job: TrainingJob, seconds: float) -> Roof:
    """Computes gradients for `seconds`, with a thread for each of the job's workers and as many torch threads in each.

    Raises DataUnavailableError, and EntrypointError for a model of the person's own.
    """
    batches = ready_batches(job, _BATCHES)
    workers = job.spec.worker.initial_replicas
    torch_threads = max(1, math.ceil(job.spec.worker.resources.cpu_limit or 1))
    replicas = [ModelReplica(job) for _ in range(workers)]
    for replica in replicas:
        replica.train(*batches[0])
    samples = [0] * workers
    begin = threading.Barrier(workers + 1)
    stopping = threading.Event()

    def compute(worker: int) -> None:
        torch.set_num_threads(torch_threads)
        begin.wait()
        place = worker
        while not stopping.is_set():
            batch, plan, pulled = batches[place % len(batches)]
            replicas[worker].train(batch, plan, pulled)
            samples[worker] += len(batch.labels)
            place += 1

    threads = [threading.Thread(target=compute, args=(worker,), name="roof") for worker in range(workers)]
    for thread in threads:
        thread.start()
    begin.wait()
    started, cpu_started = time.monotonic(), time.process_time()
    stopping.wait(seconds)
    stopping.set()
    for thread in threads:
        thread.join()
    elapsed, used = time.monotonic() - started, time.process_time() - cpu_started
    return Roof(sum(samples) / elapsed, used / sum(samples), workers * torch_threads)


def ready_batches(job: TrainingJob, count: int) -> list[Ready]:
    """Returns up to `count` batches of the first training file, with the rows and dense parameters of a new job."""
    spec, resolved = job.spec, resolve_model(job.spec)
    reader = record_format(spec.data)
    file = expand(spec.data.train)[0]
    dataset = Dataset(
        training_files=(file,),
        training_blocks=tuple(reader.index_file(file, 0, spec.data.shuffling.block_records)),
    )
    size = spec.training.batch_size
    source = BatchSource(dataset, reader, size, spec.training.seed, spec.data.shuffling.enabled)
    records = source.records(Split.TRAINING)
    stop = min(records, count * size)
    dense = flat_copy(build_model(spec.model, resolved, spec.training.seed)).numpy()
    planner, store = KeyPlanner(_ONE_SERVER, resolved.tables, len(dense)), TableStore(resolved.tables)
    ready = []
    for batch in source.batches(Split.TRAINING, 0, 0, stop):
        plan = planner.plan(batch.ids, batch.lists)
        rows = np.empty(plan.values, np.float32)
        store.pull(plan.counts[0][:-1], plan.keys[0][: plan.distinct], rows)
        ready.append((batch, plan, Pulled(rows, dense)))
    return ready
