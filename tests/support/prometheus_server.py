"""A real Prometheus, and the queries of the dashboards for it."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from api_objects import get
from cluster import run
from installation import RELEASE, SYSTEM

CHART = Path(__file__).resolve().parents[2] / "charts" / "emberscale"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = CHART / "files" / "rules.yaml"
_DISCOVERY_SECONDS = 2.0
_SCRAPE = "5s"
"""Also the time in which a pod has to answer: on a busy machine many take more than a second."""
NAMESPACE, JOB = "dashboards", "seen"
VARIABLES = {"$__rate_interval": "20s", "$__range": "5m"}
FLASH_METRICS = "emberscale_flash_checkpoint_"


@dataclass(frozen=True)
class Query:
    """One target of a panel."""

    dashboard: str
    panel: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}"

    @property
    def concrete(self) -> str:
        """The expression with Grafana's variables filled in."""
        return self.of(NAMESPACE, JOB)

    def of(self, namespace: str, job: str) -> str:
        """Returns the expression for another job."""
        expression = self.expression
        for name, value in {**VARIABLES, "$namespace": namespace, "$job": job}.items():
            expression = expression.replace(name, value)
        return expression


def flash_queries() -> list[Query]:
    """Returns the targets that show something only with a Redis for flash checkpoints."""
    return [query for query in queries() if FLASH_METRICS in query.expression]


def chart_monitors() -> list[dict[str, Any]]:
    """Renders the chart's monitors as they are installed."""
    text = run(
        *("helm", "template", RELEASE, str(CHART), "-n", SYSTEM, "--show-only=templates/monitors.yaml"),
        *("--kube-version=1.33", "--set=metrics.serviceMonitor.enabled=true"),
    )
    return [document for document in yaml.safe_load_all(text) if document]


