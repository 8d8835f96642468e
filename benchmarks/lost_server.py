"""The loss of a parameter server (PS) under each strategy: parity, flash checkpoints, partial and full recovery.

Whole runs of `emberscale run` train on synthetic records, each contender in turn; their rows grow by training alone
(`growing_job`). SINCE_SAVED of an epoch and STEADY_SECONDS after a checkpoint, or with parity once all rows are
protected, a server is killed by SIGKILL. Times count from the kill:

* First batch: a worker has trained a batch again after the standstill, as its own counter says.
* Caught up: the samples at the kill are reached again. Nothing goes back with parity, nor with partial recovery, whose
  lost rows forget training instead.
* Protected: with parity, another server may be lost again. Meanwhile the job trains at a share of its rate before.

`parity, adopted` is a job whose lost server has no successor: the process that starts others, and notices their ends,
is stopped before the kill. The loss is noticed after the lease timeout, and 3 s later the others adopt the rows. ECRM
(section 4) recovers a server up to 10.3 times faster than checkpoints do on average, counted until all its rows are
back; the ratio here counts only until the first batch. `--sizes` measures parity over the size.
"""

import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from emberscale_api import metrics
from emberscale_api.pictures import BLUE, CRIMSON, GREEN, GREY, ORANGE
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.rpc import master_pb2 as pb
from growing_job import SAMPLES, bytes_of, dimension_of, growing
from losing_job import LosingJob
from reporting import Ratio, arguments, report, say
from whole_run import manifest, synthesise

SERVERS, WORKERS = 4, 2
"""The number of each; `--servers` takes another one."""
LOST = 1
"""The index of the server that is lost."""
SIZES = (0.1, 0.25, 0.5, 1.0)
"""GB of rows that are lost with a server."""
SINCE_SAVED = 0.25
"""The part of an epoch that is trained between a checkpoint and the kill."""
LOOK_SECONDS, STEADY_SECONDS = 0.05, 8.0
ASK_SECONDS = 0.25
"""The pause between two questions to the master."""
STANDSTILL = 5
"""A job that counts no batch for as long as this many take on average stands still."""

PARITY, ADOPTED, FLASH, PARTIAL, FULL = "parity", "parity, adopted", "flash", "partial", "full"
NO_FLASH: Mapping[str, Any] = {"flash": {"mode": "Disabled"}}
WITH_PARITY = {"faultTolerance": {"strategy": "ErasureCoding"}, "checkpoint": {"interval": "1h", **NO_FLASH}}
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    PARITY: WITH_PARITY,
    ADOPTED: WITH_PARITY,
    FLASH: {
        "faultTolerance": {"strategy": "FullRecovery"},
        "checkpoint": {"interval": "1h", "flash": {"interval": "15s", "maxBytes": "16Gi"}},
    },
    PARTIAL: {
        "faultTolerance": {"strategy": "PartialRecovery", "targetPLS": 1.0},
        "checkpoint": {"interval": "30s", **NO_FLASH},
    },
    FULL: {"faultTolerance": {"strategy": "FullRecovery"}, "checkpoint": {"interval": "30s", **NO_FLASH}},
}
COLOURS = {PARITY: GREEN, ADOPTED: GREY, FLASH: ORANGE, PARTIAL: BLUE, FULL: CRIMSON}
FIRST_SECONDS, PROTECTED_SECONDS, RATE, TIMES_FASTER = 1.5, 20.0, 0.9, 10.0
FIRST_SECONDS_OF_LARGE = 3.0
"""The most seconds to the first batch if more than 1 GB is lost."""


@dataclass(frozen=True)
class Loss:
    """The loss of a server with `lost` bytes of rows: seconds after the kill, and what was trained meanwhile.

    `repeated` samples are trained again, and `forgotten` ones are lost on the server's share of the rows. `rate` is
    that between the first batch and `protected`, over the one before the kill; both are 0 without parity. `line` has
    (seconds, samples beyond those at the kill).
    """

    lost: int
    first_batch: float
    caught_up: float
    repeated: int
    forgotten: int
    protected: float
    rate: float
    line: Sequence[tuple[float, int]]


