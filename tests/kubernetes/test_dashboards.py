"""Evaluates every panel and every rule on a real Prometheus that scrapes the operator and the pods of a real job."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ENDED, ENDLESS, Job, Place, eventually, kubectl, manifest, submit
from faults import ProcessKiller, delete_pod
from installation import SYSTEM
from prometheus_server import (
    CHART,
    DASHBOARDS,
    FLASH_METRICS,
    JOB,
    NAMESPACE,
    RULES,
    Prometheus,
    Query,
    alerts,
    chart_monitors,
    flash_queries,
    prometheus_that_scrapes,
    promtool_finds,
    queries,
    scrape_configs,
)

pytestmark = [pytest.mark.timeout(2400), pytest.mark.first]

BROKEN = "broken"
NOWHERE = {"template": {"nodeSelector": {"no-node": "has-this"}}}
OF_PROMTOOL_ALONE = {
    "EmberscaleJobNotScraped": "all pods of this cluster can be scraped",
    "EmberscaleOperatorDown": "the other jobs need the operator",
    "EmberscaleOperatorDefects": "no defect is known that could be brought about",
    "EmberscaleApiCallsRefused": "the other jobs need the operator's rights",
    "EmberscaleRedisDown": "the other jobs need Redis",
    "EmberscaleRedisFillsUp": "the operator expels a job that stores so much within a second",
    "EmberscaleBrainDown": "the suite runs without a brain",
    "EmberscaleBrainDatabaseDown": "the suite runs without a brain",
    "EmberscalePlanningFails": "the suite runs without a brain",
    "EmberscaleJobUnprotected": "a lost server is rebuilt within seconds, wherever its successor finds a node",
    "EmberscaleFlashCheckpointsFail": "its Redis is another one: test_flash.py ends that",
}
"""Alerts that the suite does not provoke on the cluster, and why: only `test_alerts.py` covers them."""


def expressions_of_rules(kind: str) -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"] if kind in rule]


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, installed: str, shared_folder: str, killer: ProcessKiller
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a running job and the operator as the chart's monitors say.

    Before that, another job has completed and a worker was killed.
    """
    place = Place(NAMESPACE, shared_folder)
    kubectl("create", "namespace", NAMESPACE)
    brief = manifest("brief", place, data={"train": ["/shared/criteo/evaluation.tsv"]})
    lasting = manifest(JOB, place, epochs=ENDLESS, replicas=2)
    rows = {"admission": {"minCount": 2}, "eviction": {"ttlBatches": 100_000}}
    lasting["spec"]["faultTolerance"] = {"strategy": "ErasureCoding"}
    lasting["spec"]["model"] = {**lasting["spec"].get("model", {}), "embeddings": rows}
    try:
        done, job = submit(brief, place), submit(lasting, place)
        done.wait_complete()
        job.wait_for_samples(1)
        killer.kill(job.member("worker", 1))
        job.until("the worker is back", lambda status: (status.get("worker") or {}).get("restarts"), seconds=240)
        eventually(lambda: len(ready(job)) == 5 or None, "all are ready", seconds=180)
        folder = tmp_path_factory.mktemp("prometheus")
        with prometheus_that_scrapes(scrape_configs(chart_monitors(), SYSTEM), folder) as found:
            eventually(lambda: found.is_up() or None, "Prometheus is up", seconds=180)
            seen = (
                "increase(emberscale_checkpoint_seconds_count[1m]) > 0",
                "rate(emberscale_samples_total[20s]) > 0",
            )
            eventually(lambda: all(map(found.ask, seen)) or None, "it has seen a checkpoint", seconds=240)
            yield found
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def ready(job: Job) -> list[Any]:
    return [pod for role in ("master", "ps", "worker") for pod in job.running(role)]


