"""A Lease, so that only one of two operators acts."""

import asyncio
import base64
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from emberscale_api.readable import duration_text
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, path_of

DURATION_SECONDS = 15
_RENEW_SECONDS = 5.0
_RETRY_SECONDS = 2.0
_DEADLINE_SECONDS = 10.0
_CALL_SECONDS = 4.0
_API = "coordination.k8s.io/v1"
_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_log = structlog.get_logger()


class LeaseLostError(Exception):
    """Another holds the lease, or it could not be renewed in time: this process must not act any more."""


def account_owner(token: Path = _TOKEN) -> dict[str, str] | None:
    """The owner reference to the service account that this process runs as; None outside of a pod.

    What belongs to the account goes with it when the operator is uninstalled. Its uid is in the claims of the token, so
    that it takes no right to read it.
    """
    try:
        claims = token.read_text().split(".")[1]
        account = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]
        owner = account["serviceaccount"]
        return {"apiVersion": "v1", "kind": "ServiceAccount", "name": owner["name"], "uid": owner["uid"]}
    except FileNotFoundError:
        return None
    except (IndexError, KeyError, TypeError, ValueError) as error:
        _log.warning("lease_without_owner", file=str(token), problem=repr(error))
        return None


class LeaderLease:
    """One lease in the operator's namespace, as client-go's leader election keeps it.

    Others' clocks are not trusted: only how long a record stays the same. `client` serves the lease alone, so that a
    renewal waits behind no other call. `deadline`, in seconds, is how long the holder tries to renew before it gives
    up: it is below the lease's duration, so the holder stops before another may start.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        owner: dict[str, str] | None = None,
        renew: float = _RENEW_SECONDS,
        deadline: float = _DEADLINE_SECONDS,
    ) -> None:
        self._client = client
        self._renew, self._deadline = renew, deadline
        self._owners = [owner] if owner else []
        self._collection = path_of(_API, "leases", namespace)
        self._path = path_of(_API, "leases", namespace, name)
        self._name, self._namespace, self._identity = name, namespace, identity
        self._observed: tuple[str, float] = ("", 0.0)

    @classmethod
    async def connect(
        cls, namespace: str, name: str, identity: str, owner: dict[str, str] | None = None
    ) -> "LeaderLease":
        """A lease over a separate connection."""
        return cls(await ApiClient.connect(_CALL_SECONDS), namespace, name, identity, owner)

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()

    async def acquire(self) -> None:
        """Waits until the lease is held."""
        waiting = False
        while not await self._try(time.monotonic(), held=False):
            if not waiting:
                _log.info("lease_waiting", lease=self._name)
                waiting = True
            await asyncio.sleep(_RETRY_SECONDS)
        _log.info("lease_acquired", lease=self._name, identity=self._identity)

    async def keep(self) -> None:
        """Renews the lease for ever. Raises LeaseLostError.

        What another holder has given back is lost, too: what this process knows is from before.
        """
        while True:
            try:
                async with asyncio.timeout(self._deadline):
                    await asyncio.sleep(self._renew)
                    while not await self._try(time.monotonic(), held=True):
                        await asyncio.sleep(min(_RETRY_SECONDS, self._renew))
            except TimeoutError:
                limit = duration_text(self._deadline)
                raise LeaseLostError(f"the lease {self._name} was not renewed within {limit}") from None

    async def release(self) -> None:
        """Lets the next one start at once."""
        try:
            lease = await self._client.get(self._path)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._client.replace(self._path, lease)
        except (ApiError, ApiUnavailableError) as error:
            _log.warning("lease_not_released", problem=str(error))

    async def _try(self, now: float, held: bool) -> bool:
        try:
            return await self._take(now, held)
        except ApiUnavailableError as error:
            _log.warning("lease_not_renewed", problem=str(error))
        except ApiError as error:
            if error.status not in (404, 409):  # another was faster, or the lease was deleted: look again
                _log.error("lease_not_renewed", status=error.status, problem=str(error))
        return False

    async def _take(self, now: float, held: bool) -> bool:
        try:
            lease = await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            metadata = {"name": self._name, "namespace": self._namespace, "ownerReferences": self._owners}
            body = {"apiVersion": _API, "kind": "Lease", "metadata": metadata, "spec": self._spec({}, taken=True)}
            await self._client.create(self._collection, body)
            return True
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if held and holder != self._identity:
            raise LeaseLostError(f"the lease {self._name} is held by {holder or 'nobody'} now")
        if holder and holder != self._identity:
            version = lease["metadata"]["resourceVersion"]
            if version != self._observed[0]:
                self._observed = (version, now)
            if now < self._observed[1] + int(spec.get("leaseDurationSeconds") or DURATION_SECONDS):
                return False
        lease["spec"] = self._spec(spec, taken=holder != self._identity)
        lease["metadata"]["ownerReferences"] = self._owners
        await self._client.replace(self._path, lease)
        return True

    def _spec(self, before: dict[str, Any], taken: bool) -> dict[str, Any]:
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": moment if taken else before.get("acquireTime", moment),
            "renewTime": moment,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (1 if taken and before else 0),
        }
