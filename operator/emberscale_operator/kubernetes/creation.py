"""Creating a job's objects so that doing it again changes nothing."""

import base64
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from emberscale_api.certificates import AUTHORITY_FILE
from emberscale_api.job.status import fitting_reason
from emberscale_operator.kubernetes import names, pod_spec
from emberscale_operator.kubernetes.certificate import self_signed
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiInternalError, path_of
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_spec import Credentials, JobObjects
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.machine import InstanceId, Resources

QUOTA_EXCEEDED = "QuotaExceeded"
NAME_TAKEN = "NameTaken"


class RefusedError(Exception):
    """The cluster refuses an object at present; `reason` is CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NamespaceEndsError(Exception):
    """The namespace is being deleted, and accepts no new objects."""


class ObjectMaker:
    """Makes the objects of one job. `admit` is told the job's uid, namespace and password for Redis."""

    def __init__(self, client: ApiClient, settings: Settings, admit: Callable[[str, str, str], None]) -> None:
        self._client = client
        self._settings = settings
        self._admit = admit
        self._present: set[str] = set()
        self._credentials: Credentials | None = None
        self._token_secret: dict[str, Any] = {}

    def look_again(self) -> None:
        """Forgets which objects are there, as others may delete them: the next pod looks for those that it needs."""
        self._present.clear()

    async def credentials(self, job: Job) -> Credentials:
        """Returns the job's credentials, from a Secret that the operator creates on first use and never changes.

        So a job has TLS either from its first pod to its last or not at all, whatever the settings say meanwhile.
        Raises RefusedError and NamespaceEndsError.
        """
        if self._credentials is None:
            secret = await self._find(job, "secrets", names.token_secret_name(job.key.name))
            self._credentials = await self._make_credentials(job) if secret is None else self._held(job, secret)
            self._admit(job.uid, job.key.namespace, self._credentials.store_password)
        return self._credentials

    async def pod(
        self, job: Job, objects: JobObjects, instance: InstanceId, resources: Resources, avoided: Collection[str] = ()
    ) -> dict[str, Any]:
        """Creates a pod, rather not on the `avoided` nodes, and whatever it refers to.

        Raises RefusedError and NamespaceEndsError.
        """
        credentials = await self.credentials(job)
        await self._once(job, "secrets", self._token_secret)
        tls = credentials.authority is not None
        await self._once(job, "services", pod_spec.build_service(job, tls))
        await self._once(job, "secrets", pod_spec.build_store_secret(job, objects, self._settings, credentials))
        await self._once(job, "configmaps", pod_spec.build_manifest(job, objects))
        body = pod_spec.build_pod(job, objects, instance, resources, self._settings, tls, avoided)
        pod = await self._ensure(job, "pods", body)
        if not names.is_pod_of(pod, job.key.name, instance):
            raise RefusedError(
                "LabelsChanged",
                f"pod {body['metadata']['name']} does not have the labels that it needs: somebody else made it, or a "
                "webhook takes labels away",
            )
        return pod

    async def pods(self, job: Job) -> list[dict[str, Any]]:
        """Lists the job's pods."""
        selector = f"{names.JOB_LABEL}={job.key.name}"
        found = await self._client.get(path_of("v1", "pods", job.key.namespace), labelSelector=selector)
        return list(found["items"] or ())

    async def _make_credentials(self, job: Job) -> Credentials:
        """Makes a job's credentials; one whose Secret was deleted keeps its password, which its masters still use."""
        pair = self_signed() if self._settings.job_tls else None
        authority = pair.certificate if pair is not None else None
        store = await self._find(job, "secrets", names.store_secret_name(job.key.name, self._settings))
        password = _store_password_in(store) if store is not None and names.is_owned_by(store, job.uid) else ""
        made = Credentials(secrets.token_hex(32), secrets.token_hex(32), password or secrets.token_hex(32), authority)
        return self._held(job, await self._make(job, "secrets", pod_spec.build_token_secret(job, made, pair)))

    def _held(self, job: Job, secret: dict[str, Any]) -> Credentials:
        """Returns the credentials in the job's Secret, which comes back with the same content if it is deleted."""
        name = _owned(job, "secrets", secret)["metadata"]["name"]
        data = secret.get("data") or {}
        self._token_secret = job.owned("v1", "Secret", name, data=data)
        return _credentials_in(data, name)

    async def _once(self, job: Job, plural: str, body: dict[str, Any]) -> None:
        name = f"{plural}/{body['metadata']['name']}"
        if name not in self._present:
            _check_unchanged(plural, await self._ensure(job, plural, body), body)
            self._present.add(name)

    async def _ensure(self, job: Job, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the object from the cluster, created if missing. Raises RefusedError and NamespaceEndsError.

        It looks first: if a quota is used up, the API server refuses to create even an object that exists. A pod is
        created at once, since none was seen.
        """
        found = await self._find(job, plural, body["metadata"]["name"]) if plural != "pods" else None
        return await self._make(job, plural, body) if found is None else _owned(job, plural, found)

    async def _make(self, job: Job, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        """Creates an object, or returns the one that another has created meanwhile."""
        try:
            return await self._client.create(path_of("v1", plural, job.key.namespace), body)
        except ApiInternalError as error:
            # the API server is there, and the job may wait for long: such as for whoever runs a webhook
            raise RefusedError("InternalError", str(error)) from error
        except ApiError as error:
            found = await self._find(job, plural, body["metadata"]["name"])
            if found is None:
                raise _refusal(error) from error
        return _owned(job, plural, found)

    async def _find(self, job: Job, plural: str, name: str) -> dict[str, Any] | None:
        """Returns the object of a name. Lists pods, as the operator does anyway: it needs no right to get one."""
        try:
            if plural != "pods":
                return await self._client.get(path_of("v1", plural, job.key.namespace, name))
            pods = path_of("v1", plural, job.key.namespace)
            found = await self._client.get(pods, fieldSelector=f"metadata.name={name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise _refusal(error) from error
        pod: dict[str, Any] | None = next(iter(found["items"]), None)
        return pod


def _owned(job: Job, plural: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns an object that is the job's. Raises RefusedError for that of somebody else."""
    if not names.is_owned_by(found, job.uid):
        raise RefusedError(
            NAME_TAKEN,
            f"{plural[:-1]} {found['metadata']['name']} exists and belongs to something else, perhaps to an earlier "
            "TrainingJob of this name whose objects are being deleted",
        )
    return found


def _check_unchanged(plural: str, found: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raises RefusedError if an object lacks data: a new pod would get a token that those that run do not know."""
    if not body.get("data", {}).items() <= (found.get("data") or {}).items():
        name = f"{plural[:-1]} {body['metadata']['name']}"
        raise RefusedError("ObjectChanged", f"somebody has changed {name}: delete it, and it comes back as it was")


def _store_password_in(secret: Mapping[str, Any]) -> str:
    """Returns the password in the Secret for a job's masters; empty if it has none."""
    try:
        return urlsplit(base64.b64decode(secret["data"][pod_spec.STORE_URL_KEY]).decode()).password or ""
    except (KeyError, TypeError, ValueError):
        return ""


def _credentials_in(data: Mapping[str, str], name: str) -> Credentials:
    """Returns the content of a Secret. Raises RefusedError if somebody else has made it, with other content."""
    held = {key: base64.b64decode(value) for key, value in data.items()}
    try:
        token = held[pod_spec.TOKEN_KEY]
        return Credentials(
            token.decode(),
            held.get(pod_spec.OPERATOR_TOKEN_KEY, token).decode(),  # older Secrets have no key for it
            held[pod_spec.STORE_PASSWORD_KEY].decode(),
            held.get(AUTHORITY_FILE),
        )
    except (KeyError, UnicodeDecodeError) as error:
        raise RefusedError(
            "UnusableSecret", f"somebody else has made what the operator keeps there: delete the Secret {name}"
        ) from error


def _refusal(error: ApiError) -> Exception:
    """Refusals that a user or time can resolve; any other is a defect of the operator."""
    text = str(error)
    if "NamespaceTerminating" in error.causes:
        return NamespaceEndsError(text)
    if error.status == 403 and "exceeded quota" in text:
        return RefusedError(QUOTA_EXCEEDED, text)
    if error.status == 403 and "violates PodSecurity" in text:
        return RefusedError("PodSecurityViolation", text)
    if error.status in (400, 403, 404, 409, 422):
        return RefusedError(*fitting_reason(error.reason, text, "Refused"))
    return error