@pytest.mark.parametrize("query", [query for query in queries() if query not in flash_queries()], ids=str)
def test_a_panel_shows_something(query: Query, prometheus: Prometheus) -> None:
    def shown() -> bool:
        """A mean over a server's cuts is 0 / 0 until the server has cut once more."""
        found = prometheus.ask(query.concrete)
        return bool(found) and all(entry["value"][1] != "NaN" for entry in found)

    eventually(lambda: shown() or None, f"data for {query.concrete}", seconds=240)


@pytest.mark.parametrize("expression", expressions_of_rules("record"))
def test_a_recording_rule_records(expression: str, prometheus: Prometheus) -> None:
    assert prometheus.ask(expression)


@pytest.mark.parametrize("expression", expressions_of_rules("alert"))
def test_an_alert_does_not_fire_on_a_healthy_job_but_looks_at_metrics_that_exist(
    expression: str, prometheus: Prometheus
) -> None:
    def quiet() -> bool:
        """Becomes true only once the killed worker has worked for a while."""
        return not [found for found in prometheus.ask(expression) if found["metric"].get("training_job") == JOB]

    eventually(quiet, f"nothing for {expression}", seconds=300)
    for name in set(re.findall(r"\b(?:namespace_job:)?emberscale_[a-z0-9_:]+", expression)):
        if name.startswith("emberscale_brain_"):
            continue  # the suite runs without a brain
        if name.startswith(FLASH_METRICS):
            continue  # test_flash.py, which has a Redis for flash checkpoints, checks these
        # a recorded one takes two scrapes and an evaluation of its rule
        eventually(partial(prometheus.ask, name), f"{name} is served", seconds=120)


@pytest.fixture(scope="module")
def broken(prometheus: Prometheus, shared_folder: str, killer: ProcessKiller) -> Iterator[Callable[[str], None]]:
    """Jobs that each provoke an alert; yields a function that fails if the job of that name no longer does."""
    kubectl("delete", "trainingjob", JOB, "-n", NAMESPACE, "--wait=false")
    place = Place(BROKEN, shared_folder)
    kubectl("create", "namespace", BROKEN)
    names = ("late", "stalled", "starved", "straggling", "unplaced")
    documents = {name: manifest(name, place, epochs=ENDLESS) for name in names}
    del documents["starved"]["spec"]["model"]  # at full speed
    documents["late"]["spec"]["runPolicy"]["activeDeadline"] = "2s"
    documents["stalled"]["spec"]["ps"]["replicas"] = 4
    documents["unplaced"]["spec"]["ps"] |= NOWHERE
    # The straggler holds nobody up, or it would be replaced after 20 s; slowed before it trains, it would never train.
    documents["straggling"]["spec"]["training"] |= {"maxStaleness": 1 << 20, "stalenessWarmup": 0}
    documents["straggling"]["spec"]["worker"]["replicas"] = 3
    try:
        jobs = {name: submit(document, place) for name, document in documents.items()}
        stalled, straggling = jobs["stalled"], jobs["straggling"]
        trains = f'emberscale_samples_total{{namespace="{BROKEN}", training_job="{straggling.name}", index="2"}} > 0'
        straggling.until("its third worker trains", lambda _: prometheus.ask(trains), seconds=600)
        stalled.wait_for_samples(1)
        lose_servers(stalled, killer)
        lose_workers(stalled, place)
        starve(jobs["starved"])
        slow = straggling.member("worker", 2)
        # slowed last and checked first: on a busy machine its probe fails sooner or later
        with killer.slowed(slow) as is_slowed:

            def check(name: str) -> None:
                job = jobs[name]
                assert name == "late" or job.phase() not in ENDED, job.report()
                assert name != "straggling" or is_slowed(), f"{slow['metadata']['name']} has ended\n{job.report()}"

            yield check
    finally:
        kubectl("delete", "namespace", BROKEN, "--wait=false")


def starve(job: Job) -> None:
    """Takes most of its CPU from a running server; a new one with so little CPU would not start in time."""
    job.wait_for_samples(1)
    little = {"spec": {"ps": {"resources": {"limits": {"cpu": "50m"}}}}}
    kubectl("patch", "tj", job.name, "-n", job.namespace, "--type=merge", "-p", json.dumps(little))


