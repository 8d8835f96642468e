"""TLS of a job: its certificate, who gets which part of it, and jobs that run while TLS is switched on or off."""

import asyncio
import base64
import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from emberscale_api.certificates import SERVER_NAME, read_certificates
from emberscale_api.errors import InvalidError
from emberscale_api.job.roles import Role
from emberscale_operator.kubernetes.certificate import self_signed
from emberscale_operator.kubernetes.client import ApiError
from emberscale_operator.kubernetes.creation import ObjectMaker
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_spec import Credentials, JobObjects, build_pod, build_store_secret
from emberscale_operator.kubernetes.settings import Settings, read_settings
from emberscale_operator.machine import InstanceId, Resources

AUTHORITY = self_signed().certificate.decode()
KNOWN = Credentials("token", "steering", "password")
REQUIRED = {"EMBERSCALE_IMAGE": "i", "EMBERSCALE_REDIS_URL": "redis://r", "EMBERSCALE_NAMESPACE": "n"}


class Objects:
    """The objects of an API server, with the contents of Secrets as it returns them."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{path}/{body['metadata']['name']}"
        if name in self.held:
            raise ApiError(409, "AlreadyExists", "already exists")
        made = copy.deepcopy(body)
        texts = made.pop("stringData", {})
        if texts:
            made["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        self.held[name] = made
        return made

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        if path not in self.held:
            raise ApiError(404, "NotFound", "not found")
        return self.held[path]

    def secret(self, name: str) -> dict[str, bytes]:
        data = self.held[f"/api/v1/namespaces/team-a/secrets/{name}"]["data"]
        return {key: base64.b64decode(content) for key, content in data.items()}


def make_pod(api: Any, job: Job, settings: Settings, role: Role, incarnation: int = 1) -> dict[str, Any]:
    """Returns a pod as made by an operator that has just started."""
    made = ObjectMaker(api, settings, admit=lambda uid, namespace, password: None).pod(
        job, JobObjects.of(job, settings), InstanceId(role, 0, incarnation), Resources()
    )
    return asyncio.run(made)


def credentials_of(api: Any, job: Job, settings: Settings) -> Credentials:
    """Returns the job's credentials, as an operator that has just started gets them."""
    return asyncio.run(ObjectMaker(api, settings, admit=lambda uid, namespace, password: None).credentials(job))


def mounted(pod: dict[str, Any]) -> set[str]:
    """Returns the files of the job's Secret in a pod."""
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "emberscale-job")
    sources = (source["secret"]["items"] for source in volume["projected"]["sources"] if "secret" in source)
    return {item["path"] for items in sources for item in items}


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}


def test_a_job_has_no_tls_by_default(job: Job, settings: Settings) -> None:
    api = Objects()
    pod = make_pod(api, job, settings, Role.PS)
    assert mounted(pod) == {"token"}
    assert "EMBERSCALE_TLS_FOLDER" not in variables(pod)
    assert api.secret("ctr-token").keys() == {"token", "operator-token", "store-password"}


@pytest.mark.parametrize("role", [Role.MASTER, Role.PS, Role.WORKER])
def test_only_the_master_mounts_the_token_that_steers_the_job(job: Job, settings: Settings, role: Role) -> None:
    api: Any = Objects()
    pod = make_pod(api, job, settings, role)
    assert ("operator-token" in mounted(pod)) is (role is Role.MASTER)
    assert ("EMBERSCALE_OPERATOR_TOKEN_FILE" in variables(pod)) is (role is Role.MASTER)
    given = credentials_of(api, job, settings)
    assert given.operator_token == api.secret("ctr-token")["operator-token"].decode() != given.token
    assert given.operator_token not in str(pod)


def test_a_job_from_before_there_was_an_operators_token_is_steered_with_its_own(job: Job, settings: Settings) -> None:
    api: Any = Objects()
    make_pod(api, job, settings, Role.MASTER)
    del api.held["/api/v1/namespaces/team-a/secrets/ctr-token"]["data"]["operator-token"]
    given = credentials_of(api, job, settings)
    assert given.operator_token == given.token