def queries() -> list[Query]:
    """Returns all targets of all panels."""
    return [
        Query(file.stem, panel["title"], target["expr"])
        for file in DASHBOARDS
        for panel in json.loads(file.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


@dataclass(frozen=True)
class Prometheus:
    """A server on this machine."""

    url: str

    def ask(self, query: str) -> list[Any]:
        """Returns the result of an instant query."""
        parameters = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{parameters}", timeout=10) as reply:
                return list(json.load(reply)["data"]["result"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")

    def alert(self, name: str, namespace: str, job: str) -> str | None:
        """Returns the state of an alert about a job, pending or firing, or None."""
        found = self.ask(f'ALERTS{{alertname="{name}", namespace="{namespace}", training_job="{job}"}}')
        return str(found[0]["metric"]["alertstate"]) if found else None

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                return True
        except OSError:
            return False


def rules() -> list[dict[str, Any]]:
    """The rules of the chart."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """The alerting rules of the chart."""
    return [rule for rule in rules() if "alert" in rule]


def promtool_finds(
    answers: Mapping[str, list[dict[str, Any]]],
    series: Mapping[str, str],
    at: str,
    interval: str,
    folder: Path,
    alert: str = "",
) -> None:
    """Asserts with promtool that queries, the keys of `answers`, have their answers at a time.

    `series` have one value per `interval`. Of all alerts, only `alert` is evaluated; the others take most of the time.
    """
    if shutil.which("promtool") is None:
        pytest.skip("NOT RUN: there is no `promtool` on the path (Debian's package prometheus)")
    asked = [{"expr": query, "eval_time": at, "exp_samples": answer} for query, answer in answers.items()]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": interval, "input_series": given, "promql_expr_test": asked}
    needed = [rule for rule in rules() if rule.get("alert", alert) == alert]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": needed}]}))
    case = {"rule_files": [str(folder / "rules.yaml")], "evaluation_interval": "15s", "tests": [test]}
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    checked = subprocess.run(
        ["promtool", "test", "rules", str(folder / "case.yaml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


SCRAPE_LIMITS = ("sampleLimit", "labelLimit", "labelValueLengthLimit")
"""Of a pod that has the label of a job: whoever made it, Prometheus takes no more from it."""


def scrape_configs(monitors: Sequence[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """Returns the scrape configs that the Prometheus operator would make of the chart's monitors.

    Only the features that the chart uses are covered. `namespace` is the release's, where ServiceMonitors look; targets
    are those of `_targets`.
    """
    (jobs,) = (monitor["spec"] for monitor in monitors if monitor["kind"] == "PodMonitor")
    (endpoint,) = jobs["podMetricsEndpoints"]
    (service,) = (
        monitor["spec"]
        for monitor in monitors
        if monitor["kind"] == "ServiceMonitor" and monitor["metadata"]["name"].endswith("-operator")
    )
    (served,) = service["endpoints"]
    component = service["selector"]["matchLabels"]["app.kubernetes.io/component"]
    return [
        {
            "job_name": "jobs",
            **_snake_case({limit: jobs[limit] for limit in SCRAPE_LIMITS}),
            "relabel_configs": [
                _keep("__meta_kubernetes_pod_labelpresent_emberscale_io_job_name", "true"),
                _keep("__meta_kubernetes_pod_container_port_name", endpoint["port"]),
                *(_snake_case(relabeling) for relabeling in endpoint["relabelings"]),
            ],
        },
        {
            "job_name": component,
            "honor_labels": served.get("honorLabels", False),
            "relabel_configs": [
                _keep("__meta_kubernetes_namespace", namespace),
                _keep("__meta_kubernetes_pod_label_app_kubernetes_io_component", component),
                _keep("__meta_kubernetes_pod_container_port_name", served["port"]),
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            ],
        },
    ]


def _targets() -> list[dict[str, Any]]:
    """Returns each port of each running pod, with the labels of Kubernetes discovery, which Debian's build lacks."""
    found = []
    for pod in get("pods", namespace=""):
        if pod["status"].get("phase") != "Running" or "podIP" not in pod["status"]:
            continue
        labels = {"__meta_kubernetes_namespace": pod["metadata"]["namespace"]}
        for name, value in (pod["metadata"].get("labels") or {}).items():
            safe = re.sub("[^a-zA-Z0-9]", "_", name)
            labels[f"__meta_kubernetes_pod_label_{safe}"] = value
            labels[f"__meta_kubernetes_pod_labelpresent_{safe}"] = "true"
        for port in (port for container in pod["spec"]["containers"] for port in container.get("ports", ())):
            named = {**labels, "__meta_kubernetes_pod_container_port_name": port.get("name", "")}
            found.append({"targets": [f"{pod['status']['podIP']}:{port['containerPort']}"], "labels": named})
    return found


@contextmanager
def _discovery(file: Path) -> Iterator[None]:
    """Keeps a file of targets up to date while the body runs."""
    ends = threading.Event()

    def write() -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(_targets()))
        part.rename(file)

    def keep() -> None:
        while not ends.wait(_DISCOVERY_SECONDS):
            with contextlib.suppress(ApiException, HTTPError):  # the next look may be answered
                write()

    write()
    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _keep(label: str, value: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [label], "regex": value}


def _snake_case(relabeling: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", key): value for key, value in relabeling.items()}


@contextmanager
def prometheus_that_scrapes(configs: Sequence[dict[str, Any]], folder: Path) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes the cluster's pods every five seconds, with the chart's rules.

    Its rates are over one minute instead of five, so that tests wait less; promtool tests the rules unchanged.
    """
    if shutil.which("prometheus") is None:
        pytest.skip("NOT RUN: there is no `prometheus` on the path (Debian's package prometheus)")
    config = {
        "global": {"scrape_interval": _SCRAPE, "scrape_timeout": _SCRAPE, "evaluation_interval": "1s"},
        "rule_files": [str(folder / RULES.name)],
        "scrape_configs": [
            {**config, "file_sd_configs": [{"files": [str(folder / "pods.json")], "refresh_interval": "1s"}]}
            for config in configs
        ],
    }
    (folder / RULES.name).write_text(RULES.read_text().replace("[5m]", "[1m]"))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with _discovery(folder / "pods.json"), (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait(30)
