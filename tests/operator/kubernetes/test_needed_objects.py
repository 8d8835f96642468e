"""The Secret, Service and ConfigMap without which a pod does not run."""

import base64
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from emberscale_operator.controller import BackendUnavailableError
from emberscale_operator.kubernetes.client import ApiError, ApiInternalError
from memory_api import WANTED, MemoryApi, Operator, names_of, new_api


def needed_by_pods(api: MemoryApi) -> set[str]:
    """Returns the paths of the objects without which a pod does not run."""
    return {path for path in api.objects if path.split("/")[-2] in ("services", "configmaps")}


async def test_a_pod_that_is_created_again_finds_what_others_deleted() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    needed = needed_by_pods(api)
    assert len(needed) == 2
    for path in needed:
        del api.objects[path]
    for slot in ("worker-0", "master-0"):
        api.end_pod(api.live_pod(slot), 1)
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert needed_by_pods(api) == needed


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_secret_that_others_deleted_comes_back_as_it_was_while_the_operator_knows_it(restarted: bool) -> None:
    """Members show its token to each other, so another one would part old members from new ones."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    path = "/api/v1/namespaces/team-a/secrets/ctr-token"
    if restarted:
        operator.controller = operator.start()
        api.end_pod(api.live_pod("worker-1"), 1)
        api.sync()
        await operator.settle()
    before = api.objects.pop(path)
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle()
    after = api.objects[path]
    assert after["data"] == before["data"]
    assert names_of(api.live_pods()) == WANTED


@pytest.mark.parametrize("deleted_by_others", [False, True])
async def test_a_node_does_not_keep_the_secrets_of_a_deleted_job_for_the_next_of_its_name(
    deleted_by_others: bool,
) -> None:
    """While any pod on it mounts an immutable Secret, a kubelet gives new pods that one, whoever has its name now."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    token = "/api/v1/namespaces/team-a/secrets/ctr-token"
    if deleted_by_others:
        del api.objects[token]
        api.end_pod(api.live_pod("worker-0"), 1)
        api.sync()
        await operator.settle()
    secrets = [path for path in api.objects if "/secrets/" in path]
    assert token in secrets
    assert len(secrets) == 2
    assert not any(api.objects[path].get("immutable") for path in secrets)


async def test_a_secret_that_others_changed_goes_to_no_new_pod_until_it_is_as_it_was() -> None:
    """Whoever runs already has read it: a new pod with another token could talk to none of them."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    path = "/api/v1/namespaces/team-a/secrets/ctr-token"
    before = dict(api.objects[path]["data"])
    api.objects[path]["data"] = before | {"token": "b3RoZXI="}
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == [slot for slot in WANTED if slot != "worker-0"]
    assert api.body["status"]["message"].startswith("worker-0: somebody has changed secret ctr-token: delete it")
    del api.objects[path]
    await operator.settle(20)
    assert names_of(api.live_pods()) == WANTED
    assert api.objects[path]["data"] == before


async def test_a_secret_that_others_deleted_while_no_operator_ran_keeps_the_password_of_redis() -> None:
    """Masters read it in another Secret, and the Redis user gets it: with two passwords, no master could start."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    path = "/api/v1/namespaces/team-a/secrets/ctr-token"
    before = api.objects.pop(path)["data"]
    operator.controller = operator.start()
    api.end_pod(api.live_pod("master-0"), 1)
    api.sync()
    await operator.settle()
    after = api.objects[path]["data"]
    assert after["store-password"] == before["store-password"]
    assert after["token"] != before["token"]
    (url,) = (body["data"]["redis-url"] for name, body in api.objects.items() if "/secrets/ctr-store-" in name)
    assert base64.b64decode(after["store-password"]).decode() in base64.b64decode(url).decode()


@pytest.mark.parametrize("held", [{"token": "c2VjcmV0"}, {"token": "c2VjcmV0", "store-password": "/w=="}])
async def test_a_secret_that_others_made_without_what_it_holds_is_named(held: dict[str, str]) -> None:
    api = new_api()
    metadata = {"name": "ctr-token", "uid": "theirs", "ownerReferences": [{"uid": "job-uid"}]}
    path = "/api/v1/namespaces/team-a/secrets/ctr-token"
    api.objects[path] = {"metadata": metadata, "data": held}
    operator = Operator(api)
    await operator.settle(3)
    (condition,) = api.body["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "UnusableSecret")
    assert "delete the Secret ctr-token" in condition["message"]
    del api.objects[path]
    await operator.settle(10)
    assert names_of(api.live_pods()) == WANTED


async def test_what_pods_need_is_looked_for_once_for_all_pods_that_are_created_at_a_time() -> None:
    api = new_api()
    asked: Counter[str] = Counter()
    get = api.get

    async def counted(path: str, **query: str) -> dict[str, Any]:
        asked[path.split("/")[-2]] += 1
        return await get(path, **query)

    api.get = counted  # type: ignore[method-assign]
    operator = Operator(api)
    await operator.settle()
    first = asked.copy()
    assert (first["services"], first["configmaps"]) == (1, 1)
    await operator.settle()
    assert asked == first, "where no pod is created, nothing is looked for"


async def test_an_operator_that_starts_where_a_quota_of_objects_is_used_up_continues_the_job() -> None:
    api = new_api()
    await Operator(api).settle()
    create = api.create

    async def full(path: str, body: dict[str, Any]) -> dict[str, Any]:
        kind = path.rsplit("/", 1)[1]
        if kind in ("secrets", "services", "configmaps"):
            raise ApiError(403, "Forbidden", f"{kind} is forbidden: exceeded quota: objects, requested: count/{kind}=1")
        return await create(path, body)

    api.create = full  # type: ignore[method-assign]
    operator = Operator(api)
    api.end_pod(api.live_pod("worker-0"), 137)
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(403, "Forbidden", "secrets is forbidden: exceeded quota: q"),
        ApiError(403, "Forbidden", "it is being terminated", frozenset({"NamespaceTerminating"})),
        ApiInternalError("failed calling webhook"),
    ],
)
async def test_a_master_whose_secret_cannot_be_made_is_called_later_and_the_log_says_why(
    refusal: ApiError | ApiInternalError,
) -> None:
    api = new_api()
    await Operator(api).settle()
    for path in [path for path in api.objects if "/secrets/" in path]:
        del api.objects[path]
    api.live_pod("master-0")["status"]["podIP"] = "127.0.0.1"
    api.sync()

    async def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise refusal

    api.create = refused  # type: ignore[method-assign]
    with capture_logs() as logs, pytest.raises(BackendUnavailableError, match=str(refusal)):
        await Operator(api).step()
    (told,) = (entry for entry in logs if entry["event"] == "master_not_called")
    assert told["job"] == "team-a/ctr"
    assert str(refusal) in told["problem"]
