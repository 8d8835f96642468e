"""The pods of a job."""

import json
import pkgutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberscale_api.environment import LEAVE_SECONDS
from emberscale_api.job.roles import Role
from emberscale_operator.kubernetes import pod_spec
from emberscale_operator.kubernetes.job import Job, read_job
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.machine import InstanceId, Resources
from training_jobs import job_body

LIMITS = Resources(1.5, 1 << 30)


def pod_of(job: Job, settings: Settings, role: Role = Role.PS, resources: Resources = LIMITS) -> dict[str, Any]:
    return pod_spec.build_pod(job, JobObjects.of(job, settings), InstanceId(role, 1, 4), resources, settings)


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_a_pod_is_named_after_its_incarnation_and_owned_by_its_job(job: Job, settings: Settings) -> None:
    metadata = pod_of(job, settings)["metadata"]
    assert metadata["name"] == "ctr-ps-1-4"
    (owner,) = metadata["ownerReferences"]
    assert owner["uid"] == "job-uid"
    assert owner["controller"] is True
    assert owner["blockOwnerDeletion"] is False


@pytest.mark.parametrize("command", [command for command, *_ in pod_spec.COMMANDS.values()])
def test_the_command_of_a_pod_is_one_that_the_wheel_installs(command: str) -> None:
    """The installed commands come from the sources, since the metadata of an editable installation may be older."""
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert callable(pkgutil.resolve_name(project["scripts"][command]))


@pytest.mark.parametrize("role", [Role.MASTER, Role.PS, Role.WORKER])
def test_a_process_that_hangs_is_found_out_within_a_minute_and_has_time_to_start(
    job: Job, settings: Settings, role: Role
) -> None:
    (container,) = pod_of(job, settings, role)["spec"]["containers"]
    alive, starts = container["livenessProbe"], container["startupProbe"]
    assert alive["httpGet"]["port"] in {port["name"] for port in container["ports"]}
    assert alive["periodSeconds"] * alive["failureThreshold"] == 60
    assert starts["periodSeconds"] * starts["failureThreshold"] == 300


def test_a_server_gets_the_time_to_give_its_rows_away_and_others_none(job: Job, settings: Settings) -> None:
    def grace(role: Role, gibibytes: int) -> int:
        pod = pod_of(job, settings, role, Resources(1.0, gibibytes << 30))
        assert (LEAVE_SECONDS in environment(pod)) is (role is Role.PS)
        if role is Role.PS:
            assert float(environment(pod)[LEAVE_SECONDS]) < pod["spec"]["terminationGracePeriodSeconds"]
        return int(pod["spec"]["terminationGracePeriodSeconds"])

    assert [grace(Role.PS, gibibytes) for gibibytes in (1, 20, 1000)] == [85, 275, 600]
    assert grace(Role.WORKER, 20) == grace(Role.MASTER, 20) == 15


