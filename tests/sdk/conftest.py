"""What the tests of the command line share."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

WITH_STAND_INS = Path(__file__).with_name("emberscale_with_stand_ins.py")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A small manifest beside the data that it names, which is never read."""
    (tmp_path / "train.tsv").write_text("1\n")
    file = tmp_path / "job.yaml"
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


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the real command, with stand-ins for what trains, in the folder of the manifest.

    `run` draws no picture unless that is asked for: it takes half of its time.
    """

    def begin(
        *arguments: str, environment: Mapping[str, str] | None = None, largest_file: int | None = None
    ) -> "subprocess.Popen[str]":
        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        plain = arguments[:1] == ("run",) and not {"--picture", "--no-picture"} & set(arguments)
        return subprocess.Popen(
            [sys.executable, str(WITH_STAND_INS), *arguments, *(["--no-picture"] if plain else [])],
            cwd=tmp_path,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    return begin
