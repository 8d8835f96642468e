"""The operator dies at every call that changes something in the cluster, and dies while another one stands by."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    EVALUATION_RECORDS,
    Place,
    assert_exact,
    audit,
    eventually,
    kubectl,
    manifest,
    submit,
)
from faults import is_live
from installation import OPERATOR, SYSTEM, helm_install
from outside_operator import OutsideOperator
from recording_proxy import recording_proxy
from status_watch import slot_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone]

MOST_DEATHS = 6
"""Deaths at one kind of call."""
WANTED = {"master-0", "ps-0", "ps-1", "worker-0", "worker-1"}


def test_of_two_operators_one_acts_on_its_namespaces_and_the_other_takes_over(
    installed: str, place: Place, shared_folder: str
) -> None:
    """Jobs of other namespaces are left alone, before and after, until the installation watches these, too."""

    def holder() -> str:
        return str(get("lease", "emberscale-operator", SYSTEM)["spec"].get("holderIdentity") or "")

    def live() -> dict[str, Any]:
        return {
            pod["metadata"]["name"]: pod for pod in get("pods", namespace=SYSTEM, selector=OPERATOR) if is_live(pod)
        }

    data = {"train": ["/shared/criteo/evaluation.tsv"]}
    elsewhere = Place("elsewhere", shared_folder)
    kubectl("create", "namespace", elsewhere.namespace)
    helm_install("--set", f"operator.watchNamespaces={{{place.namespace}}}", "--set", "operator.replicas=2")
    try:
        first = eventually(lambda: holder() if holder() in live() else None, "one of the two leads", seconds=180)
        assert len(live()) == 2
        ignored = submit(manifest("ignored", elsewhere, data=data), elsewhere)
        job = submit(manifest("handed-over", place, data=data), place)
        eventually(lambda: len(job.pods()) >= 3 or None, "its pods", seconds=180)
        kubectl("delete", "pod", first, "-n", SYSTEM, "--grace-period=0", "--force")
        eventually(lambda: (holder() in live() and holder() != first) or None, "the other leads", seconds=180)
        job.wait_complete()
        names = [event["message"] for event in job.events() if event["reason"].startswith("Created")]
        assert len(names) == len(set(names)), names
        assert_exact(job, place, EVALUATION_RECORDS)
        assert ignored.pods() == []
        assert "status" not in ignored.read()
    finally:
        helm_install()
    ignored.wait_complete()
    kubectl("delete", "namespace", elsewhere.namespace, "--wait=false")


class OperatorDiedError(Exception):
    """Raised in the proxy to end the connection: the operator is dead, so nobody waits for the answer."""


@pytest.fixture
def no_operator(installed: str) -> Iterator[None]:
    """Stops the chart's own operator during the test."""
    deployment = "deployment/emberscale-operator"
    kubectl("scale", deployment, "-n", SYSTEM, "--replicas=0")
    eventually(lambda: not get("pods", namespace=SYSTEM, selector=OPERATOR), "it is gone", seconds=180)
    yield
    kubectl("scale", deployment, "-n", SYSTEM, "--replicas=1")
    kubectl("rollout", "status", deployment, "-n", SYSTEM, "--timeout=120s", timeout=150)


def kind_of(method: str, path: str) -> str:
    """Returns the method and path of a call, without the name of the object."""
    parts = path.split("/namespaces/")[-1].split("/")[1:]
    return " ".join(
        [method, *(re.sub(r"^.*$", "", part) if number == 1 else part for number, part in enumerate(parts))]
    )


def test_killed_at_every_call_it_makes_nothing_twice_and_leaves_nothing(
    no_operator: None, place: Place, tmp_path: Path
) -> None:
    deaths: Counter[str] = Counter()
    # with the rights of the operator that the chart installs
    token = kubectl("create", "token", "emberscale-operator", "-n", SYSTEM, "--duration=1h").strip()
    with recording_proxy(token) as proxy:
        operator = OutsideOperator(proxy, tmp_path, place.namespace)

        def dies(method: str, path: str, status: int) -> None:
            """Kills after a successful call, at most MOST_DEATHS times per kind: a status may be written for ever."""
            if status >= 400 or deaths[kind_of(method, path)] >= MOST_DEATHS:
                return
            deaths[kind_of(method, path)] += 1
            operator.kill()
            raise OperatorDiedError(path)

        def before(method: str, path: str) -> None:
            """Kills before the first call of each kind, which is therefore never made."""
            if f"not {kind_of(method, path)}" not in deaths:
                deaths[f"not {kind_of(method, path)}"] += 1
                operator.kill()
                raise OperatorDiedError(path)

        proxy.before, proxy.after = before, dies
        job = submit(manifest("survivor", place, epochs=ENDLESS, replicas=2), place)
        seen: Counter[str] = Counter()

        def complete() -> bool:
            pods = [pod for pod in job.pods() if is_live(pod)]
            for slot, count in Counter(slot_of(pod) for pod in pods).items():
                seen[slot] = max(seen[slot], count)
            return {slot_of(pod) for pod in pods} == WANTED

        def until(what: str, holds: Callable[[], bool]) -> None:
            """Waits, and restarts the operator whenever it has died."""

            def look() -> bool | None:
                if operator.dead:
                    operator.start()
                return holds() or None

            eventually(look, f"{what}: {deaths}", seconds=600, every=0.5)

        operator.start()
        until("all pods", complete)
        assert seen == Counter(dict.fromkeys(WANTED, 1))

        pods = job.pods()
        until("the job trains", lambda: job.samples() > 0)
        kubectl("patch", "tj", job.name, "-n", job.namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        until("the job rests", lambda: job.phase() == "Suspended")
        counted = audit(job, place)
        # the status may lag: the operator may have died between the last samples and the master's end
        assert counted["once"] >= job.samples() > 0
        assert (counted["repeated"], counted["contradictions"]) == (0, [])
        told = Counter(event["message"].partition(",")[0] for event in job.events())
        for pod in pods:
            assert told[f"created pod {pod['metadata']['name']}"] == 1, (told, deaths)
        assert sum(event["reason"] == "SuspendedJob" for event in job.events()) == 1, (told, deaths)
        kubectl("delete", "tj", job.name, "-n", place.namespace, "--wait=true", timeout=120)
        if not operator.dead:
            operator.ends()
    print(dict(deaths))  # noqa: T201
    eventually(
        lambda: (
            not kubectl(
                "get", "pods,services,secrets,configmaps", "-n", place.namespace, "-l", job.selector, "-o", "name"
            )
        ),
        "nothing of the job is left",
        seconds=180,
    )
    for kind in ("POST pods", "POST secrets", "POST services", "POST configmaps", "PATCH trainingjobs  status"):
        assert deaths[kind] >= 1, deaths
    assert deaths["POST pods"] >= len(WANTED), deaths
    assert deaths["POST events"] >= len(WANTED), deaths
    orphans: list[Any] = [pod for pod in get("pods", namespace=place.namespace) if is_live(pod)]
    assert orphans == []
