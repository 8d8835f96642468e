"""Entry point of a parameter server process."""

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
import structlog
import torch
from prometheus_client import CollectorRegistry, start_http_server

from emberscale_api.environment import MissingVariableError, ProcessIdentity, read_identity
from emberscale_api.events import configure_logging
from emberscale_api.process_metrics import ProcessMetrics
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_api.rpc.token import CHANNEL_OPTIONS, TokenCheck
from emberscale_trainer.membership import Heartbeat, MasterClient, SupersededError
from emberscale_trainer.server.control import ParameterServerControl
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.metrics import ServerMetrics, stage_seconds
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import listen

log = structlog.get_logger()

SUPERSEDED_EXIT_CODE = 3


def main() -> int:
    """Serves until the job is over; the exit code is 0 then, and 3 if another process took this one's place."""
    try:
        identity = read_identity()
    except MissingVariableError as error:
        print(error, file=sys.stderr)  # noqa: T201 - there is no identity to log with
        return 2
    configure_logging(identity.job_name, identity.role, identity.index)
    torch.set_num_threads(max(1, int(identity.cpu_cores or 1)))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    return _serve(identity, stopping)


def _serve(identity: ProcessIdentity, stopping: threading.Event) -> int:
    listener, data_address = _listen(identity)
    master = MasterClient(identity)
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    metrics_server, _ = start_http_server(identity.metrics_port, addr=identity.listen_host, registry=registry)
    grpc_server = grpc.server(
        ThreadPoolExecutor(max_workers=4), interceptors=[TokenCheck(identity.token)], options=CHANNEL_OPTIONS
    )
    control_port = grpc_server.add_insecure_port(f"{identity.listen_host}:0")

    state = ServerState()
    control = ParameterServerControl(identity.index, state, ServerMetrics(state, registry))
    master_pb2_grpc.add_ParameterServerServicer_to_server(control, grpc_server)
    grpc_server.start()
    DataPlane(listener, state, identity.token).start()

    try:
        registered = master.register(
            data_address=data_address,
            control_address=f"{identity.advertised_host}:{control_port}",
            metrics_address=f"{identity.advertised_host}:{metrics_server.server_port}",
            routing_epoch=lambda: control.routing_epoch,
        )
    except SupersededError as error:
        log.warning("superseded", detail=str(error))
        return SUPERSEDED_EXIT_CODE
    log.info("registered", data_address=data_address)

    def report(request: master_pb2.HeartbeatRequest) -> None:
        request.ps.rows.update(state.rows())
        request.ps.table_bytes = state.table_bytes()
        request.ps.applied_batches = state.totals.pushes
        request.ps.repeated_batches = state.totals.repeated
        request.ps.routing_epoch = state.routing_epoch
        request.ps.stage_seconds.update(stage_seconds(state))

    heartbeat = Heartbeat(master, registered.heartbeat_seconds, report, lambda reply: None, stopping)
    heartbeat.start()
    stopping.wait()
    listener.close()
    log.info("stopped", pushes=state.totals.pushes, repeated=state.totals.repeated)
    return SUPERSEDED_EXIT_CODE if heartbeat.superseded else 0


def _listen(identity: ProcessIdentity) -> tuple[socket.socket, str]:
    """The data plane's socket: a Unix socket where all processes share a folder, TCP otherwise."""
    if identity.socket_directory is not None:
        path = identity.socket_directory / f"ps-{identity.index}-{identity.incarnation[:8]}.sock"
        return listen(f"unix://{path}")
    listener, address = listen(f"tcp://{identity.listen_host}:0")
    return listener, f"tcp://{identity.advertised_host}:{address.rsplit(':', 1)[1]}"


def exit_with_main() -> NoReturn:
    """Runs `main` and ends the process at once: taking torch and the kernels down first would cost a second."""
    code = main()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with_main()
