"""Converts between messages and the core's types. Incoming values are checked against their bounds."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from emberscale_api.dataset import DataFile
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MAX_REPLICAS, MemberId, Role
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.status import EVALUATION_BINS, MAX_COUNT, MAX_QUANTITY
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import WIRE_SPLITS, file_from_wire, message_of, role_from_wire, same_fields, wire_role
from emberscale_api.rpc.fields import present_fields
from emberscale_jobmaster import ranges
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.ranges import Ranges
from emberscale_jobmaster.reports import ServerReport, WorkReport
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, InvalidReportError, Task

_MAX_TEXT = 4096
_MAX_BAD_RECORDS = 10_000
_MAX_NAMES = 4096
_MAX_SUM = 1e100
"""The largest loss sum: far above any sum of float32 losses, and small enough that a job can add them up as doubles."""
_SUMS = frozenset({"loss_sum", "prediction_sum"})
_IDENTIFIERS = frozenset({"session"})
"""Fields whose integers use all 64 bits."""
_REASON = re.compile(r"^[A-Z][A-Za-z0-9]{0,127}$")


def check_numbers(said: Message, where: str = "") -> None:
    """Raises InvalidReportError for a number that no process can mean: NaN, infinite or negative, or beyond MAX_COUNT.

    With such a number, the master could not write or read its own messages, or its state in Redis.
    """
    for present in present_fields(said):
        name, field, values, keys = f"{where}{present.name}", present.field, present.values, present.keys
        if len(keys) > _MAX_NAMES or any(len(key) > _MAX_TEXT for key in keys):
            raise InvalidReportError(f"{name}: at most {_MAX_NAMES} names of {_MAX_TEXT} characters")
        if present.is_message:
            for part in values:
                check_numbers(part, f"{name}.")
        elif field.type == FieldDescriptor.TYPE_DOUBLE:
            most = _MAX_SUM if field.name in _SUMS else MAX_QUANTITY
            least = -most if field.name == "loss_sum" else 0.0
            # NaN fails every comparison, so that `not` finds it
            _check(name, [number for number in values if not least <= number <= most], least, most)
        elif field.type == FieldDescriptor.TYPE_UINT64 and field.name not in _IDENTIFIERS:
            _check(name, [number for number in values if number > MAX_COUNT], 0, MAX_COUNT)


def _check(name: str, wrong: Sequence[float], least: float, most: float) -> None:
    if wrong:
        raise InvalidReportError(f"{name}: {wrong[0]} is not between {least:g} and {most:g}")


def member_id(member: pb.Member, *allowed: Role) -> MemberId:
    """Returns the calling member, which must have one of the `allowed` roles. Raises InvalidReportError."""
    role = role_from_wire(member.role)
    if role is None or role not in allowed:
        raise InvalidReportError(f"member.role: expected {' or '.join(allowed)}")
    if member.index >= MAX_REPLICAS:
        raise InvalidReportError(f"member.index: {member.index} is above {MAX_REPLICAS - 1}")
    if not 0 < len(member.incarnation) <= _MAX_TEXT:
        raise InvalidReportError("member.incarnation: is required")
    return MemberId(role, member.index, member.incarnation)


def wire_member(role: Role, index: int, incarnation: str) -> pb.Member:
    """The inverse of `member_id`."""
    return pb.Member(role=wire_role(role), index=index, incarnation=incarnation)


def process(request: pb.RegisterRequest, role: Role) -> Process:
    """The process that registers. Raises InvalidReportError for a parameter server without addresses."""
    if role is Role.PS and not (request.data_address and request.control_address):
        raise InvalidReportError("data_address and control_address: a parameter server needs both")
    texts = (request.data_address, request.control_address, request.metrics_address, request.host)
    if any(len(text) > _MAX_TEXT for text in texts):
        raise InvalidReportError(f"addresses and host: at most {_MAX_TEXT} characters")
    return same_fields(Process, request, incarnation=request.member.incarnation, alive=True)


def work_report(delta: pb.WorkerDelta) -> WorkReport:
    """Returns a worker's report of its work. Raises InvalidReportError."""
    if len(delta.positives) != len(delta.negatives) or len(delta.positives) > EVALUATION_BINS:
        raise InvalidReportError(f"worker.positives and negatives: expected equal lengths of at most {EVALUATION_BINS}")
    rounds = _rounds(delta.rounds) if delta.HasField("rounds") else None
    return same_fields(WorkReport, delta, rounds=rounds)


def _rounds(told: pb.RoundsDecision) -> RoundsDecision:
    return same_fields(RoundsDecision, told, reason=told.reason[:_MAX_TEXT], message=told.message[:_MAX_TEXT])


