"""The start and the end of every process of the trainer."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import structlog
from prometheus_client import CollectorRegistry

from emberscale_api.environment import UNUSABLE_EXIT_CODE, ProcessIdentity, read_identity
from emberscale_api.errors import InvalidError
from emberscale_api.metrics_server import start_metrics_server
from emberscale_api.telemetry import ProcessMetrics, configure_logging
from emberscale_trainer.membership import NoHandshakeError

_log = structlog.get_logger()

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""

Serve = Callable[[ProcessIdentity, threading.Event], int]


def run_process(serve: Serve) -> NoReturn:
    """Ends the process with the code that `serve` returns, or with 2 where the environment does not say who it is or is
    not that of the master.

    `serve` gets the identity and an event that is set on SIGTERM.
    """
    try:
        identity = read_identity()
    except InvalidError as error:
        print(error, file=sys.stderr)  # noqa: T201 - there is no identity to log with
        _end(UNUSABLE_EXIT_CODE)
    configure_logging(identity.job_name, identity.role, identity.index)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        code = serve(identity, stopping)
    except NoHandshakeError as error:
        _log.error("unusable", problem=str(error))
        code = UNUSABLE_EXIT_CODE
    _end(code)


def serve_metrics(identity: ProcessIdentity) -> tuple[CollectorRegistry, str]:
    """Serves the process's metrics; returns the registry for more of them, and the address."""
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    server = start_metrics_server(identity.metrics_port, identity.listen_host, registry)
    return registry, f"{identity.advertised_host}:{server.server_port}"


def keep_freed_memory() -> None:
    """Lets malloc keep freed memory, for a process that allocates the same sizes for every batch.

    By default glibc returns the megabytes of a batch to the kernel and has them zeroed for the next one: 90 page faults
    a batch of 2,048. Does nothing with a C library other than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 16 << 20)


def _end(code: int) -> NoReturn:
    """Ends the process at once: taking torch and the kernels down first would cost a second."""
    sys.stderr.flush()
    os._exit(code)
