"""Jobs that leave their sizes open, with the brain that `emberscale run` starts for them.

Each starts real processes, trains long enough to be measured and changes shape, which takes half a minute.
"""

import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates import certificate_folder
from emberscale_api.environment import TLS_FOLDER
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from emberscale_api.shape import GIB, JobShape
from emberscale_brain.history.changes import COMPLETE, JobEnded, JobSubmitted, StartUpObserved
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_operator.local.brain import default_database
from local_jobs import BATCH, Job, emberscale_here

PLUGIN = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "planner-plugin"
OPEN: dict[str, Any] = {
    "ps": {"replicas": None, "maxReplicas": 2},
    "worker": {"replicas": None, "maxReplicas": 2},
    "scaling": {"profileInterval": "1s", "cooldown": "2s"},
    "checkpoint": {"interval": "60s"},
}


def remember_a_similar_job(shape: JobShape) -> None:
    """Records a past job of the same model and owner that ended with this shape and whose processes started quickly."""
    metadata = JobMetadata(
        architecture="DLRM",
        batch_size=BATCH,
        dense_bytes=100_000,
        embedding_dimension=26 * 16,
        tables=26,
        total_samples=54_000,
        name="job",
        optimizer="RowWiseAdagrad",
        data_bytes=12_000_000,
    )
    now = time.time()
    past = JobId("yesterday")
    store = HistoryStore.open(f"sqlite:///{default_database(os.environ)}")
    store.migrate()
    store.write(
        [
            JobSubmitted(past, "default", metadata, ShapeBounds(cpu_step=0.5), now - 86_400),
            *(
                StartUpObserved(past, role, now - 80_100 - number, seconds=2.0, paused_seconds=0.5)
                for role in ("worker", "ps")
                for number in range(20)
            ),
            JobEnded(past, COMPLETE, now - 80_000, shape),
        ]
    )
    store.close()


@pytest.mark.timeout(1200)
def test_a_job_without_sizes_starts_like_its_like_and_is_planned_anew_while_it_runs(
    make_job: Callable[..., Job],
) -> None:
    remember_a_similar_job(JobShape(1, 1, 0.5, 0.5, 2 * GIB, 2 * GIB))
    job = make_job({**OPEN, "training": {"batchSize": BATCH, "epochs": 24}})
    finished = job.run("--brain-set", "planning.interval=1s", "--brain-set", "planner.exploration=0")
    assert finished.summary["phase"] == "Complete", finished.stderr + job.logs()[-8000:]
    log = (job.run_folder / "logs" / "master-0.log").read_text()
    assert "warm start with 1 worker x 0.5 cores" in log
    plan = finished.summary["plan"]
    assert plan["scalings"] >= 1, log
    assert plan["version"] >= 2
    assert (plan["ps"], plan["worker"]) != ({"replicas": 1, "cpu": 0.5}, {"replicas": 1, "cpu": 0.5})
    audit = job.exact_audit()
    assert audit["once"] == finished.summary["expected_samples"]
    explained = emberscale_here("explain-plan", str(job.run_folder), "--output", "json")
    assert explained.returncode == 0, explained.stderr
    assert '"front"' in explained.stdout


def refusal(address: str, authority: bytes | None) -> grpc.StatusCode:
    """Returns the error that a caller without the right token gets."""
    with open_channel(address, "a guess", authority) as channel, pytest.raises(grpc.RpcError) as raised:
        MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=20)
    return raised.value.code()


@pytest.mark.timeout(1200)
def test_a_planner_of_ones_own_moves_the_rows_to_more_servers_and_no_sample_is_lost(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of the job have certificates: master, parameter servers, workers and brain."""
    monkeypatch.setenv("PYTHONPATH", str(installed(PLUGIN, tmp_path / "site")))
    certificates = certificate_folder(tmp_path / "tls")
    monkeypatch.setenv(TLS_FOLDER, str(certificates))
    job = make_job({**OPEN, "training": {"batchSize": BATCH, "epochs": 16}})
    settings = ("planner.name=fair-share", "cluster.cpu=8", "bounds.maxWorkerCpu=1", "bounds.maxPsCpu=1")
    job.start(*(part for setting in (*settings, "planning.interval=1s") for part in ("--brain-set", setting)))
    assert job.wait_for(job.master_addresses)
    (address,) = job.master_addresses()
    assert refusal(address, (certificates / "ca.crt").read_bytes()) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(address, None) is grpc.StatusCode.UNAVAILABLE
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr + job.logs()[-8000:]
    plan = finished.summary["plan"]
    assert (plan["ps"]["replicas"], plan["worker"]["replicas"]) == (2, 2), job.logs()[-8000:]
    assert "its share is 8 cores" in plan["message"]
    assert finished.summary["recoveries"] == 0
    assert '"event": "moved"' in job.logs()
    audit = job.exact_audit()
    assert audit["once"] == finished.summary["expected_samples"]


def installed(project: Path, site: Path) -> Path:
    """Installs the plugin as pip would, but without a build backend, which pip would have to download."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    metadata = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in about["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text(groups)
    module = next(project.glob("*.py"))
    (site / module.name).write_text(module.read_text())
    return site
