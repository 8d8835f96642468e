"""How fast a chain of checkpoints is restored, against reading its files alone.

A server with rows of dimension 64 and row-wise Adagrad is saved with all rows, and then with increments of 26% of them
each (the dirty rate of Check-N-Run). The rows are in one table, or in 26, whose shares are those of the tables of
Criteo's data: five of them have 98% of the rows, and 18 fewer than a thousand of two million. In turns, all files of
the newest checkpoint are read and thrown away, and the checkpoint is restored as a server restores it: read, verified
against the checksums, decoded and indexed. The files are dropped from the system's memory before each, and then memory
is touched and freed: the hypervisor of a virtual machine may take free memory back, and the first touch of it then
costs far more than a restore (`--cold` leaves that in).

* Rate: bytes a second of the restore over that of the read. At 1, the disk is all that a restore waits for.
* CPU: bytes a second of CPU time, which do not depend on who else computes: what a core could restore, however fast the
  disk is.

A disk of this machine is no cloud's volume, and a bucket is neither: where reading is slower, the rate is closer to 1.
`--bucket` copies the chain to an S3 server (moto's, a process on this machine, over HTTP) and restores it from there.
The read alone is then by as many threads as a restore uses, an object each at a time. It needs the packages of `make
test-s3`: `PYTHONPATH=.venv/s3:tests/support python benchmarks/restore_rate.py --bucket`.
"""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import fsspec
import numpy as np
from matplotlib.figure import Figure

from checkpoint_bytes import DENSE, DIRTY_ONE, Server
from emberscale_api.job import IncrementalMode
from emberscale_api.readable import bytes_text
from emberscale_trainer.checkpoint import CheckpointFiles, load_partition
from emberscale_trainer.data.population import CATEGORICAL
from master_stand_in import owned
from reporting import Ratio, arguments, report, say

ROWS, QUICK_ROWS = 2_000_000, 400_000
INCREMENTS = 4
TURNS, QUICK_TURNS = 7, 5
CASES = tuple((tables, bits) for tables in (1, len(CATEGORICAL)) for bits in (0, 4))
"""The number of tables, and the bits of a weight; 0: float32."""
WANTED = 0.7
BUILD = Path("build")
"""Holds the chains: on the disk of the checkout, and left out of it if this is killed."""
WARM_BYTES = 3 << 30
"""More than the page cache of the files, and the rows."""
THREADS = 2
"""As many as a restore uses on two cores."""


