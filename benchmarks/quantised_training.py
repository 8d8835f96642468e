"""What restores from quantised checkpoints cost a model: held-out AUC against the same training without any restore.

A DLRM is trained in one process, by the workers' and servers' own code, batch after batch, so that two runs of a seed
differ by nothing but the restores: at points spread evenly over the run (as in figure 10 of Check-N-Run), the servers
write a checkpoint with quantised weights and load it again, as after a failure. Each seed trains the undisturbed run
and then all others in turn, on the same records (270,000 synthetic ones; 90,000 and fewer seeds with --quick).

The AUC is the one expected over the labels of 100,000 held-out records (`drawn_labels`).

The paper's bounds are a loss of accuracy of at most 0.01% over the life of a job: one restore from 2 bits, 3 from 3, 20
from 4 and 100 from 8. Here the loss is that of the AUC, in percent of the undisturbed run's, the mean over the seeds.
Restores from exact checkpoints show what the procedure itself costs: nothing. `--most 4` measures only the most
restores that the paper allows from 4 bits, in a fraction of the time.
"""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.figure import Figure

from drawn_labels import DrawnLabels
from emberscale_api.dataset import Split
from emberscale_api.job import TrainingJob, parse_manifest
from emberscale_trainer.checkpoint import CheckpointFiles, Share, Work, load_partition
from emberscale_trainer.data.source import Batch
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import Reader
from in_process import InProcessTraining
from master_stand_in import owned, write_manifest, write_snapshot
from plain_torch import indexed
from reporting import Ratio, arguments, report, say, standard_error
from whole_run import manifest, synthesise

SERVERS = 2
ALLOWED = 0.01
"""The loss of accuracy that the paper allows, in percent."""

PAPER = {2: 1, 3: 3, 4: 20, 8: 100}
"""The restores that stay below this loss in the paper, by bits (section 5.2.1)."""

RESTORES = {0: (5,), 2: (1, 2, 4), 3: (1, 3, 6), 4: (5, 20), 8: (20,)}
"""The restores, by bits; 8 bits get no more than 4 bits, since restores take long and lose too little to see."""

SEEDS, QUICK_SEEDS = 14, 4
RECORDS, QUICK_RECORDS = 270_000, 90_000
HELD_OUT = 100_000
IN_MEMORY = Path("/dev/shm")
Setting = tuple[int, int]
"""Bits, and the number of restores."""


def job(data: Path, seed: int) -> TrainingJob:
    """Returns a smaller version of the example job."""
    return parse_manifest(
        manifest(
            "quantised-training",
            {
                "data": {"train": [str(data / "train-*.tsv")], "evaluation": [str(data / "evaluation.tsv")]},
                "model": {"architecture": "DLRM", "embeddings": {"dimension": 16}},
                "training": {"batchSize": 1024, "seed": seed},
            },
        )
    )


class HeldOut:
    """Held-out records, and the quality on them."""

    def __init__(self, of: TrainingJob, records: int) -> None:
        """Reads them; `records` is the number of those before them."""
        self._batches = list(indexed(of).batches(Split.EVALUATION, 0, 0, HELD_OUT))
        self._drawn = DrawnLabels(np.concatenate([batch.labels for batch in self._batches]), records)

    def auc(self, training: InProcessTraining) -> float:
        """Returns the AUC that is expected over the labels."""
        return self._drawn.auc(np.concatenate([training.predict(batch) for batch in self._batches]))


def restore(training: InProcessTraining, folder: Path, bits: int, batches: int) -> None:
    """Writes a checkpoint after so many batches, and loads it into new servers."""
    applied = AppliedBatches.from_runs([(0, [(0, batches, 1)])])
    files = []
    for index, store in enumerate(training.stores):
        share = Share(index, owned(SERVERS, index), applied, store.dense_parameters)
        snapshot = store.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        files += write_snapshot(snapshot, store.specs, share, str(folder), Work(), bits)
    uri = write_manifest(folder, files, ps_count=SERVERS)
    for index in range(SERVERS):
        store = training.empty_store()
        load_partition(CheckpointFiles(uri), owned(SERVERS, index), store, store.dense_parameters)
        training.stores[index] = store