def lose_servers(job: Job, killer: ProcessKiller) -> None:
    """Kills each server once, so that no restart is delayed, and one at a time: a loss in a recovery does not count."""
    for number in range(4):
        before = job.status()["progress"].get("recoveries", 0)
        server = job.member("ps", number)
        killer.kill(server)

        def recovered(status: Any, before: int = before, killed: str = server["metadata"]["uid"]) -> bool:
            servers = job.running("ps")
            replaced = len(servers) == 4 and killed not in {pod["metadata"]["uid"] for pod in servers}
            return replaced and status["phase"] == "Training" and status["progress"].get("recoveries", 0) > before

        job.until(f"it went back to a checkpoint after the loss of ps-{number}", recovered, seconds=600)


def lose_workers(job: Job, place: Place) -> None:
    """Deletes all workers, after an edit with which no node can take their successors."""
    nowhere = json.dumps({"spec": {"worker": NOWHERE}})
    kubectl("patch", "tj", job.name, "-n", place.namespace, "--type=merge", "-p", nowhere)
    for pod in job.running("worker"):
        delete_pod(pod)


@pytest.mark.parametrize(
    ("alert", "job"),
    [
        ("EmberscaleWorkerStraggles", "straggling"),
        ("EmberscaleJobStuck", "unplaced"),
        ("EmberscaleJobFailed", "late"),
        ("EmberscaleRecoversOften", "stalled"),
        ("EmberscaleTrainingStalled", "stalled"),
        ("EmberscaleParameterServersSaturated", "starved"),
    ],
)
def test_an_alert_is_raised_by_what_it_is_for(
    alert: str, job: str, broken: Callable[[str], None], prometheus: Prometheus
) -> None:
    def raised() -> str | None:
        broken(job)
        return prometheus.alert(alert, BROKEN, job)

    eventually(raised, f"{alert} of {job}", seconds=420)


@pytest.mark.files
def test_each_alert_is_broken_on_purpose_or_says_why_not() -> None:
    (mark,) = test_an_alert_is_raised_by_what_it_is_for.pytestmark  # type: ignore[attr-defined]  # set by the decorator
    assert sorted([*(alert for alert, _ in mark.args[1]), *OF_PROMTOOL_ALONE]) == sorted(
        alert["alert"] for alert in alerts()
    )


@pytest.mark.files
def test_prometheus_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("NOT RUN: there is no `promtool` on the path (Debian's package prometheus)")
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.files
def test_the_cluster_dashboard_counts_what_ended_before_an_upgrade(tmp_path: Path) -> None:
    """One operator sees two jobs complete; the next sees a third, and the first failure that was ever counted."""
    before, after = 'instance="10.0.0.1:9090"', 'instance="10.0.0.2:9090"'
    series = {
        f'emberscale_jobs_ended_total{{reason="Completed", {before}}}': "0x20 1x20 2x19",
        f'emberscale_jobs_ended_total{{reason="Completed", {after}}}': "_x60 0x20 1x20",
        f'emberscale_jobs_ended_total{{reason="DeadlineExceeded", {after}}}': "_x80 1x20",
    }
    asked = {str(query): query.expression.replace("$__range", "30m") for query in queries()}
    answers = {
        f"round({asked['cluster: Ended jobs by reason']})": [
            {"labels": '{reason="Completed"}', "value": 3},
            {"labels": '{reason="DeadlineExceeded"}', "value": 1},
        ],
        f"round({asked['cluster: Completion rate']}, 0.01)": [{"labels": "{}", "value": 0.75}],
    }
    promtool_finds(answers, series, "24m", "15s", tmp_path)


@pytest.mark.files
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


@pytest.mark.files
def test_each_panel_says_what_it_shows() -> None:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            assert panel["type"] == "row" or panel["description"], f"{file.name}: {panel['title']}"
