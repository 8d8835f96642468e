"""The Kubernetes objects of a job, as they are sent to the API server."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emberscale_api import environment
from emberscale_api.certificates import AUTHORITY_FILE, CHAIN_FILE, KEY_FILE
from emberscale_api.job import (
    MasterSpec,
    PodTemplate,
    ResourceRequirements,
    RunPolicy,
    TrainingJob,
    cpu_cores,
    memory_bytes,
)
from emberscale_api.job.newer import with_values
from emberscale_api.job.roles import Role
from emberscale_api.rpc.token import JobClaims, job_token
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.certificate import CertificatePair
from emberscale_operator.kubernetes.disruption import grace_seconds
from emberscale_operator.kubernetes.flash_tenants import flash_password, flash_user
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.spreading import rather_not_on, spread_over_nodes
from emberscale_operator.kubernetes.tenants import user_name, user_url
from emberscale_operator.machine import InstanceId, Resources, leave_seconds

COMMANDS: Mapping[Role, Sequence[str]] = {
    Role.MASTER: ("emberscale-master",),
    Role.PS: ("emberscale-ps",),
    Role.WORKER: ("emberscale-worker",),
}
_USER = 65532
_FOLDER = "/run/emberscale"
TOKEN_KEY, OPERATOR_TOKEN_KEY, STORE_PASSWORD_KEY = "token", "operator-token", "store-password"
_BRAIN_TOKEN_KEY, _BRAIN_CA_KEY = "brain-token", "brain-ca"
STORE_URL_KEY, _FLASH_KEY = "redis-url", "flash-redis-url"
_NODE_LOSS_SECONDS = 30
_EVICTS = "NoExecute"
"""The effect of the taints of a lost node."""
_ASKED: dict[str, Any] = {"httpGet": {"path": "/metrics", "port": "metrics"}, "timeoutSeconds": 5}
"""Checks that a process answers, which a hung or deadlocked one does not."""
_STARTUP_PROBE = {**_ASKED, "periodSeconds": 2, "failureThreshold": 150}
_LIVENESS_PROBE = {**_ASKED, "periodSeconds": 10, "failureThreshold": 6}


@dataclass(frozen=True)
class Credentials:
    """What a job's processes show to each other and to Redis, and what the operator shows to the master.

    Without an authority, in PEM, they serve no TLS.
    """

    token: str = field(repr=False)
    operator_token: str = field(repr=False)
    store_password: str = field(repr=False)
    authority: bytes | None = None


@dataclass(frozen=True)
class JobObjects:
    """The objects that a job's pods refer to, and the text of the manifest that a new master reads.

    `generation` counts the edits of the job. `restart_keys` say, for each role, what a pod must be replaced for: a
    digest of what the manifest says beyond its defaults, and one of what comes from elsewhere. `image` is the job's,
    from first pod to last.
    """

    image: str
    generation: int
    manifest: str
    manifest_name: str
    restart_keys: Mapping[Role, str]
    store_secret: str

    @classmethod
    def of(cls, job: Job, settings: Settings, image: str = "") -> "JobObjects":
        """The objects of the current job; a job without an image yet gets the operator's."""
        spec, name = job.spec, job.key.name
        bare = {"template": PodTemplate()}
        untemplated = {str(role): part.model_copy(update=bare) for role, part in spec.roles.items()}
        manifest = _with_spec(job, {"suspend": False, **untemplated})
        text = with_values(manifest.to_json(), job.unknown)
        unsized = {str(role): part.model_copy(update={**bare, "replicas": None}) for role, part in spec.roles.items()}
        unsized["master"] = MasterSpec()
        policy = spec.run_policy
        seen_by_master = RunPolicy(backoff_limit=policy.backoff_limit, active_deadline=policy.active_deadline)
        key = _with_spec(job, {"suspend": False, "run_policy": seen_by_master, **unsized})
        read = with_values(_said_in(key), job.unknown)
        return cls(
            image=image or settings.image,
            generation=job.generation,
            manifest=text,
            manifest_name=names.manifest_name(name, text),
            restart_keys={
                Role.MASTER: f"{names.digest(read)}/{names.digest(settings.brain_authority + settings.brain_token)}",
                Role.PS: f"{names.digest(_said_in(spec.ps.template))}/",
                Role.WORKER: f"{names.digest(_said_in(spec.worker.template))}/",
            },
            store_secret=names.store_secret_name(name, settings),
        )

    def revision(self, role: Role) -> str:
        """Returns the revision of a pod of this role that is created now."""
        return f"{self.generation}/{self.restart_keys[role]}"

    def restart_key(self, role: Role, written: str) -> str:
        """The restart key, of today's, that a pod has on which this revision is written.

        Without an edit the manifest is the same, however this version reads it: a newer definition may fill in fields
        that this one does not know, and a newer operator knows more of them.
        """
        generation, _, key = written.partition("/")
        today = self.restart_keys[role]
        unedited = generation == str(self.generation) and key.partition("/")[2] == today.partition("/")[2]
        return today if unedited else key