@pytest.mark.parametrize("role", [Role.MASTER, Role.PS, Role.WORKER])
def test_no_pod_holds_rights_or_can_gain_any(job: Job, settings: Settings, role: Role) -> None:
    spec = pod_of(job, settings, role)["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["restartPolicy"] == "Never"


def test_only_the_master_gets_the_manifest_and_the_store(job: Job, settings: Settings) -> None:
    master, ps = (environment(pod_of(job, settings, role)) for role in (Role.MASTER, Role.PS))
    assert master["EMBERSCALE_REDIS_URL"]["secretKeyRef"]["key"] == "redis-url"
    assert master["EMBERSCALE_MANIFEST_FILE"] == "/run/emberscale/manifest.json"
    assert not {"EMBERSCALE_REDIS_URL", "EMBERSCALE_MANIFEST_FILE"} & ps.keys()
    assert "secret@" not in str(pod_of(job, settings, Role.MASTER))


def test_a_member_is_reached_at_its_pods_address_and_is_the_pod_itself(job: Job, settings: Settings) -> None:
    variables = environment(pod_of(job, settings))
    assert variables["EMBERSCALE_ADVERTISED_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["EMBERSCALE_INCARNATION"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert variables["EMBERSCALE_MASTER_ADDRESS"] == "ctr-master.team-a.svc.cluster.local:7070"
    assert "EMBERSCALE_SOCKET_DIRECTORY" not in variables


def test_requests_keep_their_proportion_to_limits_that_grew(job: Job, settings: Settings) -> None:
    (container,) = pod_of(job, settings, resources=Resources(1.0, 2 << 30))["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1000m", "memory": str(2 << 30)}
    assert container["resources"]["requests"]["memory"] == str(1 << 30)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute", "tolerationSeconds": 300}, {"unreachable"}),
        ({"key": "node.kubernetes.io/not-ready", "tolerationSeconds": 300}, {"unreachable"}),
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}, {"not-ready", "unreachable"}),
        ({"effect": "NoExecute"}, set()),
        ({}, set()),
    ],
)
def test_a_lost_node_is_tolerated_for_as_long_as_the_template_says(
    settings: Settings, given: dict[str, Any], added: set[str]
) -> None:
    """Of several tolerations of a taint, Kubernetes takes the shortest."""
    toleration = {"operator": "Exists", **given}
    job = read_job(job_body(ps={"template": {"tolerations": [toleration]}}))
    first, *others = pod_of(job, settings)["spec"]["tolerations"]
    assert first == toleration
    assert {other["key"].removeprefix("node.kubernetes.io/") for other in others} == added


def test_a_template_is_merged_under_what_the_job_needs(settings: Settings) -> None:
    template: dict[str, Any] = {
        "labels": {"team": "ads", "emberscale.io/role": "spy"},
        "annotations": {"note": "x"},
        "image": "mine:2",
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
        "env": [
            {"name": "AWS_KEY", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "key"}}},
            {"name": "LEVEL", "value": "1"},
        ],
    }
    job = read_job(job_body(ps={"template": template}, runPolicy={"priorityClassName": "high"}))
    pod = pod_of(job, settings)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["labels"]["team"] == "ads"
    assert pod["metadata"]["labels"]["emberscale.io/role"] == "ps"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert container["image"] == "mine:2"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["priorityClassName"] == "high"
    assert template["tolerations"][0] in spec["tolerations"]
    assert {volume["name"] for volume in spec["volumes"]} == {"data", "emberscale-tmp", "emberscale-job"}
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert environment(pod)["AWS_KEY"] == {"secretKeyRef": {"name": "aws", "key": "key"}}
    assert container["env"][0]["name"] == "AWS_KEY", "what the operator sets comes last, and so it stands"


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"worker": {"replicas": 9}}, False),
        ({"suspend": True}, False),
        ({"worker": {"replicas": 3, "template": {"labels": {"a": "b"}}}}, False),
        ({"runPolicy": {"ttlAfterFinished": 5, "priorityClassName": "high"}}, False),
        ({"runPolicy": {"backoffLimit": 1}}, True),
        ({"runPolicy": {"activeDeadline": "1h"}}, True),
        ({"checkpoint": {"interval": "1h"}}, True),
        ({"worker": {"minReplicas": 1, "maxReplicas": 4}}, True),
    ],
)
def test_a_master_is_replaced_only_for_what_it_reads(
    settings: Settings, change: dict[str, Any], replaced: bool
) -> None:
    base: dict[str, Any] = {"worker": {"replicas": 3}}
    before = JobObjects.of(read_job(job_body(**base)), settings)
    after = JobObjects.of(read_job(job_body(**{**base, **change})), settings)
    assert (before.restart_keys[Role.MASTER] != after.restart_keys[Role.MASTER]) is replaced


