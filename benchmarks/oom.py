"""Jobs whose tables outgrow their parameter servers (PS), with and without the forecast of memory; others that do not.

Each scenario is a whole `emberscale run`. The manifest fixes the memory of a PS and leaves their number to the brain.
A cgroup limits each PS, and the kernel kills one that outgrows it; so does the run's own watch, at the same limit.
20 growing jobs need more than their PS have. They train for about half a minute, and differ in rate, dimension, number
of PS, skew of the ids over the PS, and course: steady, from a slow start, in bursts, slowing down. Each is run twice:

* On: the product as it is. Its brain knows how long changes of shape took in an earlier job on this machine.
* Off: the same with `scaling.mode: Manual`: the job keeps its PS, and pushes do not slow down near the limit.

20 further jobs of the same kinds stay within their limits; there, any change of shape is a false alarm. The brain sees
no reason but memory to change a shape: time costs it nothing, and it makes no trials. A run ends when a PS is killed.

Lead time is from the plan until the kill of the same job without the forecast, both in seconds of training. DLRover-RM
reports the share of jobs with an OOM error before and after (table 4): 4.7% and 0.23%.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from emberscale_api.pictures import BLUE, CRIMSON, GREEN
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.routing import BUCKETS
from emberscale_api.shape import GIB, JobShape
from emberscale_brain.history.changes import COMPLETE, JobEnded, JobSubmitted, StartUpObserved
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_operator.local.brain import default_database
from emberscale_trainer.partition import buckets_of
from memory_groups import MemoryGroups, resident_bytes
from reporting import Ratio, arguments, report, say
from whole_run import EMBERSCALE, manifest, processes_of

ON, OFF, WITHIN = "forecast on", "forecast off", "within limits"
COURSES = ("steady", "slow start", "bursts", "slowing down", "skewed")
BATCH = 1024
TOP_MLP = [512, 512]
"""Wide, so that jobs train for half a minute: within seconds, a brain has only two or three measurements."""
StartUps = Mapping[str, Sequence[tuple[float, float]]]
"""The seconds and the seconds of standstill of start-ups, by role."""
CAP_SECONDS = 240.0
_MIGRATING = threading.Lock()
"""Held during migrations, since Alembic keeps the current one in module variables."""
_FEW_RECORDS = 2 * BATCH
"""The records of the job that shows what memory a PS takes without rows."""
ROW_EXTRA = 53
"""The bytes of a row besides its weights, in the slab and in the index."""


@dataclass(frozen=True, slots=True)
class LimitedJob:
    """A job with `columns` columns of ids, and `limit` bytes for each of `servers` PS."""

    number: int
    course: str
    records: int
    columns: int
    dimension: int
    servers: int
    limit: int

    def describe(self) -> str:
        """Describes the differences between scenarios."""
        return f"{self.number:2} {self.course}, {self.dimension} floats, {self.servers} PS of {bytes_text(self.limit)}"


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """The outcome of a run, in seconds of training; None for never. `peak` is the largest PS's share of the limit."""

    killed: float | None
    planned: float | None
    moved: float | None
    shape_changes: int
    peak: float
    complete: bool


def scenarios(count: int, server_bytes: int, *, outgrow: bool) -> list[LimitedJob]:
    """Draws, from fixed seeds, jobs that outgrow their PS, or ones that stay within their limits.

    `server_bytes` is the memory of a PS without rows.
    """
    made = []
    for number in range(count):
        random = np.random.default_rng([number, outgrow])
        course = COURSES[number % len(COURSES)]
        columns, dimension = int(random.integers(4, 9)), int(random.choice([16, 32, 64]))
        servers, records = int(random.integers(2, 4)), int(random.integers(350_000, 500_000))
        new = _news(course, records).sum() * columns
        largest = new / servers * (1.4 if course == "skewed" else 1.0) * (4 * dimension + ROW_EXTRA)
        part = random.uniform(0.5, 0.75) if outgrow else random.uniform(1.3, 1.6)
        limit = int(server_bytes + part * largest) + (0 if outgrow else 64 << 20)
        made.append(LimitedJob(number, course, records, columns, dimension, servers, limit))
    return made