class BatchWatch:
    """Counts the batches of all workers in a thread; `seen` has the times, in seconds since 1970, and the counts."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.seen: list[tuple[float, int]] = []
        self._addresses = addresses
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            with suppress(OSError):  # it is busy, or has ended
                self.seen.append((time.time(), sum(counted(address) for address in self._addresses)))

    def end(self) -> None:
        """Stops counting."""
        self._ended.set()
        self._thread.join()

    def begins_again(self, since: float) -> float | None:
        """Returns when the first standstill after this moment ended; None if none has."""
        standstill = STANDSTILL / self.rate(since - STEADY_SECONDS, since)
        last, count = since, None
        for at, batches in self.seen:
            if at < since or batches == count:
                continue
            if count is not None and at - last >= standstill:
                return at
            last, count = at, batches
        return None

    def rate(self, since: float, until: float) -> float:
        """Returns the batches a second between two moments."""
        within = [one for one in self.seen if since <= one[0] <= until]
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0]) if len(within) > 1 else 0.0


def counted(address: str) -> int:
    """Returns the batches that a worker has trained."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return round(float(next(line.split()[1] for line in lines if line.startswith(f"{metrics.BATCHES_TOTAL} "))))


def job_of(contender: str, data: Path, servers: int, size: float) -> dict[str, Any]:
    """Returns the manifest of a job with `size` GB of rows on each of its servers."""
    spec = growing(data, dimension_of(size * servers))
    roles = {"ps": {"replicas": servers}, "worker": {"replicas": WORKERS}}
    return manifest("loses-a-server", {**spec, **roles, **CONTENDERS[contender]})


def lose(folder: Path, data: Path, contender: str, servers: int, size: float) -> Loss:
    """Runs a job, kills one of its servers, and waits until all is as before."""
    job = LosingJob(folder, job_of(contender, data, servers, size))
    has_parity = contender in (PARITY, ADOPTED)
    try:
        job.expect(lambda: job.latest()[1] > SAMPLES)
        _await_safety(job, has_parity)
        members = job.status().members
        rows = sum(sum(one.rows.values()) for one in members if (one.member.role, one.member.index) == (pb.PS, LOST))
        watch = BatchWatch([one.metrics_address for one in members if one.member.role == pb.WORKER])
        time.sleep(STEADY_SECONDS)
        if contender == ADOPTED:
            job.stop_starting()
        seconds, samples, _ = job.latest()
        killed = job.kill_server(LOST)
        job.expect(lambda: watch.begins_again(killed) is not None)
        first = watch.begins_again(killed) or killed
        protected = rate = 0.0
        if has_parity:
            job.expect(lambda: job.status().protection.protected, every=ASK_SECONDS)
            protected = time.time() - killed
            rate = watch.rate(first, killed + protected) / watch.rate(killed - STEADY_SECONDS, killed)
        job.expect(lambda: job.latest()[0] > seconds + 5 and job.latest()[1] >= samples + SINCE_SAVED * SAMPLES)
        watch.end()
        line = [(at - seconds, count - samples) for at, count in job.timeline() if at >= seconds - 5]
        lowest = min((count, at) for at, count in line if at >= first - killed)  # of a roll-back, or just the first
        return Loss(
            lost=bytes_of(rows, dimension_of(size * servers)),
            first_batch=first - killed,
            caught_up=next(at for at, count in line if at >= lowest[1] and count > 0),
            repeated=max(0, -lowest[0]),
            forgotten=sum(entry["forgotten_samples"] for entry in job.logged("recovered_partially", killed)),
            protected=protected,
            rate=rate,
            line=line,
        )
    finally:
        job.end()


def _await_safety(job: LosingJob, has_parity: bool) -> None:
    """Waits until all rows are protected, or until so much is trained since a checkpoint."""
    if has_parity:
        job.expect(lambda: job.status().protection.protected, every=ASK_SECONDS)
        return
    complete = len(job.logged("checkpoint_complete"))
    job.expect(lambda: len(job.logged("checkpoint_complete")) > complete)
    samples = job.latest()[1]
    job.expect(lambda: job.latest()[1] >= samples + SINCE_SAVED * SAMPLES)


