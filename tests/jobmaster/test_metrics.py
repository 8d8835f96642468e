import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.jobmaster.conftest import Cluster

from emberscale_api import metrics
from emberscale_api.rpc import master_pb2 as pb


def test_the_job_can_be_scraped(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=100)
    status = cluster.until_phase(pb.COMPLETE)
    master = next(member for member in status.members if member.member.role == pb.MASTER)
    with urllib.request.urlopen(f"http://{master.metrics_address}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples[metrics.MEMBERS_ALIVE, "ps"] == 2.0
    assert samples[metrics.JOB_PROGRESS_RATIO,] == 1.0
    assert samples[metrics.RECOVERIES_TOTAL,] == 0.0
    assert samples[metrics.LOSS,] == pytest.approx(0.05)