def auc_after(
    of: TrainingJob, batches: Sequence[Batch], held_out: HeldOut, folder: Path, bits: int, restores: int
) -> float:
    """Trains with evenly spaced restores; returns the held-out AUC."""
    training = InProcessTraining(of, SERVERS)
    due = {round(len(batches) * number / (restores + 1)) for number in range(1, restores + 1)}
    for number, batch in enumerate(batches):
        if number in due:
            restore(training, folder / f"{bits}-{restores}-{number}", bits, number)
        training.train(batch)
    return held_out.auc(training)


def draw(path: Path, lost: dict[Setting, list[float]]) -> None:
    """Draws the loss by restores, one line per number of bits, with the paper's bounds."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axis = figure.subplots()
    for bits in sorted({bits for bits, _ in lost if bits}):
        settings = [setting for setting in lost if setting[0] == bits]
        means = [mean(lost[setting]) for setting in settings]
        errors = [standard_error(lost[setting]) for setting in settings]
        counts = [count for _, count in settings]
        bars = axis.errorbar(counts, means, errors, marker="o", capsize=3, label=f"{bits} bits")
        axis.axvline(PAPER[bits], linestyle=":", color=bars[0].get_color())
    axis.axhline(ALLOWED, linestyle="--", color="black", label="allowed by the paper")
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set(
        xscale="log",
        xlabel="restores over the run (dotted: where the paper's loss reaches the bound)",
        ylabel="loss of held-out AUC, % (mean over seeds, standard error)",
    )
    axis.legend()
    figure.savefig(path, dpi=120)


def _most(bits: int) -> int:
    """Returns the number of restores from `bits` bits that is compared with the paper's bound."""
    return min(PAPER[bits], max(RESTORES[bits]))


def _named(bits: int, restores: int) -> str:
    return f"{restores} restores from {f'{bits} bits' if bits else 'exact checkpoints'}"


def main() -> None:
    """Trains and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, choices=sorted(PAPER), help="only the most restores from so many bits")
    parser.add_argument("--seeds", type=int, help="how many seeds are trained")
    parser.add_argument("--records", type=int, help="how many are trained on")
    options = parser.parse_args()
    restores = RESTORES if options.most is None else {options.most: (_most(options.most),)}
    torch.set_num_threads(1)
    lost: dict[Setting, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as name:
        folder = Path(name)
        records = options.records or (QUICK_RECORDS if options.quick else RECORDS)
        rows = records + HELD_OUT
        synthesise(folder / "data", rows, "--evaluation-fraction", str(HELD_OUT / rows))
        held_out = HeldOut(job(folder / "data", 0), records)
        for seed in range(options.seeds or (QUICK_SEEDS if options.quick else SEEDS)):
            of = job(folder / "data", seed)
            batches = list(indexed(of).batches(Split.TRAINING, 0, 0, records))
            undisturbed = auc_after(of, batches, held_out, folder, 0, 0)
            say(f"seed {seed}: AUC {undisturbed:.5f} undisturbed")
            for bits, counts in restores.items():
                for count in counts:
                    with tempfile.TemporaryDirectory(dir=folder) as run:
                        found = auc_after(of, batches, held_out, Path(run), bits, count)
                    loss = 100 * (undisturbed - found) / undisturbed
                    say(f"seed {seed}, {_named(bits, count)}: AUC lower by {loss:.4f}%")
                    lost.setdefault((bits, count), []).append(loss)
    ratios: dict[str, Ratio] = {}
    for (bits, count), values in lost.items():
        label = _named(bits, count)
        say(f"{label}: AUC lower by {mean(values):.4f}% (standard error {standard_error(values):.4f})")
        if bits and count == _most(bits):
            ratios[f"AUC lost / {ALLOWED}%: {label}"] = Ratio([(mean(values), ALLOWED)], 1.0, "max")
    if exact := [abs(loss) for (bits, _), values in lost.items() for loss in values if not bits]:
        ratios["AUC lost by exact restores, %"] = Ratio([(max(exact), 1.0)], 0.0, "max")
    if options.plot:
        draw(options.plot, lost)
    report("quantised_training", ratios, options.output)


if __name__ == "__main__":
    main()
