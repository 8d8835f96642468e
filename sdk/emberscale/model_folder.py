"""A run's `model/`: the files of its last checkpoint."""

import os
import shutil
from pathlib import Path

import fsspec

from emberscale.preflight import local_path


class ModelUnavailableError(Exception):
    """The files of the checkpoint cannot be had; the text says which and why."""


def export_model(uri: str, checkpoint: str, model: Path) -> None:
    """Puts the checkpoint's files into `model`, in the place of what it held; hard links where the disk is the same.

    Raises ModelUnavailableError.
    """
    beside = model.with_name(f".{model.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    source = local_path(uri)
    try:
        if source is not None:
            shutil.copytree(source / checkpoint, beside, copy_function=_link_or_copy)
        else:
            filesystem, path = fsspec.core.url_to_fs(uri)
            filesystem.get(f"{path}/{checkpoint}/", f"{beside}/", recursive=True)
    except (OSError, shutil.Error) as error:
        raise ModelUnavailableError(f"{model}: checkpoint {checkpoint} in {uri} cannot be copied: {error}") from error
    shutil.rmtree(model, ignore_errors=True)
    beside.rename(model)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
