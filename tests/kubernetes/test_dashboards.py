"""Every panel and every rule, asked of a real Prometheus that scraped a real job."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from local_jobs import Job, emberscale
from prometheus_server import CHART, DASHBOARDS, RULES, Prometheus, Query, prometheus_that_scrapes, queries

COMPONENTS = {pb.MASTER: "master", pb.PS: "ps", pb.WORKER: "worker"}
OF_JOBS = [query for query in queries() if not query.is_of_the_operator]


def expressions_of_rules(kind: str) -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"] if kind in rule]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a running job under the labels that the chart's PodMonitor gives."""
    if shutil.which("prometheus") is None:
        pytest.skip("NOT RUN: there is no `prometheus` on the path (Debian's package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    job = start_job(folder)
    try:
        with prometheus_that_scrapes(targets_of(job), folder) as found:
            wait_until_seen(found, job)
            yield found
    finally:
        assert job.process is not None
        job.process.kill()
        job.process.communicate()


def start_job(folder: Path) -> Job:
    """A job that goes on for long enough, and writes checkpoints meanwhile."""
    made = emberscale("data", "synth", "criteo", "--rows", "100000", "--seed", "3", cwd=folder)
    assert made.returncode == 0, made.stderr
    spec = {
        "data": {"train": [str(folder / "criteo/train-*.tsv")]},
        "training": {"batchSize": 256, "epochs": 1000},
        "ps": {"replicas": 2},
        "worker": {"replicas": 2},
        "checkpoint": {"interval": "3s"},
    }
    manifest = {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "seen"},
        "spec": spec,
    }
    job = Job(folder, manifest)
    job.start()
    job.wait_for(lambda: job.samples() > 0, timeout=100)
    return job


def targets_of(job: Job) -> list[dict[str, Any]]:
    """What the master says where metrics are, labelled as the PodMonitor labels pods."""
    environment = job.members("master")[0].environ()
    token = Path(environment["EMBERSCALE_TOKEN_FILE"]).read_text().strip()
    with open_channel(environment["EMBERSCALE_MASTER_ADDRESS"], token) as channel:
        status = MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
    return [
        {
            "targets": [member.metrics_address],
            "labels": {
                "namespace": "default",
                "training_job": "seen",
                "component": COMPONENTS[member.member.role],
                "index": str(member.member.index),
            },
        }
        for member in status.members
        if member.metrics_address
    ]


def wait_until_seen(prometheus: Prometheus, job: Job) -> None:
    """Until Prometheus answers and has seen a checkpoint and a few seconds of training."""

    def seen() -> bool:
        if not prometheus.is_up():
            return False
        return bool(
            prometheus.ask("increase(emberscale_checkpoint_seconds_count[1m]) > 0")
            and prometheus.ask("rate(emberscale_samples_total[20s]) > 0")
        )

    if not job.wait_for(seen, timeout=90):
        pytest.fail(f"the job ended early\n{job.logs()[-4000:]}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("query", OF_JOBS, ids=str)
def test_a_panel_shows_something(query: Query, prometheus: Prometheus) -> None:
    expression = query.concrete
    deadline = time.monotonic() + 20
    # until each server has cut once more, a mean over its cuts is 0 / 0
    while not (result := prometheus.ask(expression)) or any(entry["value"][1] == "NaN" for entry in result):
        assert time.monotonic() < deadline, f"no data: {expression}: {result}"
        time.sleep(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("expression", expressions_of_rules("record"))
def test_a_recording_rule_records(expression: str, prometheus: Prometheus) -> None:
    assert prometheus.ask(expression)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("expression", expressions_of_rules("alert"))
def test_an_alert_does_not_fire_on_a_healthy_job_but_looks_at_metrics_that_exist(
    expression: str, prometheus: Prometheus
) -> None:
    assert prometheus.ask(expression) == []
    for name in set(re.findall(r"\b(?:namespace_job:)?emberscale_[a-z0-9_:]+", expression)):
        assert prometheus.ask(name), f"nothing serves {name}"


def test_prometheus_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("NOT RUN: there is no `promtool` on the path (Debian's package prometheus)")
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_queries_use_no_label_but_those_that_pods_are_scraped_with() -> None:
    monitors = (CHART / "templates" / "monitors.yaml").read_text()
    given = set(re.findall(r"targetLabel: (\w+)", monitors)) | {
        "le",
        "stage",
        "direction",
        "outcome",
        "table",
        "phase",
        "reason",
        "verb",
        "resource",
        "role",
    }
    for query in queries():
        used = set(re.findall(r"(\w+)(?:=~|!=|=)\"", query.expression))
        used |= {name for names in re.findall(r"by \(([^)]*)\)", query.expression) for name in names.split(", ")}
        assert used <= given, f"{query}: {used - given}"


def test_each_panel_says_what_it_shows() -> None:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            assert panel["type"] == "row" or panel["description"], f"{file.name}: {panel['title']}"
