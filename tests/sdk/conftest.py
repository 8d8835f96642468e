"""Fixtures for the tests of the command line."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml

WITH_STAND_INS = Path(__file__).with_name("emberscale_with_stand_ins.py")


Start = Callable[..., "subprocess.Popen[str]"]


def write_manifest(folder: Path) -> Path:
    """Writes a small manifest next to its data file, which is never read."""
    (folder / "train.tsv").write_text("1\n")
    file = folder / "job.yaml"
    document = {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "toy"},
        "spec": {
            "data": {"train": ["train.tsv"]},
            "ps": {"replicas": 2},
            "worker": {"replicas": 2, "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}},
        },
    }
    file.write_text(yaml.safe_dump(document))
    return file


def start_command(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    largest_file: int | None = None,
    picture: bool = False,
) -> "subprocess.Popen[str]":
    """Starts the real command in a folder, with stand-ins for the processes that train.

    `run` draws no picture unless it is asked to, since a picture takes half of its time.
    """

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    plain = arguments[:1] == ("run",) and not picture
    return subprocess.Popen(
        [sys.executable, str(WITH_STAND_INS), *arguments, *(["--no-picture"] if plain else [])],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A small manifest next to its data file, which is never read."""
    return write_manifest(tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the real command in the folder of the manifest, with stand-ins for the processes that train."""
    return partial(start_command, tmp_path)
