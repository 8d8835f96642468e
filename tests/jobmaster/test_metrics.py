import urllib.request
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.driven import Driven

from emberscale_api import metrics
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import Rebuilds
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.server import JobMetrics
from emberscale_jobmaster.state import JobState


def test_the_job_can_be_scraped(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=100)
    cluster.until_phase(pb.COMPLETE)
    master = next(member for member in cluster.status().members if member.member.role == pb.MASTER)
    with urllib.request.urlopen(f"http://{master.metrics_address}/metrics", timeout=60) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples[metrics.MEMBERS_ALIVE, "ps"] == 2.0
    assert samples[metrics.JOB_PROGRESS_RATIO,] == 1.0
    assert samples[metrics.RECOVERIES_TOTAL,] == 0.0
    assert samples[metrics.LOSS,] == pytest.approx(0.05)


class Still:
    """A runtime at one moment of a driven job."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def view(self) -> tuple[JobState, Observations, TrainingJobSpec]:
        return self._driven.job, self._driven.state.seen, self._driven.spec

    def now(self) -> float:
        return self._driven.now


def test_protection_and_rebuilds_can_be_scraped() -> None:
    driven = Driven(servers=3, interval=1000.0, parity=1)

    def scraped() -> dict[str, float]:
        families = JobMetrics(cast(JobRuntime, Still(driven))).collect()
        return {sample.name: sample.value for family in families for sample in family.samples}

    driven.start()
    assert scraped()[metrics.JOB_PROTECTED] == 0
    driven.train(4)
    driven.pass_time(1)
    assert scraped()[metrics.JOB_PROTECTED] == 1
    driven.kill(Role.PS, 1)
    assert scraped()[metrics.JOB_PROTECTED] == 0
    driven.join(Role.PS, 1)
    driven.pass_time(1)
    after = scraped()
    assert (after[metrics.JOB_PROTECTED], after[metrics.JOB_REBUILDS_TOTAL]) == (1, 1)
    assert after[metrics.JOB_REBUILD_SECONDS] == driven.job.rebuilt.seconds


def test_rebuilds_can_be_scraped_once_auto_has_given_parity_up() -> None:
    driven = Driven(servers=3, interval=1000.0, parity=1, strategy="Auto")
    driven.state = replace(
        driven.state, job=replace(driven.job, rebuilt=Rebuilds(count=2, server="ps-1", seconds=1.5, bytes=7))
    )
    families = JobMetrics(cast(JobRuntime, Still(driven))).collect()
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert (samples[metrics.JOB_REBUILDS_TOTAL], samples[metrics.JOB_REBUILD_SECONDS]) == (2, 1.5)
    assert metrics.JOB_PROTECTED not in samples, "the alert is for jobs that keep parity"
