"""`python -m emberscale_jobmaster`: the master of one job, configured by its environment.

Exit codes: 0 after SIGTERM, SIGINT or Shutdown, 2 if something that it needs is unavailable, 3 if another master of the
same job has taken over, 1 for a defect.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import structlog

from emberscale_api import environment
from emberscale_api.certificates import client_context
from emberscale_api.environment import ProcessIdentity, read_identity
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.job import TrainingJob, load_manifest
from emberscale_api.telemetry import configure_logging
from emberscale_jobmaster.server import MasterProcess
from emberscale_jobmaster.store import JobStore

EXIT_DEFECT = 1
PATIENCE_SECONDS = 8.0
"""The longest time that a starting master waits for Redis, or for the address to listen on."""

_log = structlog.get_logger()


def main() -> None:
    """Runs the master until it is told to stop."""
    try:
        identity = read_identity()
        job, redis_url = _job(), environment.required(environment.REDIS_URL)
        brain_authority = _brain_authority()
        operator_token = _operator_token()
    except (OSError, ValueError) as error:
        sys.exit(_unusable(str(error)))
    configure_logging(identity.job_name, "master", identity.index)
    sys.exit(run(identity, job, redis_url, brain_authority, operator_token))


def run(
    identity: ProcessIdentity, job: TrainingJob, redis_url: str, brain_authority: bytes | None, operator_token: str
) -> int:
    """Serves until a signal, a defect or another master ends it; returns the exit code."""
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def on_defect(args: threading.ExceptHookArgs) -> None:
        _log.error("defect", thread=args.thread.name if args.thread else "", exc_info=args.exc_value)
        end(EXIT_DEFECT)

    threading.excepthook = on_defect
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end(0))
    try:
        store = JobStore(redis_url, identity.job_uid)
    except ValueError as error:
        return _unusable(f"{environment.REDIS_URL}: {error}")
    try:
        master = MasterProcess(
            identity,
            job,
            store,
            on_deposed=lambda: end(environment.SUPERSEDED_EXIT_CODE),
            on_shutdown=lambda: end(0),
            brain_address=os.environ.get(environment.BRAIN_ADDRESS, ""),
            brain_token=os.environ.get(environment.BRAIN_TOKEN, ""),
            brain_authority=brain_authority,
            alone=environment.ALONE in os.environ,
            operator_token=operator_token,
        )
    except InvalidError as error:
        return _unusable(str(error))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ended.is_set():
        try:
            master.start()
            break
        except UnavailableError as error:
            if time.monotonic() > deadline:
                return _unusable(str(error))
            ended.wait(0.5)
        except InvalidError as error:
            return _unusable(str(error))
    else:
        return codes[0]
    ended.wait()
    _log.info("stopping", exit_code=codes[0])
    master.stop()
    return codes[0]


def _job() -> TrainingJob:
    path = Path(environment.required(environment.MANIFEST_FILE))
    return TrainingJob.from_json(path.read_text()) if path.suffix == ".json" else load_manifest(path)


def _brain_authority() -> bytes | None:
    authority = os.environ.get(environment.BRAIN_CA, "").encode()
    if not authority:
        return None
    client_context(authority, environment.BRAIN_CA)  # of use only if it can be read
    return authority


def _operator_token() -> str:
    """The operator's token; empty if the operator that began the job predates the token."""
    file = os.environ.get(environment.OPERATOR_TOKEN_FILE, "")
    return Path(file).read_text(encoding="ascii").strip() if file and Path(file).exists() else ""


def _unusable(problem: str) -> int:
    print(f"emberscale-master: {problem}", file=sys.stderr)  # noqa: T201  # the one line a person sees
    return environment.UNUSABLE_EXIT_CODE


if __name__ == "__main__":
    main()
