"""Held-out AUC of every built-in model: trained by asynchronous workers, against PyTorch alone in one process.

Both train the same model on the same records, a million from the synthetic generator (200,000 with --quick), with the
same optimizers and learning rates; PyTorch in the order of the epoch, batch after batch. Each pair is the mean over the
seeds (of the order, and of all initial weights) of what the AUC of PyTorch is above ours, and the difference allowed.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from emberscale_api.job import Architecture, parse_manifest
from emberscale_api.pictures import BLUE, CRIMSON
from plain_torch import train
from reporting import Ratio, arguments, report, say
from whole_run import manifest, run, synthesise

ALLOWED = 0.001
SHAPES = ((2, 2), (4, 3))
SEEDS = range(3)


def job(data: Path, architecture: Architecture, seed: int, workers: int, ps: int) -> dict[str, Any]:
    """Returns the example job with another model."""
    return manifest(
        "quality",
        {
            "data": {"train": [str(data / "train-*.tsv")], "evaluation": [str(data / "evaluation.tsv")]},
            "model": {"architecture": str(architecture)},
            "training": {"batchSize": 2048, "seed": seed},
            "ps": {"replicas": ps},
            "worker": {"replicas": workers},
        },
    )


def draw(path: Path, differences: Mapping[str, list[float]]) -> None:
    """Draws every seed's difference, by model and shape."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axis = figure.subplots()
    for number, values in enumerate(differences.values()):
        axis.barh(number, mean(values), color=BLUE, alpha=0.6)
        axis.plot(values, [number] * len(values), "k.")
    axis.axvline(ALLOWED, linestyle="--", color=CRIMSON, label="allowed, for the mean")
    axis.set_yticks(range(len(differences)), list(differences))
    axis.invert_yaxis()
    axis.set_xlabel("held-out AUC of plain PyTorch minus ours (mean, and every seed)")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=[str(model) for model in Architecture], help="only these")
    options = parser.parse_args()
    torch.set_num_threads(2)
    differences: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        synthesise(data, 200_000 if options.quick else 1_000_000)
        for model in map(Architecture, options.models or list(Architecture)):
            for seed in SEEDS:
                reference = train(parse_manifest(job(data, model, seed, 1, 1))).auc
                for workers, ps in SHAPES:
                    auc = float(run(job(data, model, seed, workers, ps))["auc"])
                    label = f"{model}, {workers} workers + {ps} PS"
                    differences.setdefault(label, []).append(reference - auc)
                    say(f"{label}, seed {seed}: AUC {auc:.5f}, PyTorch {reference:.5f}")
    if options.plot:
        draw(options.plot, differences)
    ratios = {
        f"AUC below PyTorch / {ALLOWED:g}: {label}": Ratio([(float(np.mean(values)), ALLOWED)], 1.0, "max")
        for label, values in differences.items()
    }
    report("quality", ratios, options.output)


if __name__ == "__main__":
    main()
