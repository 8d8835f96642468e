"""`python -m emberscale_brain`: reads the settings and serves until it is told to stop."""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import structlog

from emberscale_api.certificates import Certificates
from emberscale_api.environment import TOKEN_FILE, mounted_certificates
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.metrics_server import start_metrics_server
from emberscale_api.telemetry import configure_logging
from emberscale_brain.history.database import DatabaseUnusableError
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.service.brain import Brain
from emberscale_brain.service.server import serve
from emberscale_brain.service.settings import BrainSettings, load_settings

_log = structlog.get_logger()

_SUPERSEDED = 3
_GRACE_SECONDS = 5.0
_COLLECTOR = (2_000, 10, 1_000)
_SWITCH_SECONDS = 0.001


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0 after SIGTERM or SIGINT, 2 for settings that cannot be used, 3 once another brain has the database.
    """
    parser = argparse.ArgumentParser(
        prog="emberscale-brain", description="Learns how jobs' throughput depends on their shapes, and plans for all."
    )
    parser.add_argument("--config", type=Path, help="settings in YAML; without it, all defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="one setting, such as planner.rho=2"
    )
    parser.add_argument("--check", action="store_true", help="print the settings with their defaults and exit")
    given = parser.parse_args(arguments)
    try:
        settings = load_settings(given.config, given.set)
        if given.check:
            print(json.dumps(settings.model_dump(mode="json", by_alias=True), indent=2))  # noqa: T201  # its output
            return 0
        token, certificates = _token(settings), mounted_certificates()
        store = HistoryStore.open(_database(settings), exclusive=settings.planning.take_over)
    except InvalidError as error:
        print(error, file=sys.stderr)  # noqa: T201  # before there is a log
        return 2
    configure_logging(job="", role="brain", index=0)
    return asyncio.run(_run(settings, token, certificates, store))


def _database(settings: BrainSettings) -> str:
    if settings.database_file is None:
        return settings.database
    with os_errors_named(f"databaseFile: {settings.database_file} cannot be read"):
        return settings.database_file.read_text(encoding="utf-8").strip()


def _token(settings: BrainSettings) -> str:
    path = settings.token_file or os.environ.get(TOKEN_FILE)
    if path is None:
        raise InvalidError(f"tokenFile: is not set, and {TOKEN_FILE} is not either: callers need it to authenticate")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise InvalidError(f"tokenFile: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"tokenFile: {path} has non-ASCII characters, which no caller can send") from error
    if not token:
        raise InvalidError(f"tokenFile: {path} is empty")
    return token


def _collect_rarely() -> None:
    """Makes the garbage collector run rarely: with a thousand jobs, each full collection stops the brain for 0.2 s.

    Objects that were read at the start are never scanned again, other long-lived objects rarely. Reference counts free
    nearly all garbage without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR)


async def _run(settings: BrainSettings, token: str, certificates: Certificates | None, store: HistoryStore) -> int:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[str | None] = loop.create_future()

    def stop(superseded: str | None = None) -> None:
        if not stopping.done():
            stopping.set_result(superseded)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    brain = Brain(settings, store, on_superseded=lambda why: loop.call_soon_threadsafe(stop, why))
    metrics: WSGIServer | None = None
    if settings.metrics is not None:
        host, _, port = settings.metrics.rpartition(":")
        try:  # before the brain begins: a second instance must not take the database from the first
            metrics = start_metrics_server(int(port), host.strip("[]"), brain.meters.registry)
        except OSError as error:
            _log.error("address_unavailable", problem=str(error), address=settings.metrics)
            return 2
    try:
        await asyncio.to_thread(brain.start)
    except DatabaseUnusableError as error:
        _log.error("database_unusable", problem=str(error), database=store.address)
        return 2
    _collect_rarely()
    sys.setswitchinterval(_SWITCH_SECONDS)  # answering threads wait in turn for those that record and read plans
    try:
        server, port_number = await serve(brain, settings, token, certificates)
    except OSError as error:
        _log.error("address_unavailable", problem=str(error), address=settings.listen)
        await asyncio.to_thread(brain.stop)
        return 2
    _log.info("serving", address=settings.listen, port=port_number, database=store.address)
    superseded = await stopping
    if superseded is not None:
        _log.error("superseded", problem=superseded, database=store.address)
    await server.stop(_GRACE_SECONDS)
    if metrics is not None:
        metrics.shutdown()
    await asyncio.to_thread(brain.stop)
    _log.info("stopped")
    return 0 if superseded is None else _SUPERSEDED


if __name__ == "__main__":
    sys.exit(main())
