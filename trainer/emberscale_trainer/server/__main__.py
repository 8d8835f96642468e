"""Entry point of a parameter server process."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
import structlog

from emberscale_api.environment import SUPERSEDED_EXIT_CODE, ProcessIdentity
from emberscale_api.job import MOST_PARITY, ScalingMode, TrainingJob
from emberscale_api.rpc import master_pb2, master_pb2_grpc, tls
from emberscale_api.rpc.codec import message_of
from emberscale_api.rpc.token import CHANNEL_OPTIONS, TokenCheck
from emberscale_api.shape import memory_reserve
from emberscale_api.telemetry import MemoryGauge
from emberscale_trainer.membership import Heartbeat, JobOverError, MasterClient, SupersededError
from emberscale_trainer.process import run_process, serve_metrics
from emberscale_trainer.server.control import ParameterServerControl
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.metrics import ServerMetrics, stage_seconds
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.saves import FlashStore
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import listen

_log = structlog.get_logger()

_LOOK_SECONDS = 0.1


def main() -> NoReturn:
    """Serves until the job is over; the exit code is 0 then, and 3 if another process took this one's place."""
    run_process(_serve)


def _serve(identity: ProcessIdentity, stopping: threading.Event) -> int:
    listener, data_address = _listen(identity)
    master = MasterClient(identity)
    registry, metrics_address = serve_metrics(identity)
    grpc_server = grpc.server(
        ThreadPoolExecutor(max_workers=4), interceptors=[TokenCheck(identity.token)], options=CHANNEL_OPTIONS
    )
    control_port = tls.bind(grpc_server, f"{identity.listen_host}:0", identity.certificates)

    state = ServerState()
    memory = MemoryGauge(identity.memory_bytes)
    context = identity.certificates.server_context if identity.certificates is not None else None
    peers = identity.certificates.client_context if identity.certificates is not None else None
    mover = RowMover(state, identity.token, peers)
    metrics = ServerMetrics(state, mover.protection, registry)
    flash = FlashStore(identity.flash_redis_url, identity.job_uid) if identity.flash_redis_url else None
    control = ParameterServerControl(
        identity.index, identity.incarnation, state, mover, metrics, flash, lambda: _left(memory)
    )
    master_pb2_grpc.add_ParameterServerServicer_to_server(control, grpc_server)
    grpc_server.start()
    DataPlane(listener, state, identity.token, identity.incarnation, context, mover.streams).start()

    try:
        registered = master.register(
            data_address=data_address,
            control_address=f"{identity.advertised_host}:{control_port}",
            metrics_address=metrics_address,
            adopted=lambda: state.core.known,
            stopping=stopping,
            most_parity=MOST_PARITY,
            knows_async_parity=True,
            adopts_rows=True,
            rebuilds_on_demand=True,
        )
    except JobOverError:
        _log.info("stopped", reason="NotRegistered")
        return 0
    except SupersededError as error:
        _log.warning("superseded", problem=str(error))
        return SUPERSEDED_EXIT_CODE
    _log.info("registered", data_address=data_address)

    def report(request: master_pb2.HeartbeatRequest) -> None:
        mover.look()
        figures = state.figures()
        request.ps.rows.update(figures.rows)
        request.ps.table_bytes = figures.table_bytes
        for table, counts in figures.admission.items():
            request.ps.admission[table].CopyFrom(message_of(master_pb2.AdmissionCounts, counts))
        request.ps.applied_batches = state.totals.pushes
        request.ps.repeated_batches = state.totals.repeated
        request.ps.next_token, request.ps.next_barrier = state.core.next_numbers
        request.ps.next_checkpoint = state.core.next_checkpoint
        request.ps.generation, request.ps.routing_version = state.core.known
        request.ps.stage_seconds.update(stage_seconds(state))
        request.ps.delays_for_memory = state.core.pressure.delays
        request.ps.protected_version = mover.protection.version
        if (missing := state.missing) is not None:
            request.ps.missing_rows = missing.count
        if (trouble := mover.trouble) is not None:
            told = message_of(master_pb2.ParityTrouble, trouble, routing_version=trouble.version)
            request.ps.parity_trouble.CopyFrom(told)
        request.memory_bytes = max(request.memory_bytes, memory.used())

    def heed(reply: master_pb2.HeartbeatReply) -> None:
        state.hear_generation(reply.generation)
        memory.grant(reply.memory_bytes)
        if reply.HasField("leases"):
            state.hear_leases(reply.generation, reply.leases.live, reply.leases.next)

    spec = TrainingJob.from_json(registered.manifest_json).spec
    rows_can_leave = spec.leaves_sizes_open and spec.scaling.mode is not ScalingMode.MANUAL
    told_to_end = threading.Event()
    heartbeat = Heartbeat(master, registered.heartbeat_seconds, report, heed, told_to_end)
    heartbeat.start()
    while not told_to_end.wait(_LOOK_SECONDS):
        if rows_can_leave:
            state.look_at_memory(memory.used(), memory.limit())
        if stopping.is_set():
            may_go = master.leave(identity.leave_seconds)
            _log.info("leaves", may_go=may_go)
            break
    listener.close()
    _log.info("stopped", pushes=state.totals.pushes, repeated=state.totals.repeated)
    return SUPERSEDED_EXIT_CODE if heartbeat.superseded else 0


def _left(memory: MemoryGauge) -> int | None:
    """Returns the bytes below the memory limit that are free for rows; None without a limit."""
    limit = memory.limit()
    return None if limit is None else limit - memory_reserve(limit) - memory.used()


def _listen(identity: ProcessIdentity) -> tuple[socket.socket, str]:
    """The data plane's socket: a Unix socket where all processes share a folder, TCP otherwise."""
    if identity.socket_directory is not None:
        path = identity.socket_directory / f"ps-{identity.index}-{identity.incarnation[:8]}.sock"
        return listen(f"unix://{path}")
    listener, address = listen(f"tcp://{identity.listen_host}:0")
    return listener, f"tcp://{identity.advertised_host}:{address.rsplit(':', 1)[1]}"


if __name__ == "__main__":
    main()
