"""Chooses the brain that plans the sizes that a manifest leaves open, for a job on this machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from emberscale_api.certificates import client_context
from emberscale_api.environment import TLS_FOLDER, TOKEN_FILE, mounted_certificates
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import TrainingJob
from emberscale_operator.local.brain import BrainAddress, EmbeddedBrain, default_database

AUTO, OFF = "auto", "off"

BrainOption = Annotated[
    str,
    typer.Option(
        metavar="auto|off|HOST:PORT",
        help="Brain that plans the sizes that the manifest leaves open: [cyan]auto[/] starts one beside the job, "
        "[cyan]off[/] uses none, [cyan]HOST:PORT[/] uses a running one.",
    ),
]
BrainSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--brain-set",
        metavar="path=value",
        help="Sets one preference of the brain beside the job, such as [cyan]planner.cpuCoreHour=0.05[/], "
        "[cyan]planning.interval=30s[/] or [cyan]cluster.cpu=4[/]. Repeatable.",
    ),
]
BrainTokenFile = Annotated[
    Path | None, typer.Option(help=f"Token file of the brain at HOST:PORT. Default: ${TOKEN_FILE}.")
]

BrainCaFile = Annotated[
    Path | None,
    typer.Option(help=f"CA certificate (PEM) of a brain at HOST:PORT with TLS. Default: from ${TLS_FOLDER}."),
]


def choose_brain(
    job: TrainingJob, choice: str, settings: Sequence[str], token_file: Path | None, ca_file: Path | None = None
) -> BrainAddress | EmbeddedBrain | None:
    """Returns the brain for a job; None if the manifest gives all numbers of processes. Raises InvalidError."""
    if settings and choice != AUTO:
        raise InvalidError(f"--brain-set: needs the brain beside the job: use --brain auto instead of {choice}")
    if choice == OFF:
        return None
    if choice != AUTO:
        return BrainAddress(_address(choice), read_token(token_file), read_authority(ca_file))
    _check_settings(settings)
    if not job.spec.leaves_replicas_open:
        return None
    return EmbeddedBrain(default_database(os.environ), tuple(settings))


def read_token(given: Path | None) -> str:
    """The brain's token, from the file that is named. Raises InvalidError."""
    path = given or os.environ.get(TOKEN_FILE)
    if path is None:
        raise InvalidError(f"--brain-token-file: is required, as {TOKEN_FILE} is not set")
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not ASCII text"
        raise InvalidError(f"--brain-token-file {path}: cannot be read: {problem}") from error


def read_authority(given: Path | None) -> bytes | None:
    """Returns the brain's authority, in PEM; None without TLS. Raises InvalidError."""
    if given is None:
        certificates = mounted_certificates()
        return certificates.authority if certificates is not None else None
    with os_errors_named(f"--brain-ca-file {given}: cannot be read"):
        authority = given.read_bytes()
    client_context(authority, f"--brain-ca-file {given}")
    return authority


def _address(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidError(f"--brain {text!r}: expected {AUTO}, {OFF} or HOST:PORT")
    return text


def _check_settings(settings: Sequence[str]) -> None:
    """Checks settings before anything starts; only if there are some, because that imports the brain's libraries."""
    if not settings:
        return
    from emberscale_brain.service.settings import load_settings

    try:
        load_settings(None, settings)
    except InvalidError as error:
        raise InvalidError(f"--brain-set: {error}") from error