def _with_spec(job: Job, changes: Mapping[str, Any]) -> TrainingJob:
    return job.manifest.model_copy(update={"spec": job.spec.model_copy(update=changes)})


def _said_in(part: TrainingJob | PodTemplate) -> str:
    """Returns a part of the manifest without defaults, so that new fields of a version change nothing."""
    return json.dumps(part.model_dump(mode="json", by_alias=True, exclude_defaults=True), sort_keys=True)


def build_token_secret(job: Job, credentials: Credentials, pair: CertificatePair | None) -> dict[str, Any]:
    """Returns the Secret with the job's tokens, certificate and password of Redis.

    Its pods mount the token and the certificate, if there is one; only the master mounts the operator's token. It is
    not immutable: while any pod of a node mounts an immutable Secret, the kubelet gives its content to new pods, too,
    even if another one has taken its name. A job that was deleted and created anew would never get its own tokens.
    """
    data = {
        TOKEN_KEY: credentials.token,
        OPERATOR_TOKEN_KEY: credentials.operator_token,
        STORE_PASSWORD_KEY: credentials.store_password,
    }
    if pair is not None:
        certificate = pair.certificate.decode("ascii")
        data |= {AUTHORITY_FILE: certificate, CHAIN_FILE: certificate, KEY_FILE: pair.key.decode("ascii")}
    return job.owned("v1", "Secret", names.token_secret_name(job.key.name), stringData=data)


def _flash_url(job: Job, settings: Settings, credentials: Credentials) -> str:
    user = flash_user(settings.installation, job.uid)
    return user_url(settings.flash_redis_url, user, flash_password(credentials.store_password))


def build_store_secret(job: Job, objects: JobObjects, settings: Settings, credentials: Credentials) -> dict[str, Any]:
    """The Secret with Redis users and a brain token that are of no use for another job.

    Parameter servers get the user of the Redis for flash checkpoints, only the master gets the rest. It is not
    immutable either.
    """
    user = user_name(settings.installation, job.uid)
    claims = JobClaims(job.uid, job.key.namespace)
    data = {
        STORE_URL_KEY: user_url(settings.redis_url, user, credentials.store_password),
        _FLASH_KEY: _flash_url(job, settings, credentials) if settings.flash_redis_url else "",
        _BRAIN_TOKEN_KEY: job_token(settings.brain_token, claims) if settings.brain_token else "",
        _BRAIN_CA_KEY: settings.brain_authority,
    }
    held = {name: text for name, text in data.items() if text}
    return job.owned("v1", "Secret", objects.store_secret, stringData=held)


def build_manifest(job: Job, objects: JobObjects) -> dict[str, Any]:
    """The ConfigMap with the manifest."""
    data = {"manifest.json": objects.manifest}
    return job.owned("v1", "ConfigMap", objects.manifest_name, immutable=True, data=data)


def build_service(job: Job, tls: bool) -> dict[str, Any]:
    """The Service in front of the master, whichever pod that is."""
    protocol = "https" if tls else "kubernetes.io/h2c"
    spec = {
        "selector": {names.JOB_LABEL: job.key.name, names.ROLE_LABEL: str(Role.MASTER)},
        "ports": [{"name": "grpc", "port": names.MASTER_PORT, "targetPort": "grpc", "appProtocol": protocol}],
        "publishNotReadyAddresses": True,
    }
    return job.owned("v1", "Service", names.service_name(job.key.name), spec=spec)