def sizes_of(tables: int, rows: int) -> list[int]:
    """Returns the rows of each table."""
    if tables == 1:
        return [rows]
    ids = [column.cardinality for column in CATEGORICAL]
    return [max(1, rows * count // sum(ids)) for count in ids]


def chain_of(folder: Path, tables: int, rows: int, bits: int) -> Server:
    """Returns a server whose newest checkpoint needs all files that it wrote to `folder`."""
    sizes = sizes_of(tables, rows)
    keys = [np.arange(size, dtype=np.int64) for size in sizes]
    server, random = Server(IncrementalMode.CONSECUTIVE, folder, keys, bits), np.random.default_rng(3)
    server.save(1)
    for number in range(2, 2 + INCREMENTS):
        server.push([np.sort(random.choice(size, int(DIRTY_ONE * size), replace=False)) for size in sizes])
        server.save(number)
    return server


def files_in(folder: Path) -> list[Path]:
    """Returns all files of the checkpoints in a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def dropped(files: list[Path]) -> None:
    """Drops the content of files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> None:
    """Reads all files, one after another."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


_SERVE = """
import logging, sys
from s3_server import S3Server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
print(S3Server().url, flush=True)
sys.stdin.read()
"""


@contextmanager
def bucket() -> Iterator[str]:
    """Yields the URI of an empty bucket of an S3 server in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        fsspec.config.conf["s3"] = {"endpoint_url": url, "key": "k", "secret": "s"}
        fsspec.filesystem("s3").mkdir("chain")
        yield "s3://chain"


def download(uri: str) -> None:
    """Reads all objects below a URI, and throws them away."""
    store, place = fsspec.core.url_to_fs(uri)
    with ThreadPoolExecutor(THREADS) as pool:
        for content in pool.map(store.cat_file, store.find(place)):
            del content


def warmed() -> None:
    """Touches WARM_BYTES of memory, and frees them for whatever comes next."""
    with mmap.mmap(-1, WARM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, WARM_BYTES, mmap.PAGESIZE):
            memory[page] = 1


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a call, and the CPU seconds of all threads."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


def measure(
    folder: Path, tables: int, rows: int, bits: int, turns: int, uri: str | None, warm: Callable[[], None]
) -> tuple[int, list[tuple[float, float, float]]]:
    """Returns the bytes of a chain and, for each turn, the seconds of a read, a restore, and the restore's CPU.

    The chain is copied to `uri`, and read and restored there; None: it stays in the folder. `warm` is called before
    each.
    """
    server = chain_of(folder, tables, rows, bits)
    files = files_in(folder)
    size, found = sum(path.stat().st_size for path in files), []
    newest = server.newest()
    if uri is not None:
        fsspec.filesystem("s3").put(f"{folder}/", uri, recursive=True)
        newest = CheckpointFiles(f"{uri}/{max(folder.iterdir()).name}")

    def restore() -> None:
        load_partition(newest, owned(1, 0), server.empty(), DENSE)

    restore()  # so that kernels are compiled
    for _ in range(turns):
        dropped(files)
        warm()
        raw, _ = timed(lambda: read(files) if uri is None else download(uri))
        dropped(files)
        warm()
        found.append((raw, *timed(restore)))
    return size, found


def main() -> None:
    """Measures exact and quantised chains, and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--bucket", action="store_true", help="restore from an S3 server on this machine")
    parser.add_argument("--cold", action="store_true", help="touch no memory before each read and restore")
    options = parser.parse_args()
    warm = (lambda: None) if options.cold else warmed
    rows, turns = (QUICK_ROWS, QUICK_TURNS) if options.quick else (ROWS, TURNS)
    BUILD.mkdir(exist_ok=True)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    ratios: dict[str, Ratio] = {}
    labels = []
    for number, (tables, bits) in enumerate(CASES):
        with tempfile.TemporaryDirectory(dir=BUILD) as folder, bucket() if options.bucket else nullcontext() as uri:
            size, found = measure(Path(folder), tables, rows, bits, turns, uri, warm)
        label = f"{f'{bits} bits' if bits else 'float32'}, {f'{tables} tables' if tables > 1 else 'one table'}"
        labels.append(label)
        rates = [(size / restored, size / raw) for raw, restored, _ in found]
        cpu = [size / used for _, _, used in found]
        ours, raw = np.median(rates, 0)
        say(
            f"{label}: {bytes_text(size)} in a chain of {1 + INCREMENTS}; read at {bytes_text(raw)}/s, restored at "
            f"{bytes_text(ours)}/s, which is {bytes_text(float(np.median(cpu)))} a second of CPU"
        )
        ratios[f"restored / read, {label}"] = Ratio(rates, WANTED, "min")
        axes.plot(
            [number - 0.1] * turns, [raw / 2**20 for _, raw in rates], "k.", label=None if number else "read alone"
        )
        axes.plot([number] * turns, [ours / 2**20 for ours, _ in rates], "r.", label=None if number else "restored")
        axes.plot(
            [number + 0.1] * turns,
            [rate / 2**20 for rate in cpu],
            "b.",
            label=None if number else "restored, a second of CPU",
        )
    axes.set_xticks(range(len(labels)), labels, fontsize="small")
    axes.set(ylabel="MiB a second", ylim=0, title=f"A chain of {1 + INCREMENTS} checkpoints of {rows:,} rows")
    axes.legend()
    if options.plot:
        figure.savefig(options.plot, dpi=120)
    report("restore_rate", ratios, options.output)


if __name__ == "__main__":
    main()
