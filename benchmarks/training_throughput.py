"""Samples/s of a DLRM: parameter servers and workers against plain PyTorch on the same cores.

Ours is a whole `emberscale run` with 2 PS and 2 workers of one core each, on two cores: dynamic hash tables, dense
parameters synchronised, asynchronous workers, records read and parsed from Criteo-format text while training. Its rate
is that of the run's summary, over the whole time spent training, with the bound on staleness as it is after the first
thousands of batches (`stalenessWarmup: 0`).

The references are one process of PyTorch with two threads, and two processes of one thread each that know nothing of
each other. They train the same model on the same records, held in memory as tensors, ids replaced by row numbers; all
tables lie end to end in one `nn.EmbeddingBag(sparse=True)`, stepped by `torch.optim.Adagrad`: one call a batch instead
of one a table makes them 1.5 times as fast. Their rate leaves out the first batches.
"""

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn

from emberscale_api.job import parse_manifest
from emberscale_api.rpc.master_pb2 import TRAINING_DATA
from plain_torch import indexed, number_rows
from reporting import Ratio, arguments, report, say
from whole_run import OPTIMIZERS, manifest, run, synthesise

DIMENSION, TABLES, DENSE = 16, 26, 13
BOTTOM, TOP = (64, 32), (64, 32)
SPARSE_RATE, DENSE_RATE = (OPTIMIZERS[part]["learningRate"] for part in ("sparse", "dense"))
TARGETS = {2048: 1.15, 512: 1.0}
TARGET_AGAINST_PROCESSES = 0.9
WARM_UP = 20