def master_address(job: Job, settings: Settings) -> str:
    """Returns the address at which members find the master."""
    key = job.key
    return f"{names.service_name(key.name)}.{key.namespace}.svc.{settings.cluster_domain}:{names.MASTER_PORT}"


def build_pod(
    job: Job,
    objects: JobObjects,
    instance: InstanceId,
    resources: Resources,
    settings: Settings,
    tls: bool = False,
    avoided: Collection[str] = (),
) -> dict[str, Any]:
    """The pod of one instance: what the person asked for, under what the job needs.

    `tls` says whether the job's Secret holds a certificate. The scheduler prefers other nodes to the `avoided` ones.
    """
    role = job.spec.roles[instance.role]
    template = role.template
    annotations = {
        **template.annotations,
        names.MANIFEST_ANNOTATION: objects.revision(instance.role),
        names.LIMITS_ANNOTATION: json.dumps(limits_of(resources)),
    }
    pod = job.owned("v1", "Pod", names.pod_name(job.key.name, instance))
    pod["metadata"]["labels"] = {**template.labels, **names.instance_labels(job.key.name, instance)}
    pod["metadata"]["annotations"] = annotations
    pod["spec"] = _without_empty(
        {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_seconds(instance.role, resources),
            "priorityClassName": job.spec.run_policy.priority_class_name,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "imagePullSecrets": [
                *(_dump(secret) for secret in template.image_pull_secrets),
                *({"name": name} for name in settings.image_pull_secrets),
            ],
            "nodeSelector": dict(template.node_selector),
            "affinity": rather_not_on(avoided, template.affinity),
            "topologySpreadConstraints": _spread(job, instance.role),
            "schedulerName": template.scheduler_name,
            "runtimeClassName": template.runtime_class_name,
            "serviceAccountName": template.service_account_name,
            "tolerations": _tolerations(template),
            "volumes": [*template.volumes, *_volumes(job, objects, instance.role, tls)],
            "containers": [_container(job, objects, instance, resources, settings, tls)],
        }
    )
    return pod


def _spread(job: Job, role: Role) -> list[dict[str, Any]]:
    """Spreads servers that may hold parity of each other: `Auto` may take it after they have started."""
    may_keep_parity = role is Role.PS and job.spec.allowed_parity > 0
    return [spread_over_nodes(job.key.name, role)] if may_keep_parity else []


def limits_of(resources: Resources) -> dict[str, str]:
    """Limits of a container, as quantities."""
    limits = {}
    if resources.cpu_cores is not None:
        limits["cpu"] = f"{round(resources.cpu_cores * 1000)}m"
    if resources.memory_bytes is not None:
        limits["memory"] = str(resources.memory_bytes)
    return limits


def requests_of(requirements: ResourceRequirements, resources: Resources) -> dict[str, str]:
    """Requests of a container: as the manifest says, in proportion to limits that differ from the manifest's."""
    requests = limits_of(resources)
    if requirements.requests.cpu is not None and requirements.cpu_limit and resources.cpu_cores is not None:
        share = cpu_cores(requirements.requests.cpu) / requirements.cpu_limit
        requests["cpu"] = f"{max(1, round(resources.cpu_cores * share * 1000))}m"
    if requirements.requests.memory is not None and requirements.memory_limit and resources.memory_bytes is not None:
        share = memory_bytes(requirements.requests.memory) / requirements.memory_limit
        requests["memory"] = str(math.ceil(resources.memory_bytes * share))
    return requests


