"""Checks, before anything is started: that a job's input and model are sound, and that its output can be written."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import fsspec

from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import DataSpec, TrainingJob

_CHECKED_FILES = 20
_BLOCK_RECORDS = 8192
_PICTURES = (".png", ".svg", ".pdf")
_SMALL_BYTES = 1 << 20
"""A larger file must hold records, since no header is this long."""


def local_path(uri: str) -> Path | None:
    """Returns the local path of a URI; None for a remote one."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    return Path(url2pathname(urlsplit(uri).path) if rest.startswith("/") else rest) if scheme == "file" else None


def check_data(job: TrainingJob) -> None:
    """Raises InvalidError for a local path or glob without a readable file, and for a URI without a file system.

    The content at remote URIs is left to the job.
    """
    problems = []
    for field, uris in (("train", job.spec.data.train), ("evaluation", job.spec.data.evaluation)):
        for number, uri in enumerate(uris):
            path = local_path(uri)
            problem = _problem_with_uri(uri) if path is None else _problem(path, job.spec.data.format.ending)
            if problem is not None:
                problems.append(f"spec.data.{field}.{number}: {uri}: {problem}")
    if problems:
        raise InvalidError("\n".join(problems))


def stores_without_file_system(job: TrainingJob) -> list[str]:
    """Returns a remark for each place of checkpoints in the manifest whose file system is not installed here."""
    checkpoint, remarks = job.spec.checkpoint, []
    initial = checkpoint.initial_from
    for field, uri in (("uri", checkpoint.uri), ("initialFrom.uri", None if initial is None else initial.uri)):
        if uri is not None and local_path(uri) is None and (problem := _problem_with_uri(uri)) is not None:
            remarks.append(f"spec.checkpoint.{field}: {uri}: {problem}")
    return remarks


def check_columns(data: DataSpec) -> None:
    """Raises InvalidError if local files lack columns of the manifest, have other types, or contain no records.

    The job itself checks remote URIs, and the columns of all but the first files of a glob.
    """
    # slow to import, so only callers that are about to start processes pay for it
    from emberscale_trainer.data.files import expand
    from emberscale_trainer.data.formats import record_format
    from emberscale_trainer.data.records import DataUnavailableError

    reader = record_format(data)
    try:
        for uri in (*data.train, *data.evaluation):
            if local_path(uri) is not None:
                for file in expand([uri])[:_CHECKED_FILES]:
                    reader.check_file(file)
        if all(local_path(uri) is not None for uri in data.train):
            files = (file for uri in data.train for file in expand([uri]))
            if not any(file.bytes > _SMALL_BYTES or reader.index_file(file, 0, _BLOCK_RECORDS) for file in files):
                raise InvalidError("spec.data.train: the files contain no records")
    except DataUnavailableError as error:
        raise InvalidError(str(error)) from error


def _problem_with_uri(uri: str) -> str | None:
    try:
        fsspec.core.url_to_fs(uri)
    except ImportError as error:
        return f"no file system for it is installed: {error}"
    except ValueError as error:
        return f"no file system for it: {error}"
    return None


def _problem(path: Path, ending: str) -> str | None:
    found = [Path(match) for match in glob.glob(str(path), recursive=True)]
    if not found:
        return (
            f"no such file (relative paths start at {Path.cwd()}); "
            "`emberscale data synth OUT` writes data to try things with"
        )
    files = [match for match in found if not match.is_dir()]
    if not files:
        return f"is a folder; name its files, such as {path / f'*{ending}'}"
    for file in files:
        if not os.access(file, os.R_OK):
            return f"{file} cannot be read: permission denied"
    return None


def check_model(job: TrainingJob) -> list[str]:
    """Loads the user's model in a separate process, as a worker will, and takes a dry step; returns remarks.

    Raises InvalidError with the frames of the user's code. Built-in models need no such check.
    """
    entrypoint = job.spec.model.entrypoint
    if entrypoint is None:
        return []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "emberscale_trainer.models.rehearsal"],
        input=job.to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        result = json.loads(done.stdout)
    except ValueError:
        raise InvalidError(
            f"spec.model.entrypoint: {entrypoint}: the dry step ended with exit code {done.returncode}", done.stderr
        ) from None
    if result["problem"]:
        raise InvalidError(f"spec.model.entrypoint: {entrypoint}: {result['problem']}", result["trace"])
    return [f"spec.model.entrypoint: {entrypoint}: {remark}" for remark in result["remarks"]]


def ensure_drawable(picture: Path) -> None:
    """Makes the folder of the picture that `--plot` names. Raises InvalidError if no picture can be written there."""
    if picture.suffix.lower() not in _PICTURES:
        raise InvalidError(f"--plot {picture}: must end with {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    if picture.is_dir():
        raise InvalidError(f"--plot {picture}: is a folder; give the name of the picture")
    ensure_writable(picture.absolute().parent, "--plot")


def ensure_writable(folder: Path, field: str) -> None:
    """Makes the folder. Raises InvalidError if it cannot be made or written to."""
    with os_errors_named(f"{field}: {folder} cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidError(f"{field}: {folder} cannot be written to: permission denied")
