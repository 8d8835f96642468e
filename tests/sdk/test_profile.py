"""The computation of a profile from two readings of counters and a measured roof."""

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from prometheus_client import CollectorRegistry, start_http_server
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._commands.profile import share_of_roof_text
from emberscale._profiling.job_profile import Reading, Roof, TimeBreakdown, profile_of, take_reading
from emberscale._profiling.picture import draw_profile
from emberscale._profiling.roof import measure_roof, ready_batches
from emberscale_api.job import load_manifest
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import JobStatus, MemberNow
from emberscale_api.job.status import JobPhase
from emberscale_api.metrics import WORKER_STAGES
from emberscale_operator.local.snapshot import RunView
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.protection import RowProtection
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.worker.statistics import WorkerMetrics, WorkerStatistics

STAGE = "emberscale_stage_seconds_total"


def worker(done: float) -> dict[str, float]:
    """Returns a worker's counters after `done` seconds, half of which were spent reading."""
    return {
        "emberscale_samples_total": 1000 * done,
        "emberscale_batches_total": 10 * done,
        "emberscale_ids_total": 26_000 * done,
        "emberscale_keys_total": 6_500 * done,
        "emberscale_wire_bytes_total received": 500_000 * done,
        "emberscale_wire_bytes_total sent": 600_000 * done,
        **{f"{STAGE} {stage}": (0.5 if stage == "read" else 0.1) * done for stage in WORKER_STAGES},
    }


def server(done: float) -> dict[str, float]:
    return {f"{STAGE} {stage}": share * done for stage, share in {"pull": 0.2, "push": 0.2, "hold": 3}.items()}


@pytest.fixture
def profile() -> TimeBreakdown:
    def reading(at: float, done: float) -> Reading:
        counters = {"worker-0": worker(done), "worker-1": worker(done), "ps-0": server(done)}
        return Reading(at, counters, {"worker-0": done, "worker-1": done, "ps-0": done / 2, "master-0": 0.0})

    return profile_of("job", reading(100, 7), reading(110, 17), Roof(4000, 0.0005, 2))


def test_only_what_happened_between_the_readings_counts(profile: TimeBreakdown) -> None:
    assert (profile.seconds, profile.samples, profile.batches) == (10, 20_000, 200)
    assert profile.samples_per_second == 2000
    assert profile.share_of_roof == 0.5
    assert profile.ids_per_key == 4
    assert (profile.received_bytes_per_sample, profile.sent_bytes_per_sample) == (500, 600)
    assert profile.cpu_seconds_per_sample == pytest.approx(25 / 20_000)


def test_shares_are_of_one_process_and_a_servers_add_up(profile: TimeBreakdown) -> None:
    assert profile.worker_stages["read"] == pytest.approx(0.5)
    assert profile.worker_stages["push"] == pytest.approx(0.1)
    assert profile.bottleneck == "read"
    assert profile.server_stages == pytest.approx({"gather": 0.2, "update": 0.2, "idle": 0.6})
    assert profile.hold_seconds == pytest.approx(30)


@pytest.mark.parametrize(("share", "told"), [(0.5, "50%"), (1.0, "100%"), (1.09, "109%; servers cost no more than")])
def test_a_share_above_the_roof_says_how_it_came_about(share: float, told: str) -> None:
    text = share_of_roof_text(share)
    assert text.startswith(told)
    assert ("varies" in text) == (share > 1)


def test_the_picture_is_drawn(profile: TimeBreakdown, tmp_path: Path) -> None:
    draw_profile(profile, tmp_path / "profile.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "profile.png").shape
    assert width > height > 500


def test_what_the_processes_serve_is_what_a_profile_needs() -> None:
    statistics, registry, servers = WorkerStatistics(), CollectorRegistry(), CollectorRegistry()
    statistics.planned(26, 13)
    statistics.moved(100, 50)
    registry.register(WorkerMetrics(statistics))
    state = ServerState()
    ServerMetrics(state, RowProtection(state, "secret"), servers)
    serving = [start_http_server(0, addr="127.0.0.1", registry=exposed)[0] for exposed in (registry, servers)]
    members = tuple(
        MemberNow(MemberId(role), metrics_address=f"127.0.0.1:{one.server_port}")
        for role, one in zip((Role.WORKER, Role.PS), serving, strict=True)
    )
    status = JobStatus(JobPhase.TRAINING, members=members)
    reading = take_reading(RunView(0.0, status, (), {}, (), False))
    for http_server in serving:
        http_server.shutdown()
        http_server.server_close()
    assert reading.counters["worker-0"].keys() >= worker(1).keys()
    assert reading.counters["ps-0"].keys() >= server(1).keys()
    assert reading.counters["worker-0"]["emberscale_ids_total"] == 26
    assert reading.counters["worker-0"]["emberscale_wire_bytes_total received"] == 100


@pytest.fixture
def job_on_data(manifest: Path, tmp_path: Path) -> Any:
    write_dataset(tmp_path / "data", DatasetSpec(2000, 0, 1, 0.0), lambda rows: None)
    return load_manifest(manifest, [f"spec.data.train=[{tmp_path}/data/train-*.tsv]", "spec.training.batchSize=256"])


def test_the_roof_is_measured_with_the_workers_own_code(job_on_data: Any) -> None:
    batches = ready_batches(job_on_data, 4)
    assert [len(batch.labels) for batch, _, _ in batches] == [256] * 4
    assert all(len(pulled.rows) == plan.values for _, plan, pulled in batches)
    roof = measure_roof(job_on_data, 0.2)
    assert roof.threads == 2
    assert roof.samples_per_second > 0
    assert roof.cpu_seconds_per_sample > 0


def test_bad_input_is_said_before_anything_starts(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").unlink()
    result = CliRunner().invoke(app, ["profile", str(manifest)])
    assert result.exit_code == 2
    assert "spec.data.train.0: train.tsv: no such file" in result.stderr
