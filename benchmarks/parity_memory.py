"""The memory that parity takes of parameter servers (PS), beyond that of their rows.

A job without parity and one with it (`faultTolerance.strategy: ErasureCoding`) train in turns on records of which one
epoch touches all rows. Once all rows are there, and with parity once they are protected, the resident memory of all PS
is taken ten times, a second apart, while training continues. Their median with parity, less that without, is compared
with the bytes of the rows and the optimizer state. Parity itself takes r / k of them (ECRM, section 3.2), k being the
number of PS less the parity r; the rest is for changes on their way, and for blocks that are not full.
"""

import statistics
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from emberscale_api.readable import bytes_text
from growing_job import SAMPLES, bytes_of, dimension_of, growing
from parity import is_protected
from reporting import Ratio, arguments, report, say
from whole_run import RunningJob, manifest, synthesise

LOOKS, LOOK_SECONDS = 10, 1.0
SLACK = 0.03


class GrownJob(RunningJob):
    """A job that has touched all rows; `parity` is 0 for a job without it."""

    def __init__(self, folder: Path, data: Path, dimension: int, servers: int, parity: int, durability: str) -> None:
        coded = {"strategy": "ErasureCoding", "parity": parity, "durability": durability}
        spec = {
            **growing(data, dimension),
            "ps": {"replicas": servers},
            "worker": {"replicas": 1},
            "faultTolerance": coded if parity else {"strategy": "FullRecovery"},
            "checkpoint": {"interval": "1h", "flash": {"mode": "Disabled"}},
        }
        super().__init__(folder, manifest("parity-memory", spec))
        self.expect(lambda: self.latest()[1] > SAMPLES and (not parity or is_protected(self.root, servers)))

    def server_bytes(self) -> float:
        """Returns the resident memory of all PS: the median of several looks, while training continues."""
        looks = []
        for _ in range(LOOKS):
            looks.append(sum(server.memory_full_info().pss for server in self.members("ps")))
            time.sleep(LOOK_SECONDS)
        return statistics.median(looks)


def measure(data: Path, dimension: int, servers: int, parity: int, durability: str) -> tuple[float, int]:
    """Measures one job; returns the memory of its PS, and the bytes of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        job = GrownJob(Path(folder), data, dimension, servers, parity, durability)
        try:
            return job.server_bytes(), bytes_of(job.latest()[2], dimension)
        finally:
            job.end()


def draw(path: Path, shares: list[float], expected: float) -> None:
    """Draws the additional memory over the bytes of the rows."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    axis.bar(["parity itself", "measured"], [expected, statistics.median(shares)])
    axis.plot([1] * len(shares), shares, "k.")
    axis.set_ylabel("of the bytes of the rows")
    axis.set_title("Memory that parity takes")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--size", type=float, default=1.0, help="GB of rows")
    parser.add_argument("--servers", type=int, default=5)
    parser.add_argument("--parity", type=int, choices=[1, 2], default=1)
    parser.add_argument("--durability", choices=["Sync", "Async"], default="Sync")
    options = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    dimension = dimension_of(options.size)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesise(data, SAMPLES, "--evaluation-fraction", "0")
        for pair in range(1 if options.quick else options.pairs):
            found = {
                parity: measure(data, dimension, options.servers, parity, options.durability)
                for parity in ((0, options.parity) if pair % 2 == 0 else (options.parity, 0))
            }
            (without, _), (protected, rows) = found[0], found[options.parity]
            pairs.append((protected - without, rows))
            say(
                f"pair {pair}: PS take {bytes_text(round(without))} without parity, and {bytes_text(round(protected))} "
                f"with it, for {bytes_text(rows)} of rows"
            )
    expected = options.parity / (options.servers - options.parity)
    if options.plot:
        draw(options.plot, [more / rows for more, rows in pairs], expected)
    label = f"memory of parity {options.parity} on {options.servers} PS / rows"
    report("parity_memory", {label: Ratio(pairs, expected + SLACK, "max")}, options.output)


if __name__ == "__main__":
    main()