def _news(course: str, records: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the probability that an id is new, by record."""
    progress = np.arange(records) / records
    match course:
        case "slow start":
            return np.clip(2 * progress, 0.05, 1.0)
        case "bursts":
            return np.where((progress * 5).astype(np.int64) % 2 == 1, 1.0, 0.3)
        case "slowing down":
            return np.exp(-1.5 * progress)
        case _:
            return np.full(records, 0.8)


def write(scenario: LimitedJob, file: Path) -> None:
    """Writes the records of a job, with ids in the order of their arrival."""
    random = np.random.default_rng(scenario.number)
    chance = _news(scenario.course, scenario.records)
    columns: dict[str, Any] = {
        "label": random.integers(0, 2, scenario.records).astype(np.int8),
        "x": random.random(scenario.records, dtype=np.float32),
    }
    for column in range(scenario.columns):
        ids = random.integers(1 << 20, 1 << 62, 2 * scenario.records)
        if scenario.course == "skewed":  # an eighth of the buckets gets a third of the ids
            ids = ids[(buckets_of(ids) < BUCKETS // 8) | (random.random(len(ids)) < 0.3)]
        ids = np.resize(ids, scenario.records)
        columns[f"c{column}"] = np.where(random.random(scenario.records) < chance, ids, ids % 1000)
    parquet.write_table(pa.table(columns), file, row_group_size=20_000)


def job_of(scenario: LimitedJob, file: Path, *, forecast: bool) -> dict[str, Any]:
    """Returns the manifest of a job."""
    number: dict[str, Any] = {"minReplicas": scenario.servers, "maxReplicas": 4 * scenario.servers}
    ids = [f"c{column}" for column in range(scenario.columns)]
    return manifest(
        f"oom-{scenario.number}",
        {
            "data": {
                "format": "Parquet",
                "train": [str(file)],
                "columns": {"label": "label", "dense": ["x"], "categorical": ids},
                "shuffling": {"enabled": False},
            },
            "model": {"embeddings": {"dimension": scenario.dimension}, "topMlp": TOP_MLP},
            "training": {"batchSize": BATCH},
            "ps": {
                **(number if forecast else {"replicas": scenario.servers}),
                "resources": {"limits": {"cpu": 1, "memory": scenario.limit}},
            },
            "worker": {"replicas": 1, "resources": {"limits": {"cpu": 0.5, "memory": "3Gi"}}},
            "scaling": {
                "mode": "Auto" if forecast else "Manual",
                "profileInterval": "1s",
                "cooldown": "5s",
            },
            "checkpoint": {"interval": "1h", "flash": {"mode": "Disabled"}},
        },
    )


SETTINGS = {
    "planning.interval": "1s",
    "planner.exploration": "0",
    "planner.timeValuePerHour": "0",
    "cluster.cpu": "64",
    "cluster.memory": "256Gi",
}


def remember(scenario: LimitedJob, share: Path, start_ups: StartUps) -> None:
    """Writes the history of a brain that knows one job like this, so that it starts with the scenario's shape."""
    metadata = JobMetadata(
        architecture="DLRM",
        batch_size=BATCH,
        dense_bytes=40_000,
        embedding_dimension=scenario.columns * scenario.dimension,
        tables=scenario.columns,
        total_samples=scenario.records,
        name=f"oom-{scenario.number}",
        optimizer="RowWiseAdagrad",
        data_bytes=8 * scenario.columns * scenario.records,
    )
    shape = JobShape(1, scenario.servers, 0.5, 1.0, 3 * GIB, scenario.limit)
    past, now = JobId("yesterday"), time.time()
    file = default_database({**os.environ, "XDG_DATA_HOME": str(share)})
    file.parent.mkdir(parents=True, exist_ok=True)
    store = HistoryStore.open(f"sqlite:///{file}")
    with _MIGRATING:
        store.migrate()
    store.write(
        [
            JobSubmitted(past, "default", metadata, ShapeBounds(cpu_step=0.5), now - 7200),
            *(
                StartUpObserved(past, role, now - 5400 + place, seconds, paused)
                for role, taken in start_ups.items()
                for place, (seconds, paused) in enumerate(taken)
            ),
            JobEnded(past, COMPLETE, now - 3600, shape),
        ]
    )
    store.close()


def start_ups_in(share: Path) -> StartUps:
    """Returns what a brain has learned about start-ups."""
    store = HistoryStore.open(f"sqlite:///{default_database({**os.environ, 'XDG_DATA_HOME': str(share)})}")
    try:
        return store.start_ups(8, 8)
    finally:
        store.close()


def bytes_without_rows() -> int:
    """Measures the memory of a PS that has almost no rows."""
    job = LimitedJob(0, "steady", _FEW_RECORDS, columns=8, dimension=16, servers=2, limit=2 * GIB)
    run(job, {}, forecast=False)  # may compile kernels, which takes more memory than most of the scenarios have
    return int(run(job, {}, forecast=False)[0].peak * job.limit)


def run(scenario: LimitedJob, start_ups: StartUps, *, forecast: bool) -> tuple[LimitedRun, StartUps]:
    """Runs a job until it ends, one of its PS is killed, or CAP_SECONDS pass.

    The brain begins with the given start-ups; those that it knows at the end are returned, too.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(scenario, folder / "data.parquet")
        job = job_of(scenario, folder / "data.parquet", forecast=forecast)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        remember(scenario, folder / "share", start_ups)
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        command = [EMBERSCALE, "run", str(folder / "job.yaml"), "--workdir", str(folder / "run")]
        command += [part for setting in settings for part in ("--brain-set", setting)]
        environment = {**os.environ, "XDG_DATA_HOME": str(folder / "share")}  # with its own history
        groups = MemoryGroups(scenario.limit)
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            peak = _watch(process, scenario, groups, folder / "run" / "logs")
            outcome = _outcome(folder / "run" / "logs", peak, groups.killed)
            return outcome, start_ups_in(folder / "share")
        finally:
            process.kill()
            process.wait()
            groups.close()


def _watch(process: subprocess.Popen[bytes], scenario: LimitedJob, groups: MemoryGroups, logs: Path) -> float:
    """Limits each PS once it appears, until the job ends, a PS is killed, or CAP_SECONDS pass. Returns the peak use."""
    peak, deadline = 0, time.monotonic() + CAP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        for pid in _servers(process.pid):
            groups.hold(pid)
            peak = max(peak, resident_bytes(pid))
        if groups.killed or any("memory limit exceeded" in log.read_text() for log in logs.glob("ps-*.log")):
            time.sleep(1.0)  # the master logs it
            break
        time.sleep(0.05)
    return peak / scenario.limit


def _servers(parent: int) -> list[int]:
    return [process.pid for process, title in processes_of(parent) if title.startswith("emberscale-ps ")]


def _outcome(logs: Path, peak: float, killed: int) -> LimitedRun:
    events = [json.loads(line) for line in (logs / "master-0.log").read_text().splitlines() if line.startswith("{")]
    began = next((_at(e) for e in events if e["event"] == "phase" and e.get("phase") == "Training"), None)
    if began is None:
        raise RuntimeError(f"the job did not begin to train: {(logs.parent.parent / 'output').read_text()[-2000:]}")

    def first(matching: Sequence[Mapping[str, Any]]) -> float | None:
        return _at(matching[0]) - began if matching else None

    changes = [e for e in events if e["event"] == "scaling" and e["reason"] not in ("Start", "NoPlan")]
    changes = [e for e in changes if not e["message"].startswith("stays at")]
    gone = [e for e in events if e["event"] == "exited" and str(e["member"]).startswith("ps-") and e["exit_code"] == -9]
    dead = first(gone)
    if killed and dead is None:
        dead = _at(events[-1]) - began
    return LimitedRun(
        killed=dead,
        planned=first([e for e in changes if e["reason"] == "GrowMemory"]),
        moved=first([e for e in events if e["event"] == "moved"]),
        shape_changes=len(changes),
        peak=peak,
        complete=any(e["event"] == "phase" and e.get("phase") == "Complete" for e in events),
    )


def _at(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def draw(path: Path, measured: Mapping[str, Mapping[int, LimitedRun]]) -> None:
    """Draws when each job is planned, moved and killed, and the share of the limits that the others use."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, off in measured[OFF].items():
        on = measured[ON].get(number)
        if off.killed is not None:
            left.plot(off.killed, number, "x", color=CRIMSON)
        if on is not None and on.planned is not None:
            left.plot(on.planned, number, "o", color=BLUE)
            if on.moved is not None:
                left.plot([on.planned, on.moved], [number, number], "-", color=BLUE)
        if on is not None and on.killed is not None:
            left.plot(on.killed, number, "X", color="black")
    for marker, color, label in (
        ("o", BLUE, "forecast on: planned, until moved"),
        ("x", CRIMSON, "forecast off: killed"),
        ("X", "black", "forecast on: killed"),
    ):
        left.plot([], [], marker, color=color, label=label)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))
    left.set(xlabel="seconds of training", ylabel="growing job", title="Jobs that outgrow their PS")
    for contender, color in ((ON, BLUE), (WITHIN, GREEN)):
        ran = measured[contender]
        right.plot(list(ran), [outcome.peak for outcome in ran.values()], "o", color=color, label=contender)
        alarms = [number for number, outcome in ran.items() if outcome.shape_changes and contender == WITHIN]
        right.plot(alarms, [ran[n].peak for n in alarms], "s", mfc="none", color=CRIMSON, ms=10)
    right.axhline(1.0, color="black", lw=0.8)
    right.plot([], [], "s", mfc="none", color=CRIMSON, ms=10, label="false alarm")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="job", ylabel="largest PS, relative to the limit", title="Most memory in use")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=20, help="scenarios that grow, and as many that stay within")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of scenarios")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after this time")
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other")
    options = parser.parse_args()
    count = 5 if options.quick else options.count
    chosen = set(options.only or range(count))
    deadline = time.monotonic() + 60 * options.minutes
    server_bytes = bytes_without_rows()
    say(f"a PS without rows takes {bytes_text(server_bytes)}")
    runs = [
        (contender, scenario)
        for contender, outgrow in ((ON, True), (OFF, True), (WITHIN, False))
        for scenario in scenarios(count, server_bytes, outgrow=outgrow)
        if scenario.number in chosen
    ]
    runs.sort(key=lambda one: one[1].number)
    measured: dict[str, dict[int, LimitedRun]] = {ON: {}, OFF: {}, WITHIN: {}}

    earlier, start_ups = run(scenarios(1, server_bytes, outgrow=True)[0], {}, forecast=True)
    say(f"an earlier job: {earlier}; start-ups: {start_ups}")

    def measure(one: tuple[str, LimitedJob]) -> None:
        contender, scenario = one
        if time.monotonic() > deadline:
            say(f"{contender}: {scenario.describe()}: left out for want of time")
            return
        outcome, _ = run(scenario, start_ups, forecast=contender != OFF)
        measured[contender][scenario.number] = outcome
        say(f"{contender}: {scenario.describe()}: {outcome}")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(measure, runs))
    if options.plot:
        draw(options.plot, measured)
    summarise(measured, options.output)