@pytest.mark.parametrize("role", [Role.MASTER, Role.PS, Role.WORKER])
def test_with_tls_all_pods_of_a_job_mount_the_certificate_that_is_beside_its_token(
    job: Job, settings: Settings, role: Role, tmp_path: Path
) -> None:
    api = Objects()
    pod = make_pod(api, job, replace(settings, job_tls=True), role)
    assert mounted(pod) - {"operator-token"} == {"token", "ca.crt", "tls.crt", "tls.key"}
    assert variables(pod)["EMBERSCALE_TLS_FOLDER"]["value"] == "/run/emberscale"
    (mount,) = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["mountPath"] == "/run/emberscale")
    assert mount["readOnly"] is True
    for name, content in api.secret("ctr-token").items():
        (tmp_path / name).write_bytes(content)
    assert read_certificates(tmp_path).authority == api.secret("ctr-token")["ca.crt"]
    service = api.held["/api/v1/namespaces/team-a/services/ctr-master"]
    assert service["spec"]["ports"][0]["appProtocol"] == "https"


def test_an_operator_that_starts_anew_takes_the_jobs_credentials_as_they_are(job: Job, settings: Settings) -> None:
    api: Any = Objects()
    secure = replace(settings, job_tls=True)
    first, second = (credentials_of(api, job, secure) for _ in range(2))
    assert first == second
    assert first.authority == api.secret("ctr-token")["ca.crt"]
    assert first.token == api.secret("ctr-token")["token"].decode()


@pytest.mark.parametrize("secure", [True, False])
def test_a_job_keeps_what_it_was_created_with_when_tls_is_switched(job: Job, settings: Settings, secure: bool) -> None:
    api: Any = Objects()
    before = make_pod(api, job, replace(settings, job_tls=secure), Role.MASTER)
    switched = replace(settings, job_tls=not secure)
    after = make_pod(api, job, switched, Role.MASTER, incarnation=2)
    assert mounted(after) == mounted(before)
    assert ("EMBERSCALE_TLS_FOLDER" in variables(after)) is secure
    assert (credentials_of(api, job, switched).authority is not None) is secure


def test_only_the_master_gets_the_brains_authority_and_is_replaced_for_another(job: Job, settings: Settings) -> None:
    plain = replace(settings, brain_address="brain:1", brain_token="hush")
    secure = replace(plain, brain_authority=AUTHORITY)
    objects = JobObjects.of(job, secure)
    assert build_store_secret(job, objects, secure, KNOWN)["stringData"]["brain-ca"] == AUTHORITY
    assert "brain-ca" not in build_store_secret(job, JobObjects.of(job, plain), plain, KNOWN)["stringData"]

    def of_role(role: Role, given: Settings) -> dict[str, Any]:
        return variables(build_pod(job, JobObjects.of(job, given), InstanceId(role, 0, 1), Resources(), given))

    reference = of_role(Role.MASTER, secure)["EMBERSCALE_BRAIN_CA"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": objects.store_secret, "key": "brain-ca"}
    assert "EMBERSCALE_BRAIN_CA" not in of_role(Role.MASTER, plain)
    assert "EMBERSCALE_BRAIN_CA" not in of_role(Role.WORKER, secure)
    before = JobObjects.of(job, plain).restart_keys
    changed = {role for role, key in objects.restart_keys.items() if key != before[role]}
    assert changed == {Role.MASTER}


def test_a_certificate_is_for_the_one_name_and_for_as_long_as_it_is_asked_for() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    certificate = x509.load_pem_x509_certificate(self_signed(now, timedelta(days=30)).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    assert certificate.not_valid_after_utc == now + timedelta(days=30)
    assert certificate.not_valid_before_utc < now
    assert self_signed().key != self_signed().key


def test_settings_of_tls_are_read_and_wrong_ones_refused_by_name() -> None:
    brain = {"EMBERSCALE_BRAIN_ADDRESS": "brain:1", "EMBERSCALE_BRAIN_TOKEN": "t"}
    assert not read_settings(REQUIRED).job_tls
    assert read_settings({**REQUIRED, "EMBERSCALE_JOB_TLS": "true"}).job_tls
    given = read_settings({**REQUIRED, **brain, "EMBERSCALE_BRAIN_CA": AUTHORITY})
    assert given.brain_authority == AUTHORITY
    with pytest.raises(InvalidError, match=r"^EMBERSCALE_BRAIN_CA: contains no PEM"):
        read_settings({**REQUIRED, **brain, "EMBERSCALE_BRAIN_CA": "not PEM"})
    with pytest.raises(InvalidError, match=r"^EMBERSCALE_JOB_TLS='perhaps': expected one of"):
        read_settings({**REQUIRED, "EMBERSCALE_JOB_TLS": "perhaps"})
