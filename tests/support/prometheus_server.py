"""A real Prometheus, and the queries of the dashboards that are asked of it."""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "emberscale"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = CHART / "files" / "rules.yaml"
NAMESPACE, JOB = "dashboards", "seen"
VARIABLES = {"$__rate_interval": "20s", "$__range": "5m", "$namespace": NAMESPACE, "$job": JOB}


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
        expression = self.expression
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        return expression


def queries() -> list[Query]:
    """All targets of all panels."""
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
        """The result of an instant query."""
        parameters = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{parameters}", timeout=10) as reply:
                return list(json.load(reply)["data"]["result"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                return True
        except OSError:
            return False


@contextmanager
def prometheus_that_scrapes(targets: Sequence[dict[str, Any]], folder: Path) -> Iterator[Prometheus]:
    """Runs a Prometheus over static targets, once a second, with the chart's rules."""
    if shutil.which("prometheus") is None:
        pytest.skip("NOT RUN: there is no `prometheus` on the path (Debian's package prometheus)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "jobs", "static_configs": list(targets)}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with (folder / "prometheus.log").open("w") as log:
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
