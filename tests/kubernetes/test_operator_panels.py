"""The panels of what the operator serves, asked of a Prometheus that scraped it after a job had completed."""

from pathlib import Path
from typing import Any

import pytest

from cluster import Place, eventually, get, manifest, submit
from installation import SYSTEM
from prometheus_server import prometheus_that_scrapes, queries

pytestmark = pytest.mark.timeout(600)


def test_panels_of_the_operator_show_something(place: Place, tmp_path: Path) -> None:
    submit(manifest("counted", place), place).wait_complete()
    address = get("service", "emberscale-operator", SYSTEM)["spec"]["clusterIP"]
    target = {"targets": [f"{address}:9090"], "labels": {"component": "operator"}}
    asked = [query for query in queries() if query.is_of_the_operator]
    assert asked
    with prometheus_that_scrapes([target], tmp_path) as prometheus:
        eventually("Prometheus is up", lambda: prometheus.is_up() or None, seconds=60)
        for query in asked:

            def shown(expression: str = query.concrete) -> list[Any]:
                return [entry for entry in prometheus.ask(expression) if entry["value"][1] != "NaN"]

            eventually(f"{query}: {query.concrete}", shown, seconds=60)
