"""What the operator reports when it cannot do its work, and what a job reports when something else blocks it."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from api_objects import get
from cluster import IMAGE, Place, apply, eventually, kubectl, manifest, setting, submit
from installation import SYSTEM
from outside_operator import HEALTH_PORT, OutsideOperator
from recording_proxy import recording_proxy

pytestmark = pytest.mark.timeout(900)

LEASE = "emberscale-outside"


def health_is(status: int, operator: OutsideOperator) -> str | None:
    """Returns the operator's health message if the response has this status, or None."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/healthz", timeout=5) as answer:
            found, said = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        found, said = error.code, error.read().decode()
    except OSError as error:
        pytest.fail(f"{error}\n{operator.last_words()}")
    return str(said) if found == status else None


def pod_of_no_job(name: str, place: Place) -> dict[str, Any]:
    """A pod that the operator watches but does not act on."""
    container = {"name": "main", "image": setting(IMAGE), "imagePullPolicy": "IfNotPresent", "command": ["true"]}
    metadata = {"name": name, "namespace": place.namespace, "labels": {"emberscale.io/job-name": "none"}}
    spec = {"containers": [container], "restartPolicy": "Never", "nodeSelector": {"no-node": "has-this"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_health_fails_when_a_watch_is_dead(place: Place, tmp_path: Path) -> None:
    rights = ["--clusterrole=cluster-admin", f"--serviceaccount={SYSTEM}:emberscale-operator"]
    kubectl("create", "rolebinding", "outside", "-n", SYSTEM, *rights)
    token = kubectl("create", "token", "emberscale-operator", "-n", SYSTEM, "--duration=1h").strip()
    try:
        with recording_proxy(token) as proxy:
            operator = OutsideOperator(proxy, tmp_path, place.namespace, LEASE, EMBERSCALE_RESYNC="1s")
            operator.start()
            try:
                eventually(lambda: "pods" in proxy.watched or None, "it watches pods", seconds=180)
                apply(pod_of_no_job("seen", place), namespace=place.namespace)
                assert health_is(200, operator)
                proxy.silent.add("pods")
                apply(pod_of_no_job("missed", place), namespace=place.namespace)
                said = eventually(lambda: health_is(503, operator), "health fails", seconds=180)
                assert f"the watch of pods in {place.namespace} has missed a change for" in said
            finally:
                operator.ends()
    finally:
        kubectl("delete", "rolebinding", "outside", "-n", SYSTEM, "--ignore-not-found")
        kubectl("delete", "lease", LEASE, "-n", SYSTEM, "--ignore-not-found")


def test_a_webhook_that_fails_shows_in_the_condition_until_it_is_gone(place: Place) -> None:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    webhook = {
        "name": "broken.example.com",
        "clientConfig": {"service": {"name": "nothing", "namespace": place.namespace, "port": 443}},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "emberscale-e2e-broken"},
        "webhooks": [webhook],
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(configuration))
    try:
        data = {"train": ["/shared/criteo/evaluation.tsv"]}
        job = submit(manifest("held-up", place, data=data), place)

        def blocked() -> Any:
            condition = job.condition("Progressing")
            return condition if condition and condition["status"] == "False" else None

        condition = eventually(blocked, "the condition says why", seconds=180)
        assert condition["reason"] == "InternalError", condition
        assert "broken.example.com" in condition["message"], condition
        assert get("pods", namespace=place.namespace) == []
    finally:
        kubectl("delete", "validatingwebhookconfiguration", "emberscale-e2e-broken", "--ignore-not-found")
    job.wait_complete()


@pytest.mark.after_together
def test_the_operator_has_met_nothing_unexpected(installed: str) -> None:
    """Covers all jobs that have run together; tests that run alone restart the operator."""
    metrics = kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/services/emberscale-operator:9090/proxy/metrics")
    assert "emberscale_operator_defects_total 0.0" in metrics
    assert "# TYPE emberscale_job_phase gauge" in metrics
