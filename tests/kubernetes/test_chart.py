"""The chart and the plain manifests, as files: no cluster is needed, only helm."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "emberscale"


@pytest.fixture(autouse=True)
def _helm() -> None:
    if shutil.which("helm") is None:
        pytest.skip("NOT RUN: there is no `helm` on the path")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def render(*settings: str) -> list[dict[str, Any]]:
    """The chart's objects under settings, each `path=value`."""
    given = [argument for setting in settings for argument in ("--set", setting)]
    done = helm("template", "release", str(CHART), "--kube-version", "1.33", "--namespace", "system", *given)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def pod_specs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    deployments = [document["spec"]["template"]["spec"] for document in of_kind(documents, "Deployment")]
    return deployments + [document["spec"] for document in of_kind(documents, "Pod")]


def test_lint_is_clean() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(["deploy/render.sh", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("operator.replica=2", "'replica' not allowed"),
        ("operator.replicas=-1", "minimum"),
        ("operator.logLevel=loud", "one of"),
        ("operator.resync=30", "resync"),
        ("image.pullPolicy=Sometimes", "one of"),
        ("redis.external.url=http://redis", "url"),
        ("redis.enabled=false", "give redis.external.url or redis.external.existingSecret"),
        ("serviceAccount.create=false", "serviceAccount.name is needed"),
        ("metrics.serviceMonitor.interval=often", "interval"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(setting: str, said: str) -> None:
    done = helm("template", "release", str(CHART), "--kube-version", "1.33", "--set", setting)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize("settings", [(), ("operator.watchNamespaces={one,two}",)], ids=["cluster", "namespaced"])
def test_no_role_says_star(settings: tuple[str, ...]) -> None:
    documents = render(*settings)
    roles = of_kind(documents, "ClusterRole") + of_kind(documents, "Role")
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], role["metadata"]["name"]


def test_a_namespaced_operator_has_no_cluster_role() -> None:
    documents = render("operator.watchNamespaces={one,two}", "rbac.aggregate=false")
    assert of_kind(documents, "ClusterRole") == []
    assert of_kind(documents, "ClusterRoleBinding") == []
    assert {role["metadata"]["namespace"] for role in of_kind(documents, "Role")} == {"one", "two", "system"}


def test_every_pod_is_restricted() -> None:
    specs = pod_specs(render())
    assert len(specs) == 3
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_only_the_operator_has_a_token() -> None:
    with_token = [spec for spec in pod_specs(render()) if spec["automountServiceAccountToken"]]
    assert [spec["containers"][0]["name"] for spec in with_token] == ["operator"]


def test_the_crd_stays_unless_told_otherwise() -> None:
    (kept,) = of_kind(render(), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (dropped,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in dropped["metadata"]
    assert of_kind(render("crds.enabled=false"), "CustomResourceDefinition") == []


def test_a_redis_of_ones_own_replaces_the_bundled_one() -> None:
    documents = render("redis.enabled=false", "redis.external.url=redis://:pw@redis.example:6379/0")
    assert len(of_kind(documents, "Deployment")) == 1
    (secret,) = of_kind(documents, "Secret")
    assert secret["stringData"] == {"url": "redis://:pw@redis.example:6379/0"}


def test_a_password_that_is_no_url_text_is_escaped_in_the_url() -> None:
    (secret,) = of_kind(render("redis.auth.password=p@ss/w:rd"), "Secret")
    assert secret["stringData"]["password"] == "p@ss/w:rd"
    assert ":p%40ss%2Fw%3Ard@release-emberscale-redis.system.svc" in secret["stringData"]["url"]


def test_dashboards_are_found_by_grafanas_sidecar() -> None:
    maps = of_kind(render(), "ConfigMap")
    assert {document["metadata"]["labels"]["grafana_dashboard"] for document in maps} == {"1"}
    assert len(maps) == len(list((CHART / "dashboards").glob("*.json")))


def test_labels_of_ones_own_are_on_every_object() -> None:
    for document in render("commonLabels.team=ads", "networkPolicy.enabled=true", "podDisruptionBudget.enabled=true"):
        assert document["metadata"]["labels"]["team"] == "ads", (document["kind"], document["metadata"]["name"])


def test_monitors_and_rules_come_on_request_only() -> None:
    extra = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not extra & {document["kind"] for document in render()}
    asked = render("metrics.serviceMonitor.enabled=true", "metrics.prometheusRule.enabled=true")
    assert extra <= {document["kind"] for document in asked}
