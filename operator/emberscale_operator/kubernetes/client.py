"""The few calls to the API server that the operator makes, in JSON."""

import asyncio
import json
import os
import re
import time
from collections import Counter
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import structlog
from kubernetes.aio import client as kube
from kubernetes.aio import config

from emberscale_api.errors import UnavailableError, problem_of
from emberscale_api.readable import bytes_text

_TIMEOUT_SECONDS = 20.0
_TELL_SECONDS = 300.0
_PARALLEL_CALLS = 64
_PAGE = 500
_SMALLER = 8
"""The factor by which pages become smaller that exceed the most bytes: a single object may have 1.5 MiB of metadata."""
_ANSWER_BYTES = 64 << 20
_TOO_LARGE = "ResponseTooLarge"
_CHUNK_BYTES = 1 << 16
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_LACKS_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""What the API server says if no role allows a call, as in `User "a" cannot list resource "pods" in API group ""`."""
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
PAUSE_FACTOR = 10.0
"""How much longer than a failure took its next attempt waits: a webhook that hangs must not hang each step."""
_log = structlog.get_logger()


class ApiError(Exception):
    """The API server refused a call; `reason` is its CamelCase word, `causes` come from its details."""

    def __init__(self, status: int, reason: str, message: str, causes: frozenset[str] = frozenset()) -> None:
        super().__init__(message or reason or f"HTTP status {status}")
        self.status = status
        self.reason = reason
        self.causes = causes


class ApiUnavailableError(UnavailableError):
    """The API server did not answer, or asked to be left alone for a while."""


class ApiInternalError(ApiUnavailableError):
    """The API server answered that something behind it failed, such as an admission webhook or its database."""


class ApiClient:
    """One connection pool; each call takes at most `timeout` seconds.

    `calls` counts by verb and resource, for those who tune rights and load. `refused` counts, also by HTTP status, the
    calls of which the operator gets nothing, whatever the object; the status is 0 without an answer. The log names the
    reason, every few minutes for each that is counted.
    """

    def __init__(self, configuration: kube.Configuration, timeout: float = _TIMEOUT_SECONDS) -> None:
        self._api = kube.ApiClient(configuration)
        self._timeout = timeout
        self._slots = asyncio.Semaphore(_PARALLEL_CALLS)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str, str]] = Counter()
        self._tell_at: dict[tuple[str, str, str], float] = {}

    @classmethod
    async def connect(cls, timeout: float = _TIMEOUT_SECONDS) -> "ApiClient":
        """Connects as KUBECONFIG says where it is set, otherwise with the pod's service account."""
        configuration = kube.Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=configuration)
        else:
            # the library reads the variable on import
            file = os.environ.get("KUBECONFIG")
            await config.load_kube_config(file, client_configuration=configuration)
        return cls(configuration, timeout)

    async def close(self) -> None:
        """Ends the connections."""
        await self._api.close()

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """Returns an object, or a list. Raises ApiError and ApiUnavailableError, as all calls do."""
        return await self._call("GET", path + ("?" + urlencode(query) if query else ""))

    async def versions(self, path: str, **query: str) -> dict[str, str]:
        """The resourceVersion of every object in a collection, by uid; the API server sends metadata only."""
        found: dict[str, str] = {}
        limit = _PAGE
        while True:
            query["limit"] = str(limit)
            try:
                page = await self._call("GET", f"{path}?{urlencode(query)}", accept=_METADATA)
            except ApiError as error:
                if error.reason != _TOO_LARGE or limit == 1:
                    raise
                limit = max(1, limit // _SMALLER)
                continue
            items = page["items"] or ()  # null where there are none
            found |= {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in items}
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                return found

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Creates an object in the collection at `path`."""
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Replaces an object; the resourceVersion in the body guards against others."""
        return await self._call("PUT", path, body)

    async def patch(self, path: str, body: dict[str, Any], kind: str = MERGE_PATCH) -> dict[str, Any]:
        """Changes an object."""
        return await self._call("PATCH", path, body, kind)

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> None:
        """Deletes the object of this uid, and no other of the same name; ignores one that is already gone."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        options["propagationPolicy"] = "Background"
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", path, options)
        except ApiError as error:
            # 409: the name belongs to a newer object by now
            if error.status not in (404, 409):
                raise

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> dict[str, Any]:
        headers = {"Accept": accept, "Content-Type": content_type}
        resource = _resource_of(path)
        self.calls[method, resource] += 1
        async with self._slots:
            try:
                await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
                response = await self._api.call_api(
                    method,
                    self._api.configuration.host + path,
                    header_params=headers,
                    body=body,
                    _request_timeout=self._timeout,
                )
                content = await _read(response.response, f"{method} {path}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = f"{method} {path}: {problem_of(error)}"
                self._count_refused(method, resource, 0, problem)
                raise ApiUnavailableError(problem) from error
        document = _document(content)
        message = str(document.get("message", ""))
        if _is_refused(response.status, message):
            self._count_refused(method, resource, response.status, f"{method} {path}: {message}")
        return _answer(method, path, response.status, document)

    def _count_refused(self, method: str, resource: str, status: int, problem: str) -> None:
        kind, now = (method, resource, str(status)), time.monotonic()
        self.refused[kind] += 1
        if now >= self._tell_at.get(kind, 0.0):
            self._tell_at[kind] = now + _TELL_SECONDS
            _log.warning("api_call_refused", call=f"{method} {resource}", status=status, problem=problem)


def _is_refused(status: int, message: str) -> bool:
    """Whether the API server refuses more than this object. A quota or a policy forbids single ones."""
    return status in (401, 429) or status >= 500 or (status == 403 and _LACKS_RIGHT.search(message) is not None)


async def _read(response: aiohttp.ClientResponse, what: str) -> bytes:
    """Raises ApiError for an answer that is larger than any that the operator asks for."""
    content = bytearray()
    async for part in response.content.iter_chunked(_CHUNK_BYTES):
        content += part
        if len(content) > _ANSWER_BYTES:
            response.close()
            problem = f"{what}: the answer exceeds {bytes_text(_ANSWER_BYTES)}"
            raise ApiError(response.status, _TOO_LARGE, problem)
    return bytes(content)


def _document(content: bytes) -> dict[str, Any]:
    """Returns the JSON of an answer; text that is not JSON, as of a proxy, is its message."""
    try:
        document: dict[str, Any] = json.loads(content) if content else {}
    except ValueError:
        document = {"message": content[:200].decode(errors="replace")}
    return document


def _answer(method: str, path: str, status: int, document: dict[str, Any]) -> dict[str, Any]:
    if status < 300:
        return document
    if status == 429 or status >= 500:
        said = f"{method} {path}: HTTP status {status}: {document.get('message', '')}"
        raise ApiInternalError(said) if document.get("reason") == "InternalError" else ApiUnavailableError(said)
    causes = frozenset(str(cause.get("reason")) for cause in (document.get("details") or {}).get("causes") or ())
    raise ApiError(status, str(document.get("reason", "")), str(document.get("message", "")), causes)


def path_of(api_version: str, plural: str, namespace: str = "", name: str = "") -> str:
    """The path of an object or, without a name, of a collection; without a namespace, of the whole cluster's.

    `v1` is the core group, whose paths begin differently.
    """
    root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    places = (f"namespaces/{quote(namespace)}" if namespace else "", plural, quote(name))
    return "/".join([root, *filter(None, places)])


def _resource_of(path: str) -> str:
    """`pods`, or `trainingjobs/status`."""
    parts = path.partition("?")[0].split("/namespaces/")[-1].split("/")
    return "/".join(parts[1:2] + parts[3:4]) if "/namespaces/" in path else parts[-1]
