"""The chart and the plain manifests as files: the tests need helm, but no cluster."""

import base64
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from emberscale_api.certificates import read_certificates
from emberscale_brain.service.settings import load_settings
from prometheus_server import SCRAPE_LIMITS

pytestmark = pytest.mark.files

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "emberscale"
FLASH_REDIS = "release-emberscale-flash-redis"


@pytest.fixture(autouse=True)
def _helm() -> None:
    if shutil.which("helm") is None:
        pytest.skip("NOT RUN: there is no `helm` on the path")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def render(*settings: str) -> list[dict[str, Any]]:
    """Renders the chart's objects with the given settings, each `path=value`."""
    given = [argument for setting in settings for argument in ("--set", setting)]
    done = helm("template", "release", str(CHART), "--kube-version", "1.33", "--namespace", "system", *given)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def pod_specs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = of_kind(documents, "Deployment") + of_kind(documents, "StatefulSet")
    return [document["spec"]["template"]["spec"] for document in kinds] + [
        document["spec"] for document in of_kind(documents, "Pod")
    ]


def test_lint_is_clean() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_under_gitops_the_chart_as_documented_makes_no_secrets_and_renders_the_same_each_time(tmp_path: Path) -> None:
    """A render without a cluster finds no existing Secret to keep, so each sync would bring new passwords."""
    _, _, told = (ROOT / "docs" / "kubernetes.md").read_text().partition("### GitOps")
    values = tmp_path / "values.yaml"
    values.write_text(told.partition("```yaml\n")[2].partition("```")[0])

    def rendered(*more: str) -> str:
        done = helm("template", "release", str(CHART), "--kube-version", "1.33", "--set", "tls.enabled=true", *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert rendered() != rendered(), "what the documentation is for"
    assert rendered("-f", str(values)) == rendered("-f", str(values))
    assert "kind: Secret" not in rendered("-f", str(values))


def test_a_redis_that_accepts_connections_but_answers_nobody_is_started_anew() -> None:
    (redis,) = [
        container for spec in pod_specs(render()) for container in spec["containers"] if container["name"] == "redis"
    ]
    alive = redis["livenessProbe"]
    assert alive["exec"]["command"] == ["redis-cli", "-e", "ping"]
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 60, "a slow disk is no reason"
    environment = {variable["name"]: variable for variable in redis["env"]}
    assert "secretKeyRef" in environment["REDISCLI_AUTH"]["valueFrom"], "no argument shows the password"


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(["deploy/render.sh", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plain_manifests_image_is_that_of_the_jobs() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("NOT RUN: there is no `kubectl` on the path")
    done = subprocess.run(["kubectl", "kustomize", "deploy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    (container,) = (
        spec["containers"][0] for spec in pod_specs(documents) if spec["containers"][0]["name"] == "operator"
    )
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["EMBERSCALE_IMAGE"] == container["image"] == "emberscale:0.1.0"
    assert values["EMBERSCALE_IMAGE_PULL_POLICY"] == "IfNotPresent"


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
        ("redis.flash.enabled=true,redis.flash.url=redis://rows", "leave redis.flash.url"),
        ("serviceAccount.create=false", "serviceAccount.name is needed"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("brain.planner.cpuCoreHour=0", "cpuCoreHour"),
        ("brain.cluster.cpu=many", "cpu"),
        ("brain.planning.interval=60", "interval"),
        ("brain.bounds.maxWorker=3", "'maxWorker' not allowed"),
        ("tls.enable=true", "'enable' not allowed"),
        ("tls.enabled=perhaps", "boolean"),
        ("postgresql.external.url=mysql://host", "url"),
        ("postgresql.enabled=false", "give postgresql.external.url or postgresql.external.existingSecret"),
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
    assert len(specs) == 5
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


def test_no_password_is_an_argument_of_a_process() -> None:
    """Anyone who can list a node's processes sees their arguments."""
    given = {
        "redis.auth.password": "password-of-redis",
        "redis.flash.auth.password": "password-of-flash",
        "postgresql.auth.password": "password-of-postgresql",
        "brain.auth.token": "token-of-the-brain",
    }
    documents = render("tls.enabled=true", "redis.flash.enabled=true", *map("=".join, given.items()))
    secrets = str([one["stringData"] for one in of_kind(documents, "Secret") if "stringData" in one])
    assert not [value for value in given.values() if value not in secrets]
    with_secrets = []
    for spec in pod_specs(documents):
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            secret = {entry["name"] for entry in container.get("env", ()) if "secretKeyRef" in str(entry)}
            commands = "\n".join(commands_of(container))
            assert not [value for value in given.values() if value in commands], container["name"]
            assert not [name for name in secret if shows(commands, name)], container["name"]
            with_secrets += [container["name"]] if secret else []
    assert sorted(with_secrets) == ["operator", "postgresql", "redis", "redis", "test"]


def commands_of(part: Any) -> list[str]:
    """Returns the words of every command in a container: its own, and those of probes and hooks."""
    if isinstance(part, list):
        return [word for one in part for word in commands_of(one)]
    if not isinstance(part, dict):
        return []
    own = [word for key in ("command", "args") for word in part.get(key, ())]
    return own + [word for key, value in part.items() if key not in ("command", "args") for word in commands_of(value)]


def shows(commands: str, variable: str) -> bool:
    """Whether commands hand a variable to a process; `printf` of a shell starts none."""
    builtin = re.sub(rf'\bprintf %s "\${variable}"', "", commands)
    return re.search(rf"\$(?:\({variable}\)|\{{{variable}\b|{variable}\b)", builtin) is not None


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("exec server --pass $(PASSWORD)", True),
        ('exec server --pass "$PASSWORD"', True),
        ("exec server --pass ${PASSWORD:-none}", True),
        ('hash=$(printf %s "$PASSWORD" | sha256sum)', False),
        ("exec server --pass-file $PASSWORD_FILE", False),
    ],
)
def test_a_shown_password_is_told_from_one_that_stays_in_the_shell(command: str, shown: bool) -> None:
    assert shows(command, "PASSWORD") is shown


def admits(policy: dict[str, Any], pod: dict[str, str], namespace: dict[str, str]) -> bool:
    """Whether a policy admits a pod with these labels from a namespace with those labels."""
    return any(
        matches(peer.get("podSelector", {}), pod)
        and (
            matches(peer["namespaceSelector"], namespace)
            if "namespaceSelector" in peer
            else namespace["kubernetes.io/metadata.name"] == policy["metadata"]["namespace"]
        )
        for rule in policy["spec"]["ingress"]
        for peer in rule.get("from", ())
    )


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))


@pytest.mark.parametrize("component", ["emberscale-redis", "flash-redis", "brain", "postgresql"])
def test_labels_of_a_pod_open_nothing_from_another_namespace(component: str) -> None:
    """Anyone who may create a pod chooses its labels; only administrators set the labels of namespaces."""
    documents = render(
        "networkPolicy.enabled=true", "operator.watchNamespaces={ads,search}", "redis.flash.enabled=true"
    )
    policies = of_kind(documents, "NetworkPolicy")
    (policy,) = (one for one in policies if one["metadata"]["name"].endswith(component))
    mine = [spec["metadata"]["labels"] for spec in documents if spec["kind"] in ("Deployment", "StatefulSet", "Pod")]
    disguises = [{"emberscale.io/role": "master", "emberscale.io/job-name": "job"}, *mine, {}]
    reached = {
        (name, number): admits(policy, labels, {"kubernetes.io/metadata.name": name, "team": "ads"})
        for name in ("ads", "foreign")
        for number, labels in enumerate(disguises)
    }
    assert not [who for who, reaches in reached.items() if who[0] == "foreign" and reaches]
    assert {reaches for who, reaches in reached.items() if who[0] == "ads"} == {component != "postgresql"}


def test_the_operator_may_tell_the_brain_which_jobs_are_gone() -> None:
    documents = render("networkPolicy.enabled=true", "operator.watchNamespaces={ads}")
    (policy,) = (one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"].endswith("brain"))
    templates = [one["spec"]["template"] for one in of_kind(documents, "Deployment")]
    (operator,) = (one for one in templates if one["spec"]["containers"][0]["name"] == "operator")
    assert admits(policy, operator["metadata"]["labels"], {"kubernetes.io/metadata.name": "system"})


def test_only_its_namespace_and_the_operator_reach_a_job_and_prometheus_its_metrics() -> None:
    documents = render(
        "networkPolicy.enabled=true",
        "operator.watchNamespaces={ads,search}",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",
    )
    policies = [one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"].endswith("jobs")]
    assert [one["metadata"]["namespace"] for one in policies] == ["ads", "search"]
    (operator,) = (
        one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(documents, "Deployment")
        if one["metadata"]["name"].endswith("operator")
    )
    member = {"emberscale.io/role": "worker", "emberscale.io/job-name": "job"}
    places = ("ads", "search", "system", "monitoring", "foreign")
    reached = {
        (place, number)
        for place in places
        for number, labels in enumerate((member, operator))
        if admits(policies[0], labels, {"kubernetes.io/metadata.name": place, "team": place})
    }
    assert reached == {("ads", 0), ("ads", 1), ("system", 1), ("monitoring", 0), ("monitoring", 1)}
    (limited,) = (rule for rule in policies[0]["spec"]["ingress"] if "ports" in rule)
    assert limited["ports"] == [{"port": "metrics"}]
    assert limited["from"] == [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]


def test_a_redis_of_ones_own_replaces_the_bundled_one() -> None:
    documents = render("redis.enabled=false", "redis.external.url=redis://:pw@redis.example:6379/0")
    assert "release-emberscale-redis" not in {document["metadata"]["name"] for document in documents}
    (secret,) = (one for one in of_kind(documents, "Secret") if one["metadata"]["name"].endswith("redis-url"))
    assert secret["stringData"] == {"url": "redis://:pw@redis.example:6379/0"}


def test_there_is_a_redis_for_flash_checkpoints_on_request_only() -> None:
    def named(documents: list[dict[str, Any]]) -> set[str]:
        return {document["kind"] for document in documents if document["metadata"]["name"] == FLASH_REDIS}

    assert named(render()) == set()
    documents = render("redis.flash.enabled=true", "redis.flash.resources.limits.memory=3Gi")
    assert named(documents) == {"Secret", "Service", "Deployment"}
    (redis,) = (one["spec"]["template"]["spec"] for one in of_kind(documents, "Deployment") if named([one]))
    (container,) = redis["containers"]
    assert container["resources"]["limits"]["memory"] == "3Gi"
    (started,) = container["args"]
    for option in ("--save ''", "--appendonly no", "--maxmemory-policy noeviction", "--maxmemory "):
        assert option in started
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert flash_url(documents)["secretKeyRef"] == {"name": FLASH_REDIS, "key": "url"}


def flash_url(documents: list[dict[str, Any]]) -> Any:
    """Returns where the operator finds the URL of the Redis for flash checkpoints."""
    (operator,) = (
        spec["containers"][0] for spec in pod_specs(documents) if spec["containers"][0]["name"] == "operator"
    )
    return next(one["valueFrom"] for one in operator["env"] if one["name"] == "EMBERSCALE_FLASH_REDIS_URL")


def test_a_redis_for_flash_checkpoints_of_ones_own_is_used_as_it_is() -> None:
    documents = render("redis.flash.url=redis://:pw@rows.example:6379/0")
    assert FLASH_REDIS not in {document["metadata"]["name"] for document in documents}
    assert flash_url(documents)["secretKeyRef"] == {"name": f"{FLASH_REDIS}-url", "key": "url"}
    mine = render("redis.flash.existingSecret=rows", "redis.flash.existingSecretKey=there")
    assert flash_url(mine)["secretKeyRef"] == {"name": "rows", "key": "there"}
    kept = render("redis.flash.enabled=true", "redis.flash.auth.existingSecret=rows")
    assert flash_url(kept)["secretKeyRef"] == {"name": "rows", "key": "url"}
    assert "Secret" not in {one["kind"] for one in kept if one["metadata"]["name"] == FLASH_REDIS}


def test_a_password_that_is_no_url_text_is_escaped_in_the_url() -> None:
    documents = render("redis.auth.password=p@ss/w:rd", "brain.enabled=false")
    (secret,) = of_kind(documents, "Secret")
    assert secret["stringData"]["password"] == "p@ss/w:rd"
    assert ":p%40ss%2Fw%3Ard@release-emberscale-redis.system.svc" in secret["stringData"]["url"]


def changed_pods(before: tuple[str, ...], after: tuple[str, ...]) -> set[str]:
    """Returns the components whose pods an upgrade from these settings to those would replace."""

    def templates(settings: tuple[str, ...]) -> dict[str, Any]:
        documents = render("redis.flash.enabled=true", *settings)
        sets = of_kind(documents, "Deployment") + of_kind(documents, "StatefulSet")
        return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"] for one in sets}

    old, new = templates(before), templates(after)
    assert old.keys() == new.keys()
    return {component for component in old if old[component] != new[component]}


@pytest.mark.parametrize(
    ("setting", "readers"),
    [
        ("redis.auth.password={}", {"redis", "operator"}),
        ("redis.flash.auth.password={}", {"flash-redis", "operator"}),
        ("brain.auth.token={}", {"brain", "operator"}),
        ("postgresql.auth.password={}", {"postgresql", "brain"}),
        ("redis.enabled=false,redis.external.url=redis://:{}@redis", {"operator"}),
        ("redis.flash.enabled=false,redis.flash.url=redis://:{}@redis", {"operator"}),
        ("postgresql.enabled=false,postgresql.external.url=postgresql://me:{}@host", {"brain"}),
    ],
)
def test_a_changed_secret_replaces_the_pods_on_both_sides_and_no_others(setting: str, readers: set[str]) -> None:
    one, other = (setting.format("one"),), (setting.format("other"),)
    assert changed_pods(one, other) == readers
    assert changed_pods(one, one) == set()


def test_no_pod_is_replaced_for_passwords_that_the_chart_makes_up_or_does_not_know() -> None:
    made_up = of_kind(render(), "Secret")
    assert made_up != of_kind(render(), "Secret"), "each render makes up others"
    assert changed_pods((), ()) == set()
    theirs = ("redis.auth.existingSecret=theirs", "brain.auth.existingSecret=theirs")
    unused = ("redis.auth.password=unused", "brain.auth.token=unused")
    assert changed_pods(theirs, (*theirs, *unused)) == set()


def test_dashboards_are_found_by_grafanas_sidecar() -> None:
    maps = of_kind(render("brain.enabled=false"), "ConfigMap")
    assert {document["metadata"]["labels"]["grafana_dashboard"] for document in maps} == {"1"}
    assert len(maps) == len(list((CHART / "dashboards").glob("*.json")))


def test_labels_of_ones_own_are_on_every_object() -> None:
    everything = (
        "networkPolicy.enabled=true",
        "podDisruptionBudget.enabled=true",
        "tls.enabled=true",
        "redis.flash.enabled=true",
        "metrics.serviceMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
    )
    elsewhere = (
        "redis.enabled=false",
        "redis.external.url=redis://redis.example:6379/0",
        "redis.flash.url=redis://rows.example:6379/0",
        "postgresql.enabled=false",
        "postgresql.external.url=postgresql://postgres.example:5432/history",
        "operator.watchNamespaces={one,two}",
    )
    for settings in (everything, elsewhere):
        documents = render("commonLabels.team=ads", *settings)
        bare = [one for one in documents if one["metadata"].get("labels", {}).get("team") != "ads"]
        assert not [(one["kind"], one["metadata"]["name"]) for one in bare]
    names = {(one["kind"], one["metadata"]["name"]) for one in render(*everything)}
    assert {("Deployment", FLASH_REDIS), ("Secret", "release-emberscale-brain-tls")} <= names


def test_monitors_and_rules_come_on_request_only() -> None:
    extra = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not extra & {document["kind"] for document in render()}
    asked = render("metrics.serviceMonitor.enabled=true", "metrics.prometheusRule.enabled=true")
    assert extra <= {document["kind"] for document in asked}


def test_prometheus_takes_only_so_much_from_a_pod_with_the_label_of_a_job() -> None:
    (monitor,) = of_kind(render("metrics.serviceMonitor.enabled=true"), "PodMonitor")
    assert all(monitor["spec"][limit] > 0 for limit in SCRAPE_LIMITS)


def test_the_rules_are_about_the_releases_own_operator_and_the_brain_that_there_is() -> None:
    def alerts(*settings: str) -> dict[str, str]:
        (rules,) = of_kind(render("metrics.prometheusRule.enabled=true", *settings), "PrometheusRule")
        written = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
        return {rule["alert"]: rule["expr"] for rule in written if "alert" in rule}

    told = alerts("brain.enabled=true")
    assert told["EmberscaleOperatorDown"] == 'absent(emberscale_redis_up{namespace="system"})'
    assert told["EmberscaleBrainDown"] == 'absent(emberscale_brain_jobs{namespace="system"})'
    of_the_brain = {"EmberscaleBrainDown", "EmberscaleBrainDatabaseDown", "EmberscalePlanningFails"}
    assert told.keys() - alerts("brain.enabled=false").keys() == of_the_brain


def test_the_brain_reads_the_settings_that_it_is_given(tmp_path: Path) -> None:
    documents = render(
        "brain.cluster.cpu=12",
        "brain.cluster.largestNodeCpu=4",
        "brain.quotas.ads.cpu=3",
        "brain.planner.rho=2",
        "brain.planning.interval=20s",
    )
    (settings,) = (one for one in of_kind(documents, "ConfigMap") if "brain.yaml" in one["data"])
    file = tmp_path / "brain.yaml"
    file.write_text(settings["data"]["brain.yaml"])
    read = load_settings(file)
    assert (read.cluster.cpu, read.cluster.largest_node_cpu) == ("12", "4")
    assert read.quotas["ads"].quota().cpu == 3
    assert (read.planner.rho, read.planning.interval) == (2, 20)


def test_the_operator_hands_on_the_brain_that_is_there_or_elsewhere() -> None:
    def given(*settings: str) -> dict[str, Any]:
        (operator,) = (spec for spec in pod_specs(render(*settings)) if spec["containers"][0]["name"] == "operator")
        variables = operator["containers"][0]["env"]
        return {entry["name"]: entry for entry in variables if entry["name"].startswith("EMBERSCALE_BRAIN")}

    bundled = given()
    assert bundled["EMBERSCALE_BRAIN_ADDRESS"]["value"] == "release-emberscale-brain.system.svc.cluster.local:50061"
    token = {"name": "release-emberscale-brain", "key": "token"}
    assert bundled["EMBERSCALE_BRAIN_TOKEN"]["valueFrom"]["secretKeyRef"] == token
    elsewhere = given("brain.enabled=false", "brain.external.address=brain:1", "brain.external.existingSecret=theirs")
    assert elsewhere["EMBERSCALE_BRAIN_ADDRESS"]["value"] == "brain:1"
    assert elsewhere["EMBERSCALE_BRAIN_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "theirs"
    assert given("brain.enabled=false") == {}


def brain_certificate(*settings: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the operator's environment variables for TLS, and the brain's pod spec."""
    specs = {spec["containers"][0]["name"]: spec for spec in pod_specs(render(*settings))}
    variables = specs["operator"]["containers"][0]["env"]
    told = {entry["name"]: entry for entry in variables if entry["name"].endswith(("_CA", "_TLS"))}
    return told, specs.get("brain", {})


def test_without_tls_nobody_has_a_certificate() -> None:
    told, brain = brain_certificate()
    assert told == {}
    assert "tls" not in str(brain).lower()
    assert not [one for one in of_kind(render(), "Secret") if one["type"] == "kubernetes.io/tls"]


def test_with_tls_the_brain_shows_a_certificate_that_works_and_masters_get_its_authority(tmp_path: Path) -> None:
    documents = render("tls.enabled=true")
    (secret,) = (one for one in of_kind(documents, "Secret") if one["type"] == "kubernetes.io/tls")
    for name, content in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    assert read_certificates(tmp_path)  # raises unless a client and a server complete a handshake with it
    told, brain = brain_certificate("tls.enabled=true")
    name = secret["metadata"]["name"]
    assert told["EMBERSCALE_JOB_TLS"]["value"] == "true"
    assert told["EMBERSCALE_BRAIN_CA"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "ca.crt"}
    (container,) = brain["containers"]
    folder = {entry["name"]: entry.get("value") for entry in container["env"]}["EMBERSCALE_TLS_FOLDER"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == folder)
    assert mount["readOnly"] is True
    (volume,) = (volume for volume in brain["volumes"] if volume["name"] == mount["name"])
    assert volume["secret"]["secretName"] == name


def test_a_certificate_of_ones_own_replaces_the_made_up_one() -> None:
    documents = render("tls.enabled=true", "tls.brainSecret=theirs")
    assert not [one for one in of_kind(documents, "Secret") if one["type"] == "kubernetes.io/tls"]
    told, brain = brain_certificate("tls.enabled=true", "tls.brainSecret=theirs")
    assert told["EMBERSCALE_BRAIN_CA"]["valueFrom"]["secretKeyRef"]["name"] == "theirs"
    assert "theirs" in {volume.get("secret", {}).get("secretName") for volume in brain["volumes"]}


def test_of_a_brain_elsewhere_only_the_authority_is_needed() -> None:
    elsewhere = ("brain.enabled=false", "brain.external.address=brain:1", "brain.external.existingSecret=theirs")
    told, _ = brain_certificate("tls.enabled=true", *elsewhere)
    assert told.keys() == {"EMBERSCALE_JOB_TLS"}
    told, _ = brain_certificate("tls.enabled=true", "tls.brainSecret=authority", *elsewhere)
    assert told["EMBERSCALE_BRAIN_CA"]["valueFrom"]["secretKeyRef"] == {"name": "authority", "key": "ca.crt"}


def test_a_database_of_ones_own_replaces_the_bundled_one() -> None:
    url = "postgresql://me:pw@postgres.example:5432/history"
    documents = render("postgresql.enabled=false", f"postgresql.external.url={url}")
    assert of_kind(documents, "StatefulSet") == []
    (secret,) = (one for one in of_kind(documents, "Secret") if one["metadata"]["name"].endswith("database-url"))
    assert secret["stringData"] == {"url": url}


def test_without_a_brain_nothing_of_it_is_there() -> None:
    names = [document["metadata"]["name"] for document in render("brain.enabled=false", "networkPolicy.enabled=true")]
    assert [name for name in names if "brain" in name or "postgresql" in name] == []
