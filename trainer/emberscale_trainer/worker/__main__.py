"""Entry point of a worker process."""

import signal
import threading
from typing import NoReturn

import structlog
import torch

from emberscale_api.environment import SUPERSEDED_EXIT_CODE, ProcessIdentity
from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership import MasterClient, SupersededError
from emberscale_trainer.process import keep_freed_memory, run_process, serve_metrics
from emberscale_trainer.worker.compute import threads_of
from emberscale_trainer.worker.runtime import FatalError, Worker
from emberscale_trainer.worker.statistics import WorkerMetrics, WorkerStatistics

_log = structlog.get_logger()


def main() -> NoReturn:
    """Works until the job is over.

    The exit code is 0 then, 1 for a failure that ends the job, 3 if another process took this one's place.
    """
    run_process(_work)


def _work(identity: ProcessIdentity, stopping: threading.Event) -> int:
    keep_freed_memory()
    torch.set_num_threads(threads_of(identity.cpu_cores))
    master = MasterClient(identity)

    def stop(*_: object) -> None:
        stopping.set()
        master.close()

    signal.signal(signal.SIGTERM, stop)
    registry, metrics_address = serve_metrics(identity)
    statistics = WorkerStatistics()
    registry.register(WorkerMetrics(statistics))
    try:
        Worker(identity, master, statistics, metrics_address, stopping).run()
    except SupersededError as error:
        _log.warning("superseded", problem=str(error))
        return SUPERSEDED_EXIT_CODE
    except FatalError as error:
        _log.error("job_fails", reason=error.reason, problem=str(error))
        failure = master_pb2.ReportFailureRequest(
            member=master.member, reason=error.reason, message=str(error), fatal=True
        )
        master.call(master.stub.ReportFailure, failure)
        return 1
    return 0


if __name__ == "__main__":
    main()
