"""A run's `model/`: the files of its last checkpoint."""

import shutil
from pathlib import Path

import fsspec

from emberscale._run.preflight import local_path


class ModelUnavailableError(Exception):
    """The files of the checkpoint are unavailable; the text says which and why."""


def export_model(uri: str, checkpoint: str, model: Path) -> None:
    """Copies the checkpoint's files to `model`, in the place of what it held.

    Copies, and no hard links: damage to a file of one must not reach the other. Raises ModelUnavailableError.
    """
    beside = model.with_name(f".{model.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    source = local_path(uri)
    try:
        if source is not None:
            shutil.copytree(source / checkpoint, beside)
        else:
            filesystem, path = fsspec.core.url_to_fs(uri)
            filesystem.get(f"{path}/{checkpoint}/", f"{beside}/", recursive=True)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise ModelUnavailableError(
            f"{model}: checkpoint {checkpoint} in {uri} cannot be copied: {_first_problem(error)}"
        ) from error
    shutil.rmtree(model, ignore_errors=True)
    beside.rename(model)


def _first_problem(error: OSError) -> str:
    """`shutil` gathers what went wrong with each file: (source, target, problem)."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    return error.strerror or str(error)
