"""What a real brain counts for jobs that are gone, once an operator knows it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.operator.kubernetes.redis_servers import INSTALLATION, StateRedis

from brain_process import BrainProcess
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_operator.kubernetes.claims import BrainClaims
from emberscale_operator.kubernetes.tenants import Tenants
from eventually import until

KEY = "the-key"
HALF = pb.Shape(workers=1, ps=1, worker_cpu=2, ps_cpu=2, worker_memory=1 << 30, ps_memory=1 << 30)

Run = Callable[[], BrainProcess]


@pytest.fixture
def run_brain(tmp_path: Path) -> Iterator[Run]:
    """Runs a brain with eight cores; always the same one, at the same address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "key").write_text(KEY)
    settings = (f"database=sqlite:///{tmp_path / 'brain.db'}", f"listen=127.0.0.1:{port}", "cluster.cpu=8")
    running: list[BrainProcess] = []

    def run() -> BrainProcess:
        running.append(BrainProcess(tmp_path / "key", tmp_path / f"brain-{len(running)}.log", settings))
        return running[-1]

    yield run
    for brain in running:
        brain.stop()


def submit(brain: BrainProcess, job: str) -> None:
    """Submits a job that has half of the cores, as its master does."""
    description = pb.JobDescription(
        architecture="DLRM", batch_size=512, dense_bytes=10**6, embedding_dimension=16, tables=1, total_samples=10**9
    )
    request = pb.SubmitJobRequest(job_uid=job, owner="ours", description=description, current=HALF, fixed=True)
    brain.stub.SubmitJob(request, timeout=60)


def claimed(brain: BrainProcess, *jobs: str) -> set[str]:
    """Returns those of the jobs that the brain counts."""
    return {job for job in jobs if brain.knows(job)}


@asynccontextmanager
async def claims_of(brain: BrainProcess) -> AsyncIterator[BrainClaims]:
    claims = BrainClaims(brain.address, KEY, look=0.02)
    keeps = asyncio.create_task(claims.keep())
    try:
        yield claims
    finally:
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)
        await claims.close()


async def test_the_cores_of_a_job_that_is_gone_are_free_though_its_master_submits_it_once_more(run_brain: Run) -> None:
    brain = run_brain()
    for job in ("gone", "there"):
        submit(brain, job)
    async with claims_of(brain) as claims:
        claims.release("gone")
        await until(lambda: claimed(brain, "gone", "there") == {"there"})
        submit(brain, "gone")
        await until(lambda: claimed(brain, "gone", "there") == {"there"})


async def test_a_brain_that_was_away_hears_of_jobs_that_went_meanwhile(run_brain: Run) -> None:
    brain = run_brain()
    for job in ("gone", "there"):
        submit(brain, job)
    brain.kill()
    async with claims_of(brain) as claims:
        with capture_logs() as logs:
            claims.release("gone")
            await until(lambda: any(entry["event"] == "brain_claims_not_ended" for entry in logs))
        again = run_brain()
        await until(lambda: claimed(again, "gone", "there") == {"there"})


async def test_an_operator_tells_of_jobs_that_go_while_it_runs_and_of_those_that_went_before(
    run_brain: Run, tmp_path: Path
) -> None:
    brain, jobs = run_brain(), ("went", "goes", "stays")
    for job in jobs:
        submit(brain, job)
    with StateRedis(tmp_path) as redis:
        async with redis.operator(*jobs):
            pass
        async with claims_of(brain) as claims:
            tenants = Tenants(redis.url, INSTALLATION, claims=claims)
            await tenants.sweep({"ours": ["goes", "stays"]})
            await until(lambda: claimed(brain, *jobs) == {"goes", "stays"})
            await tenants.remove("goes")
            await until(lambda: claimed(brain, *jobs) == {"stays"})
            await tenants.close()
