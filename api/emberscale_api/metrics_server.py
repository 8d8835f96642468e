"""Serves a process's metrics to whoever asks: strangers that hold connections take no more than a few threads.

The liveness probe of a pod asks here, too, so a server that is full must go on answering those who ask at once.
"""

import contextlib
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_MOST_CONNECTIONS = 32
_REQUEST_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS  # for each read and write of the connection

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection; beyond a number, the oldest one is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread."""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _hang_up(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a peer that goes away, is too slow, or is hung up on."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


def _hang_up(connection: socket.socket) -> None:
    """Ends a connection for the thread that waits for it, which then closes it."""
    with contextlib.suppress(OSError):  # its peer was faster
        connection.shutdown(socket.SHUT_RDWR)


def _application(registry: Collector) -> Any:
    """Serves the registry, in the usual format if the one that is asked for makes no sense."""
    serve = make_wsgi_app(registry)

    def application(environment: dict[str, Any], start_response: Any) -> Any:
        try:
            choose_encoder(environment.get("HTTP_ACCEPT", ""))
        except TypeError:  # the version of the format is not a number, but the library compares it with one
            del environment["HTTP_ACCEPT"]
        return serve(environment, start_response)

    return application


def start_metrics_server(port: int, host: str, registry: Collector) -> WSGIServer:
    """Starts a server on a thread and returns it. Raises OSError for an address in use."""
    kind = _MetricsServer6 if ":" in host else _MetricsServer
    server: WSGIServer = make_server(host, port, _application(registry), server_class=kind, handler_class=_Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