def server_report(report: pb.PsReport) -> ServerReport:
    """Returns a parameter server's report of its rows."""
    return same_fields(ServerReport, report, parity_trouble=_parity_trouble(report))


def _parity_trouble(report: pb.PsReport) -> ParityTrouble | None:
    if not report.HasField("parity_trouble"):
        return None
    told = report.parity_trouble
    return ParityTrouble(told.routing_version, told.message[:_MAX_TEXT], told.seconds, told.broken)


def bad_records(records: Iterable[pb.BadRecord]) -> list[BadRecord]:
    """Returns the malformed records of a call, at most a bounded number."""
    return [
        BadRecord(record.file[:_MAX_TEXT], record.line, record.problem[:_MAX_TEXT])
        for record, _ in zip(records, range(_MAX_BAD_RECORDS), strict=False)
    ]


def drain(request: pb.DrainRequest) -> tuple[int, str, str]:
    """Returns the index and incarnation of the server to drain, and why. Raises InvalidReportError."""
    if not request.incarnation:
        raise InvalidReportError("incarnation: is required")
    return request.index, request.incarnation, request.reason[:_MAX_TEXT]


def failure(request: pb.ReportFailureRequest) -> tuple[str, str]:
    """Returns reason and message of a failed member. Raises InvalidReportError unless the reason is CamelCase."""
    if not _REASON.match(request.reason):
        raise InvalidReportError("reason: expected one CamelCase word, such as NonFiniteLoss")
    return request.reason, request.message[:_MAX_TEXT]


def finding(result: pb.TaskResult, stage: Stage) -> Finding:
    """Returns the finding of a finished task of a stage. Raises InvalidReportError."""
    match stage:
        case Stage.DISCOVER:
            found = (result.training_files, result.evaluation_files)
            return Discovered(*(tuple(map(file_from_wire, files)) for files in found))
        case Stage.INDEX:
            return Indexed(sum(block.records for block in result.blocks))
        case Stage.EVALUATE:
            return _tally(result.evaluation)
        case _:
            return None


def check_blocks(blocks: Iterable[pb.Block], file: DataFile, file_number: int) -> None:
    """Raises InvalidReportError unless the blocks cover consecutive records of the file, without gaps.

    Byte ranges prove less: those of a compressed file refer to its text, and parts of one Parquet row group share one.
    """
    offset, record = 0, 0
    for block in blocks:
        if block.file_number != file_number or block.offset < offset or block.first_record != record:
            raise InvalidReportError(
                f"{file.uri}: the block at byte {block.offset} with record {block.first_record} "
                "does not follow the one before"
            )
        offset, record = block.offset, record + block.records


def wire_task(task: Task) -> pb.Task:
    """Converts a task for its worker."""
    split = WIRE_SPLITS[task.split] if task.split is not None else pb.SPLIT_UNSPECIFIED
    return message_of(pb.Task, task, kind=pb.TaskKind.Value(task.stage.name), split=split)


def wire_routing(table: RoutingTable, ready: bool) -> pb.Routing:
    """Returns the message of a routing table."""
    servers = [
        message_of(pb.PsEndpoint, server, data_address=server.data, control_address=server.control)
        for server in table.servers
    ]
    return message_of(pb.Routing, table, servers=servers, ready=ready)


def lease_tokens(state: JobState) -> pb.LeaseTokens:
    """Returns the leases of training tasks that are in force."""
    live = state.ledger.leases.keys() if state.stage is Stage.TRAIN else ()
    return pb.LeaseTokens(live=live, next=state.next_token)


def applied(batches: Iterable[pb.AppliedBatches]) -> dict[int, Ranges]:
    """Batches by epoch. Raises ValueError."""
    return {entry.epoch: ranges.unflattened(entry.ranges) for entry in batches if entry.ranges}


def wire_applied(by_epoch: Mapping[int, Ranges]) -> list[pb.AppliedBatches]:
    """The inverse of `applied`."""
    return [
        pb.AppliedBatches(epoch=epoch, ranges=ranges.flattened(batches))
        for epoch, batches in sorted(by_epoch.items())
        if batches
    ]


def _tally(evaluation: pb.Evaluation) -> Tally:
    histograms = []
    for name, data in (("positives", evaluation.positives), ("negatives", evaluation.negatives)):
        if len(data) != 4 * EVALUATION_BINS:
            raise InvalidReportError(
                f"evaluation.{name}: expected {EVALUATION_BINS} 32-bit counts, got {len(data)} bytes"
            )
        histograms.append(tuple(np.frombuffer(data, dtype="<u4").tolist()))
    if sum(map(sum, histograms)) != evaluation.samples:
        raise InvalidReportError("evaluation: the histograms do not add up to evaluation.samples")
    return same_fields(Tally, evaluation, positives=histograms[0], negatives=histograms[1])