def test_a_pod_that_cannot_start_is_replaced_when_its_template_is_edited(settings: Settings) -> None:
    base: dict[str, Any] = {"worker": {"template": {"image": "nowhere:1"}}}
    before = JobObjects.of(read_job(job_body(**base)), settings)
    after = JobObjects.of(read_job(job_body(worker={"template": {"image": "somewhere:1"}})), settings)
    changed = {role for role in before.restart_keys if before.restart_keys[role] != after.restart_keys[role]}
    assert changed == {Role.WORKER}


def test_a_manifest_of_another_content_has_another_name(settings: Settings) -> None:
    one, two = (JobObjects.of(read_job(job_body(ps={"replicas": count})), settings) for count in (1, 2))
    assert one.manifest_name != two.manifest_name


def image_of(job: Job, settings: Settings, created_with: str = "") -> set[str]:
    """Returns the images of all roles."""
    objects = JobObjects.of(job, settings, created_with)
    roles = (Role.MASTER, Role.PS, Role.WORKER)
    pods = [pod_spec.build_pod(job, objects, InstanceId(role, 0, 1), LIMITS, settings) for role in roles]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def test_a_job_keeps_the_image_that_it_was_created_with(job: Job, settings: Settings) -> None:
    assert image_of(job, settings) == {settings.image}
    assert image_of(job, replace(settings, image="emberscale:2"), settings.image) == {settings.image}


def test_what_a_newer_version_adds_replaces_no_pod(settings: Settings) -> None:
    """A newer definition may fill in a default, or a newer operator may know a field that this one does not."""
    plain = JobObjects.of(read_job(job_body()), settings)
    spec = json.loads(plain.manifest)["spec"]
    assert spec["training"]["batchSize"]
    filled = job_body(**spec)
    assert JobObjects.of(read_job(filled), settings).restart_keys == plain.restart_keys


def test_an_edit_replaces_a_master_and_another_reading_of_the_same_manifest_does_not(settings: Settings) -> None:
    """A newer definition fills in fields that this version does not know; the operator is then replaced, too."""
    written = JobObjects.of(read_job(job_body()), settings).revision(Role.MASTER)

    def outdated(generation: int, given: Settings, **spec: Any) -> bool:
        now = JobObjects.of(read_job(job_body(generation=generation, **spec)), given)
        return now.restart_key(Role.MASTER, written) != now.restart_keys[Role.MASTER]

    assert not outdated(1, settings, training={"fromTheFuture": 7})
    assert not outdated(2, settings, worker={"replicas": 9})
    assert outdated(2, settings, checkpoint={"interval": "1h"})
    assert outdated(1, replace(settings, brain_authority="of another brain"))
    assert outdated(1, replace(settings, brain_token="another, which the brain knows by now"))


def test_an_edit_of_a_field_of_a_newer_version_reaches_its_processes(settings: Settings) -> None:
    body = job_body()
    body["spec"]["training"] = {"fromTheFuture": 3}
    objects = JobObjects.of(read_job(body), settings)
    assert json.loads(objects.manifest)["spec"]["training"]["fromTheFuture"] == 3


def test_master_and_servers_get_the_redis_for_flash_checkpoints_as_the_jobs_own_user(
    job: Job, settings: Settings
) -> None:
    settings = replace(settings, flash_redis_url="redis://:root-secret@flash:6379/0")
    found = {role: environment(pod_of(job, settings, role)) for role in (Role.MASTER, Role.PS, Role.WORKER)}
    name = "EMBERSCALE_FLASH_REDIS_URL"
    assert [role for role, variables in found.items() if name in variables] == [Role.MASTER, Role.PS]
    assert found[Role.PS][name]["secretKeyRef"]["key"] == "flash-redis-url"
    objects = JobObjects.of(job, settings)
    credentials = pod_spec.Credentials("token", "steering", "state-password")
    url = pod_spec.build_store_secret(job, objects, settings, credentials)["stringData"]["flash-redis-url"]
    assert "root-secret" not in url
    assert "state-password" not in url
    assert "@flash:6379/0" in url
