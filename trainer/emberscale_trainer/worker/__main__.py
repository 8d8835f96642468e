"""Entry point of a worker process."""

import os
import signal
import sys
import threading
from typing import NoReturn

import structlog
import torch
from prometheus_client import CollectorRegistry, start_http_server

from emberscale_api.environment import MissingVariableError, read_identity
from emberscale_api.events import configure_logging
from emberscale_api.process_metrics import ProcessMetrics
from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership import MasterClient, SupersededError
from emberscale_trainer.worker.cores import threads_of
from emberscale_trainer.worker.metrics import WorkerMetrics
from emberscale_trainer.worker.runtime import FatalError, Worker
from emberscale_trainer.worker.statistics import WorkerStatistics

log = structlog.get_logger()

SUPERSEDED_EXIT_CODE = 3


def main() -> int:
    """Works until the job is over.

    The exit code is 0 then, 1 for a failure that ends the job, 3 if another process took this one's place.
    """
    try:
        identity = read_identity()
    except MissingVariableError as error:
        print(error, file=sys.stderr)  # noqa: T201 - there is no identity to log with
        return 2
    configure_logging(identity.job_name, identity.role, identity.index)
    torch.set_num_threads(threads_of(identity.cpu_cores))
    stopping = threading.Event()
    master = MasterClient(identity)

    def stop(*_: object) -> None:
        stopping.set()
        master.close()

    signal.signal(signal.SIGTERM, stop)
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    statistics = WorkerStatistics()
    registry.register(WorkerMetrics(statistics))
    metrics_server, _ = start_http_server(identity.metrics_port, addr=identity.listen_host, registry=registry)
    metrics_address = f"{identity.advertised_host}:{metrics_server.server_port}"
    try:
        Worker(identity, master, statistics, metrics_address, stopping).run()
    except SupersededError as error:
        log.warning("superseded", detail=str(error))
        return SUPERSEDED_EXIT_CODE
    except FatalError as error:
        log.error("job_fails", reason=error.reason, message=str(error))
        failure = master_pb2.ReportFailureRequest(
            member=master.member, reason=error.reason, message=str(error), fatal=True
        )
        master.call(master.stub.ReportFailure, failure)
        return 1
    return 0


def exit_with_main() -> NoReturn:
    """Runs `main` and ends the process at once: taking torch and the kernels down first would cost a second."""
    code = main()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_with_main()