def _container(
    job: Job, objects: JobObjects, instance: InstanceId, resources: Resources, settings: Settings, tls: bool
) -> dict[str, Any]:
    role = job.spec.roles[instance.role]
    template = role.template
    ports = [{"name": "metrics", "containerPort": names.METRICS_PORT}]
    mounts = [
        *(_dump(mount) for mount in template.volume_mounts),
        {"name": "emberscale-tmp", "mountPath": "/tmp"},
        {"name": "emberscale-job", "mountPath": _FOLDER, "readOnly": True},
    ]
    container = {
        "name": str(instance.role),
        "image": template.image or objects.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(COMMANDS[instance.role]),
        "env": _environment(job, objects, instance, resources, settings, tls),
        "envFrom": list(template.env_from),
        "ports": ports,
        "resources": _without_empty(
            {"limits": limits_of(resources), "requests": requests_of(role.resources, resources)}
        ),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": _STARTUP_PROBE,
        "livenessProbe": _LIVENESS_PROBE,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if instance.role is Role.MASTER:
        ports.append({"name": "grpc", "containerPort": names.MASTER_PORT})
        container["readinessProbe"] = {"tcpSocket": {"port": "grpc"}, "periodSeconds": 2}
    return _without_empty(container)


def _environment(
    job: Job, objects: JobObjects, instance: InstanceId, resources: Resources, settings: Settings, tls: bool
) -> list[dict[str, Any]]:
    values = {
        environment.JOB_NAME: job.key.name,
        environment.JOB_UID: job.uid,
        environment.ROLE: str(instance.role),
        environment.INDEX: str(instance.index),
        environment.MASTER_ADDRESS: master_address(job, settings),
        environment.TOKEN_FILE: f"{_FOLDER}/token",
        environment.LISTEN_HOST: "0.0.0.0",
        environment.METRICS_PORT: str(names.METRICS_PORT),
        **({environment.LEAVE_SECONDS: f"{leave_seconds(resources):g}"} if instance.role is Role.PS else {}),
    }
    if tls:
        values[environment.TLS_FOLDER] = _FOLDER
    if resources.cpu_cores is not None:
        values |= environment.cpu_variables(resources.cpu_cores)
    if instance.role is Role.MASTER:
        values[environment.MANIFEST_FILE] = f"{_FOLDER}/manifest.json"
        values[environment.OPERATOR_TOKEN_FILE] = f"{_FOLDER}/{OPERATOR_TOKEN_KEY}"
        if settings.brain_address:
            values[environment.BRAIN_ADDRESS] = settings.brain_address
    variables: list[dict[str, Any]] = [
        *(_dump(variable) for variable in job.spec.roles[instance.role].template.env),
        # a pod's uid is never used twice, in contrast to its name
        {"name": environment.INCARNATION, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": environment.ADVERTISED_HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": name, "value": value} for name, value in values.items()),
    ]
    secrets: dict[str, str] = {}
    if instance.role is Role.MASTER:
        secrets[environment.REDIS_URL] = STORE_URL_KEY
        if settings.brain_address:
            secrets[environment.BRAIN_TOKEN] = _BRAIN_TOKEN_KEY
        if settings.brain_authority:
            secrets[environment.BRAIN_CA] = _BRAIN_CA_KEY
    if settings.flash_redis_url and instance.role in (Role.MASTER, Role.PS):
        secrets[environment.FLASH_REDIS_URL] = _FLASH_KEY
    for name, key in secrets.items():
        reference = {"name": objects.store_secret, "key": key}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _volumes(job: Job, objects: JobObjects, role: Role, tls: bool) -> list[dict[str, Any]]:
    files = [TOKEN_KEY, *((AUTHORITY_FILE, CHAIN_FILE, KEY_FILE) if tls else ())]
    items = [{"key": file, "path": file} for file in files]
    secret = names.token_secret_name(job.key.name)
    sources: list[dict[str, Any]] = [{"secret": {"name": secret, "items": items}}]
    if role is Role.MASTER:
        steering = {"key": OPERATOR_TOKEN_KEY, "path": OPERATOR_TOKEN_KEY}
        # optional: the Secret of an older job lacks this key
        sources.append({"secret": {"name": secret, "items": [steering], "optional": True}})
        sources.append({"configMap": {"name": objects.manifest_name}})
    return [
        {"name": "emberscale-tmp", "emptyDir": {}},
        {"name": "emberscale-job", "projected": {"defaultMode": 0o440, "sources": sources}},
    ]


def _tolerations(template: PodTemplate) -> list[dict[str, Any]]:
    """Returns the user's tolerations, plus a short one for each taint of a lost node that the user's leave out."""
    given = [_dump(toleration) for toleration in template.tolerations]
    for taint in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(one.get("key", taint) == taint and one.get("effect", _EVICTS) == _EVICTS for one in given):
            given.append(
                {
                    "key": taint,
                    "operator": "Exists",
                    "effect": _EVICTS,
                    "tolerationSeconds": _NODE_LOSS_SECONDS,
                }
            )
    return given


def _dump(part: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, {}, [], ())}