class PlainDLRM(nn.Module):
    """Naumov et al. (2019) in plain PyTorch, for batches of one size over one table of `rows` rows."""

    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, DIMENSION, mode="sum", sparse=True)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        vectors = TABLES + 1
        self.bottom = _mlp([DENSE, *BOTTOM, DIMENSION], activate_last=True)
        self.top = _mlp([DIMENSION + vectors * (vectors - 1) // 2, *TOP, 1], activate_last=False)
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        self._pairs = lower[0] * vectors + lower[1]
        self._offsets = torch.arange(batch * TABLES)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits float32 [B] from dense features [B, DENSE] and row numbers [B, TABLES]."""
        bottom = self.bottom(dense)
        embeddings = self.table(ids.view(-1), self._offsets).view(len(ids), TABLES, DIMENSION)
        vectors = torch.cat([bottom.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(len(ids), -1)
        logits: Tensor = self.top(torch.cat([bottom, products.index_select(1, self._pairs)], dim=1))
        return logits.squeeze(1)


def _mlp(widths: list[int], activate_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if activate_last or number < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def train_plainly(records: Path, threads: int, batch: int) -> float:
    """Samples/s of plain PyTorch over the records; waits for a line on standard input before it starts."""
    torch.set_num_threads(threads)
    with np.load(records) as loaded:
        labels, dense, ids, rows = (torch.from_numpy(loaded[name]) for name in ("labels", "dense", "ids", "rows"))
    torch.manual_seed(0)
    model = PlainDLRM(int(rows), batch)
    optimizers = [
        torch.optim.Adagrad([model.table.weight], lr=SPARSE_RATE),
        torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=DENSE_RATE),
    ]
    batches = [
        (labels[at : at + batch], dense[at : at + batch], ids[at : at + batch])
        for at in range(0, len(labels) - batch + 1, batch)
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    for number, (wanted, features, numbers) in enumerate(batches):
        if number == WARM_UP:
            began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features, numbers), wanted)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for optimizer in optimizers:
            optimizer.step()
    return (len(batches) - WARM_UP) * batch / (time.perf_counter() - began)


def plain(records: Path, processes: int, threads: int, batch: int) -> float:
    """Samples/s of so many processes together, started at once."""
    command = [sys.executable, "-W", "ignore", __file__, "--plain", str(records), str(threads), str(batch)]
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for number in range(processes):
        mine = cores if processes == 1 else [cores[number % len(cores)]]
        started.append(
            subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, mine)), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("plain PyTorch did not start")
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in started)


def ours(data: Path, batch: int) -> dict[str, Any]:
    """The summary of a whole run on the same records."""
    return run(
        manifest(
            "throughput",
            {
                "data": {"train": [str(data / "train-*.tsv")]},
                "model": {"embeddings": {"dimension": DIMENSION}, "bottomMlp": [*BOTTOM], "topMlp": [*TOP]},
                "training": {"batchSize": batch, "stalenessWarmup": 0},
                "sharding": {"heartbeatInterval": "200ms"},  # which is how exactly the end of training is known
                "ps": {"replicas": 2, "resources": {"limits": {"cpu": 1}}},
                "worker": {"replicas": 2, "resources": {"limits": {"cpu": 1}}},
            },
        )
    )


def prepare(folder: Path, samples: int) -> tuple[Path, Path]:
    """Criteo-format text for ours, and the same records as arrays for the references."""
    data, records = folder / "data", folder / "records.npz"
    synthesise(data, samples, "--evaluation-fraction", "0")
    source = indexed(parse_manifest(manifest("records", {"data": {"train": [str(data / "train-*.tsv")]}})))
    batches = list(source.batches(TRAINING_DATA, 0, 0, samples))
    labels, dense, ids = (
        np.concatenate([getattr(batch, column) for batch in batches]) for column in ("labels", "dense", "ids")
    )
    numbers, firsts = number_rows(ids)
    np.savez(records, labels=labels, dense=dense, ids=numbers, rows=firsts[-1])
    return data, records


def draw(path: Path, rates: dict[str, list[float]]) -> None:
    """Every run's rate, by contender."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 4))
    for number, (label, values) in enumerate(rates.items()):
        axis.barh(
            number, np.median(values), color="tab:blue" if label.startswith("Emberscale") else "tab:grey", alpha=0.6
        )
        axis.plot(values, [number] * len(values), "k.")
    axis.set_yticks(range(len(rates)), rates)
    axis.invert_yaxis()
    axis.set_xlabel("samples/s (median, and every run)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--plain", nargs=3, metavar=("RECORDS", "THREADS", "BATCH"), help="be a reference")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", choices=TARGETS, default=[*TARGETS], help="only these")
    options = parser.parse_args()
    if options.plain:
        records, threads, batch = options.plain
        print(train_plainly(Path(records), int(threads), int(batch)))
        return
    samples = 300_000 if options.quick else 1_000_000
    ratios, rates = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        data, records = prepare(Path(folder), samples)
        say(f"{samples:,} records are written")
        for batch in options.batch_sizes:
            measured = []
            for pair in range(options.pairs):
                summary = ours(data, batch)
                rate = summary["samples_per_second"]
                measured.append((rate, plain(records, 1, 2, batch), plain(records, 2, 1, batch)))
                mine, threads, processes = measured[-1]
                say(
                    f"B = {batch}, pair {pair}: Emberscale {mine:,.0f}, PyTorch on two threads {threads:,.0f}, "
                    f"two processes of PyTorch {processes:,.0f} samples/s; stages {summary['stages']}"
                )
            for label, values in zip(
                ("Emberscale, 2 PS + 2 workers", "PyTorch, two threads", "PyTorch, two processes"),
                zip(*measured, strict=True),
                strict=True,
            ):
                rates[f"{label}, B = {batch}"] = list(values)
            ratios[f"samples/s / one process of two threads, B = {batch}"] = Ratio(
                [(mine, threads) for mine, threads, _ in measured], TARGETS[batch], "min"
            )
            ratios[f"samples/s / two processes of one thread, B = {batch}"] = Ratio(
                [(mine, processes) for mine, _, processes in measured], TARGET_AGAINST_PROCESSES, "min"
            )
    if options.plot:
        draw(options.plot, rates)
    report("training_throughput", ratios, options.output)


if __name__ == "__main__":
    main()
