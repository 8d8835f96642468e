"""Converts between the master's types and the brain's messages, and estimates a model's size before the job starts."""

from collections.abc import Mapping

from emberscale_api.job import (
    DataFormat,
    Durability,
    FaultToleranceStrategy,
    RecoveryPriority,
    TrainingJob,
    TrainingJobSpec,
    resolve_model,
)
from emberscale_api.job.dense import dense_parameters
from emberscale_api.job.roles import MAX_REPLICAS
from emberscale_api.routing import BUCKETS
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.shape import RoleShape
from emberscale_jobmaster.figures import sizes_of
from emberscale_jobmaster.messages import check_numbers
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.tasks import InvalidReportError

_FLOAT_BYTES = 4
_RECORD_BYTES: Mapping[DataFormat, int] = {
    DataFormat.CRITEO_TSV: 230,
    DataFormat.CSV: 200,
    DataFormat.PARQUET: 100,
}
"""The rough size of a record, good enough for a first guess of the number of records."""

_FEWEST_BATCHES = 16
"""Between two looks at a bucket for the sake of `eviction.maxRows`."""


def submission(job: TrainingJob, uid: str, state: JobState, data_bytes: int, wall: float) -> pb.SubmitJobRequest:
    """Returns the submission of a job at `wall` seconds since 1970.

    `data_bytes` is the size of the training data, 0 if unknown. The brain learns since when the job has been active:
    its reports count the servers that it has lost since then.
    """
    spec = job.spec
    model = resolve_model(spec)
    dimensions = [table.dimension for table in model.tables]
    records = state.training_records or max(1, data_bytes // _RECORD_BYTES[spec.data.format])
    request = pb.SubmitJobRequest(
        job_uid=uid,
        owner=job.metadata.namespace,
        description=pb.JobDescription(
            architecture=str(spec.model.architecture or spec.model.entrypoint),
            batch_size=spec.training.batch_size,
            dense_bytes=_FLOAT_BYTES * sum(one.length for one in dense_parameters(spec.model, model)),
            embedding_dimension=sum(dimensions),
            tables=len(dimensions),
            total_samples=records * spec.training.epochs,
            name=job.metadata.name,
            optimizer=str(spec.optimizers.sparse.type),
            data_bytes=data_bytes,
            epochs=spec.training.epochs,
            most_rows=most_rows(spec),
            target_pls=spec.fault_tolerance.allowed_pls,
            saves_priority_rows=spec.fault_tolerance.priority is not RecoveryPriority.NONE,
            parity=spec.allowed_parity,
            async_parity=spec.fault_tolerance.durability is Durability.ASYNC,
        ),
        limits=shape_limits(spec),
        fixed=not spec.leaves_sizes_open,
        submitted_at=max(0.0, wall - state.clock.active_seconds),
        last_plan=state.scaling.plan_version,
    )
    sizes = sizes_of(state, spec)
    decided = spec.leaves_sizes_open and state.scaling.sizes is not None
    limited = sizes.ps.cpu_cores is not None and sizes.worker.cpu_cores is not None
    if not state.scaling.waits_for_plan and (decided or limited):
        request.current.CopyFrom(shape(sizes))
    return request


def shape_limits(spec: TrainingJobSpec) -> pb.ShapeLimits:
    """Returns the manifest's bounds; 0 if it has none."""
    limits = pb.ShapeLimits()
    ps, worker = spec.ps, spec.worker
    for bound, low in ((limits.least, True), (limits.most, False)):
        bound.workers = worker.replicas or (worker.min_replicas if low else worker.max_replicas) or 0
        bound.ps = ps.replicas or (ps.min_replicas if low else ps.max_replicas) or 0
        bound.worker_cpu = worker.resources.cpu_limit or 0.0
        bound.ps_cpu = ps.resources.cpu_limit or 0.0
        bound.worker_memory = worker.resources.memory_limit or 0
        bound.ps_memory = ps.resources.memory_limit or 0
    return limits


def shape(sizes: RoleShapes) -> pb.Shape:
    """Converts a shape to the brain's message."""
    ps, worker = sizes.ps, sizes.worker
    return pb.Shape(
        workers=worker.replicas,
        ps=ps.replicas,
        worker_cpu=worker.cpu_cores or 0.0,
        ps_cpu=ps.cpu_cores or 0.0,
        worker_memory=worker.memory_bytes or 0,
        ps_memory=ps.memory_bytes or 0,
    )


def advice(plan: pb.BrainPlan) -> Advice | None:
    """Returns the plan of a message, or None if it holds no plan. Raises InvalidReportError for an invalid one.

    Its numbers enter the job's state, which later masters must be able to read. The advice for recovery, whose numbers
    may be infinite, is no part of it.
    """
    if not plan.version:
        return None
    planned = pb.BrainPlan()
    planned.CopyFrom(plan)
    planned.ClearField("fault_tolerance")
    check_numbers(planned)
    sizes = None
    if plan.HasField("shape"):
        given = plan.shape
        for name, replicas, cores in (("workers", given.workers, given.worker_cpu), ("ps", given.ps, given.ps_cpu)):
            if not (1 <= replicas <= MAX_REPLICAS and cores > 0):
                raise InvalidReportError(
                    f"shape.{name}: {replicas} x {cores:g} cores; expected 1 to {MAX_REPLICAS}, with more than 0 cores"
                )
        sizes = RoleShapes(
            ps=RoleShape(given.ps, given.ps_cpu, given.ps_memory or None),
            worker=RoleShape(given.workers, given.worker_cpu, given.worker_memory or None),
        )
    return Advice(plan.version, plan.action, sizes, plan.reason, plan.expected_throughput)


def strategy(advice: pb.FaultToleranceAdvice) -> FaultToleranceStrategy:
    """Returns the advised strategy; full recovery if this version does not know the strategy."""
    known = {str(one) for one in FaultToleranceStrategy}
    return FaultToleranceStrategy(advice.strategy) if advice.strategy in known else FaultToleranceStrategy.FULL_RECOVERY


def most_rows(spec: TrainingJobSpec) -> int:
    """Returns the rows that eviction leaves of all tables together; 0 if it does not bound each of them.

    A bucket is looked at once in so many batches (`eviction.maxRows` in docs/models.md). The ids that these bring come
    on top.
    """
    model, total = resolve_model(spec), 0
    lengths = {column.name: column.max_length for column in model.columns.lists}
    for table in model.tables:
        most = table.eviction.max_rows
        if most is None:
            return 0
        batches = min(max(most // BUCKETS, _FEWEST_BATCHES), BUCKETS)
        ids = lengths.get(model.columns.id_columns[table.column], 1)
        total += most + batches * spec.training.batch_size * ids
    return total