def measure(data: Path, contenders: Sequence[str], servers: int, size: float, rounds: int) -> dict[str, list[Loss]]:
    """Loses a server under each of the contenders, in turns."""
    found: dict[str, list[Loss]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, losses in found.items():
            with tempfile.TemporaryDirectory() as folder:
                losses.append(lose(Path(folder), data, contender, servers, size))
            loss = losses[-1]
            told = f"{contender}, {bytes_text(loss.lost)} lost: first batch after {duration_text(loss.first_batch)}"
            if loss.protected:
                told += f", protected after {duration_text(loss.protected)}, meanwhile {loss.rate:.0%} of the rate"
            told += f", the samples of the kill after {duration_text(loss.caught_up)}"
            say(f"{told}; {loss.repeated:,} samples trained again, {loss.forgotten:,} forgotten on its rows")
    return found


def first_batches(losses: Sequence[Loss], target: float) -> Ratio:
    """Returns the seconds to the first batch as a ratio to the target."""
    return Ratio([(loss.first_batch, target) for loss in losses], 1.0, "max")


def draw(path: Path, servers: int, found: Mapping[str, Sequence[Loss]], sizes: Sequence[Sequence[Loss]]) -> None:
    """Draws the samples after the kill by strategy, and the first batch over the size."""
    figure = Figure(figsize=(12 if sizes else 6.5, 4.5), layout="constrained")
    samples, *beside = figure.subplots(1, 2 if sizes else 1, squeeze=False)[0]
    for contender, losses in found.items():
        for number, loss in enumerate(losses):
            label = contender if not number else None
            samples.plot(*zip(*loss.line, strict=True), color=COLOURS[contender], label=label)
    samples.axhline(0, color=GREY, linewidth=0.5)
    samples.yaxis.set_major_formatter(EngFormatter())
    samples.set(xlabel=f"seconds after SIGKILL of one of {servers} PS", ylabel="samples beyond those at the kill")
    samples.set_title("A parameter server is lost: training by strategy")
    samples.legend()
    for growth in beside:
        medians = []
        for losses in sizes:
            lost = [loss.lost / 1e9 for loss in losses]
            growth.plot(lost, [loss.first_batch for loss in losses], "k.", alpha=0.5)
            medians.append((statistics.median(lost), statistics.median(loss.first_batch for loss in losses)))
        label = "parity: first batch (medians, and every loss)"
        growth.plot(*zip(*medians, strict=True), color=GREEN, label=label)
        growth.set(xlabel="GB of rows and optimizer state lost", ylabel="seconds", xlim=(0, None), ylim=(0, None))
        growth.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--servers", type=int, default=SERVERS, metavar="N", help="of which one is lost")
    parser.add_argument("--size", type=float, default=1.0, help="GB of rows that are lost")
    parser.add_argument("--rounds", type=int, default=5, help="losses of each contender; one with --quick")
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", help="some of the contenders")
    parser.add_argument("--sizes", action="store_true", help=f"also parity with {SIZES} GB")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        synthesise(data, SAMPLES)
        servers = options.servers
        found = measure(data, options.only or list(CONTENDERS), servers, options.size, rounds)
        sizes = [measure(data, [PARITY], servers, size, rounds)[PARITY] for size in SIZES] if options.sizes else []
    ratios: dict[str, Ratio] = {}
    for contender in (PARITY, ADOPTED):
        if losses := found.get(contender):
            first = FIRST_SECONDS if options.size <= 1 else FIRST_SECONDS_OF_LARGE
            ratios[f"{contender}: first batch / {duration_text(first)}"] = first_batches(losses, first)
            protected = [(loss.protected, PROTECTED_SECONDS) for loss in losses]
            ratios[f"{contender}: protected / {duration_text(PROTECTED_SECONDS)}"] = Ratio(protected, 1.0, "max")
            ratios[f"{contender}: rate until protected"] = Ratio([(loss.rate, 1.0) for loss in losses], RATE, "min")
    if found.get(PARITY) and found.get(FULL):
        pairs = [(back.caught_up, ours.first_batch) for back, ours in zip(found[FULL], found[PARITY], strict=True)]
        ratios["full recovery caught up / parity's first batch"] = Ratio(pairs, TIMES_FASTER, "min")
    if options.plot:
        draw(options.plot, servers, found, sizes)
    report("lost_server", ratios, options.output)


if __name__ == "__main__":
    main()