def summarise(measured: Mapping[str, Mapping[int, LimitedRun]], output: str) -> None:
    """Reports kills, false alarms and lead times."""
    kills = {arm: sum(one.killed is not None for one in ran.values()) for arm, ran in measured.items()}
    alarms = sum(one.shape_changes > 0 for one in measured[WITHIN].values())
    leads = [
        off.killed - on.planned
        for number, off in measured[OFF].items()
        if off.killed is not None and (on := measured[ON].get(number)) is not None and on.planned is not None
    ]
    if leads:
        low, middle, high = np.percentile(leads, [0, 50, 100])
        say(f"lead time: median {duration_text(middle)}, {duration_text(low)} to {duration_text(high)}")
    jobs = {arm: max(1, len(ran)) for arm, ran in measured.items()}
    report(
        "oom",
        {
            "growing jobs killed, forecast on / all": Ratio([(kills[ON], jobs[ON])], 0.0, "max"),
            "growing jobs killed, forecast off / all": Ratio([(kills[OFF], jobs[OFF])], 0.5, "min"),
            "jobs within limits killed / all": Ratio([(kills[WITHIN], jobs[WITHIN])], 0.0, "max"),
            "jobs within limits with an alarm / all": Ratio([(alarms, jobs[WITHIN])], 0.0, "max"),
        },
        output,
    )


if __name__ == "__main__":
    main()
