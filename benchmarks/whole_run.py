"""Whole jobs for benchmarks, started as a person starts them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

EMBERSCALE = str(Path(sys.executable).with_name("emberscale"))

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sparse": {"type": "RowWiseAdagrad", "learningRate": 0.02},
    "dense": {"type": "Adagrad", "learningRate": 0.01},
}
"""Those of the example job."""


def manifest(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A TrainingJob."""
    metadata = {"name": name}
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": metadata,
        "spec": {"optimizers": OPTIMIZERS, **spec},
    }


def synthesise(folder: Path, rows: int, *options: str) -> None:
    """Writes a synthetic data set."""
    command = [EMBERSCALE, "data", "synth", str(folder), "--rows", str(rows), "--seed", "1", *options]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)


def run(
    job: Mapping[str, Any], emberscale: Sequence[str] = (EMBERSCALE,), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the summary of a run by the `emberscale` command of this or of another checkout.

    Raises RuntimeError with what the command said unless the job is Complete.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(yaml.safe_dump(dict(job)))
        command = [*emberscale, "run", str(file), "--workdir", f"{folder}/run", "--output", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
