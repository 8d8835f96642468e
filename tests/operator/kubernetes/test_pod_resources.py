"""The resources of pods: resizes in place, edits of pods that no node takes, and growth after an OOM kill."""

import copy
from typing import Any

import pytest

from emberscale_operator.controller import BackendUnavailableError
from emberscale_operator.kubernetes.client import ApiError, ApiInternalError, ApiUnavailableError
from memory_api import BACK_OFF, MemoryApi, Operator, names_of, pauses
from training_jobs import job_body


async def test_a_resize_is_told_when_the_container_has_its_new_limits() -> None:
    api = MemoryApi(job_body(worker={"replicas": 1, "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}))
    operator = Operator(api)
    await operator.settle()
    worker = api.live_pod("worker-0")
    limits = {"cpu": "1", "memory": "1Gi"}
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    running = {"name": "worker", "state": state, "resources": {"limits": limits}}
    worker["status"] = {**worker["status"], "containerStatuses": [running]}
    api.sync()
    await operator.settle()
    worker["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "1500m", "memory": str(2 << 30)}
    waits = {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "node is full"}
    worker["status"] = {**worker["status"], "conditions": [*worker["status"]["conditions"], waits]}
    api.sync()
    await operator.settle()
    assert "FailedToResizeWorkerPod" in api.events
    assert "ResizedWorkerPod" not in api.events
    limits |= {"cpu": "1500m", "memory": str(2 << 30)}
    worker["status"]["conditions"].pop()
    api.sync()
    operator.controller = operator.start()
    await operator.settle()
    told = [body["message"] for path, body in api.objects.items() if "/events/" in path]
    resized = "ctr-worker-0-1 was resized in place, without a restart: cpu 1 -> 1.5, memory 1024Mi -> 2048Mi"
    assert resized in told
    assert api.events.count("ResizedWorkerPod") == 1
    assert next(m for m in api.body["status"]["members"] if m["role"] == "worker")["memory"] == "2048Mi"


MIB = 1 << 20


def asks(memory: str) -> dict[str, Any]:
    return {"replicas": 1, "resources": {"limits": {"memory": memory}}}


async def test_a_pod_that_no_node_takes_follows_an_edit_of_its_resources() -> None:
    api = MemoryApi(job_body(ps=asks("500Gi")))
    create = api.create

    async def rounding(path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Gives pods more than they ask for, as some clusters do."""
        for container in body["spec"]["containers"] if path.endswith("/pods") else ():
            limits = container.get("resources", {}).get("limits", {})
            limits |= {"memory": str(int(limits["memory"]) + MIB)} if limits else {}
        return await create(path, body)

    def crowd() -> None:
        for pod in api.all_pods():
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [unplaced]}
        api.sync()

    api.create = rounding  # type: ignore[method-assign]
    operator = Operator(api)
    for _ in range(3):
        await operator.step()
        crowd()
    assert api.live_pod("ps-0")["metadata"]["name"] == "ctr-ps-0-1"
    api.edit(ps=asks("5Gi"))
    for _ in range(6):
        await operator.step()
        crowd()
    server = api.live_pod("ps-0")
    assert server["metadata"]["name"] == "ctr-ps-0-2"
    assert server["spec"]["containers"][0]["resources"]["limits"]["memory"] == str((5 << 30) + MIB)
    assert api.live_pod("worker-0")["metadata"]["name"] == "ctr-worker-0-1"
    (member,) = (member for member in api.body["status"]["members"] if member["role"] == "ps")
    assert not {"restarts", "streak", "faults", "notBefore"} & member.keys()


async def test_a_pod_that_no_node_takes_is_not_replaced_at_each_look_where_its_limits_never_fit() -> None:
    """A policy takes annotations away, and gives pods other limits."""
    api = MemoryApi(job_body(ps=asks("500Gi")))
    create = api.create

    async def strict(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods"):
            body = copy.deepcopy(body)
            del body["metadata"]["annotations"]["emberscale.io/limits"]
            for container in body["spec"]["containers"]:
                container["resources"] = {"limits": {"memory": "8Gi"}}
        return await create(path, body)

    api.create = strict  # type: ignore[method-assign]
    operator = Operator(api)
    for _ in range(100):
        await operator.step(1.0)
        for pod in api.all_pods():
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [unplaced]}
        api.sync()
    history = api.body["status"]["members"]
    assert next(one["incarnation"] for one in history if one["role"] == "ps") == 4, "each stays for half a minute"


@pytest.mark.parametrize(
    ("refusal", "attempts", "until"),
    [
        (ApiError(403, "Forbidden", "exceeded quota: q"), 3, "for now"),
        (ApiError(409, "Conflict", "the object has been modified"), 3, "for now"),
        (ApiInternalError("failed calling webhook"), 3, "for now"),
        (ApiError(404, "NotFound", "the server could not find the requested resource"), 1, "until it restarts"),
        (ApiError(422, "Invalid", "resize is not supported"), 1, "until it restarts"),
    ],
)
async def test_a_refused_resize_is_tried_again_unless_the_pod_cannot_be_resized(
    refusal: ApiError | ApiInternalError, attempts: int, until: str
) -> None:
    api = MemoryApi(job_body(worker={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}}))
    operator = Operator(api)
    await operator.settle()
    asked: list[Any] = []
    patch = api.patch

    async def resize(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        if not path.endswith("/resize"):
            return await patch(path, body, kind)
        (container,) = body["spec"]["containers"]
        assert body["metadata"] == {"uid": api.live_pod("worker-0")["metadata"]["uid"]}, "for no other of its name"
        asked.append(container["resources"]["limits"]["memory"])
        if len(asked) < 3:
            raise refusal
        api.live_pod("worker-0")["spec"]["containers"][0]["resources"] = container["resources"]
        return {}

    api.patch = resize  # type: ignore[method-assign]
    api.edit(worker={"replicas": 1, "resources": {"limits": {"memory": "2Gi"}}})
    await operator.settle()
    assert len(asked) == min(attempts, 2), "it is not asked at each look"
    await operator.settle(20)
    assert asked == [str(2 << 30)] * attempts
    (told,) = (body for body in api.objects.values() if body.get("reason") == "FailedToResizeWorkerPod")
    assert f"keeps its resources {until}: {refusal}" in told["message"]


async def test_a_resize_that_is_never_answered_holds_up_no_other_action() -> None:
    """A webhook that hangs keeps the API server from an answer for longer than the operator waits."""
    limits = {"resources": {"limits": {"memory": "1Gi"}}}
    api = MemoryApi(job_body(ps={"replicas": 1, **limits}, worker={"replicas": 2}))
    operator = Operator(api)
    await operator.settle()
    patch = api.patch

    async def hanging(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        if path.endswith("/resize"):
            raise ApiUnavailableError("TimeoutError")
        return await patch(path, body, kind)

    api.patch = hanging  # type: ignore[method-assign]
    api.edit(ps={"replicas": 1, "resources": {"limits": {"memory": "2Gi"}}}, worker={"replicas": 3})
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.step()  # it does not ask again so soon
    assert names_of(api.live_pods()) == ["master-0", "ps-0", "worker-0", "worker-1", "worker-2"]


async def test_a_resize_that_others_undo_is_asked_for_less_and_less_often() -> None:
    """A webhook may round the limits again, and an autoscaler may set its own."""
    api = MemoryApi(job_body(worker={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}}))
    operator = Operator(api)
    await operator.settle()
    asked: list[float] = []
    patch = api.patch

    async def resize(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        if not path.endswith("/resize"):
            return await patch(path, body, kind)
        asked.append(api.now)
        return {}

    api.patch = resize  # type: ignore[method-assign]
    api.edit(worker={"replicas": 1, "resources": {"limits": {"memory": "2Gi"}}})
    await operator.settle(1300)
    assert pauses(asked) == BACK_OFF


async def test_a_pod_that_ran_out_of_memory_comes_back_with_more() -> None:
    api = MemoryApi(job_body(ps={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}}))
    operator = Operator(api)
    await operator.settle()
    ps = api.live_pod("ps-0")
    api.end_pod(ps, 137, "OOMKilled")
    api.sync()
    # the exit has to be reported to a master, which is away here
    await operator.settle()
    ps = api.live_pod("ps-0")
    assert ps["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(1536 << 20)
    assert api.body["status"]["ps"]["memoryBytes"] == 1536 << 20
    assert api.body["status"]["ps"]["restarts"] == 1
    assert {"OOMKilledPSPod", "IncreasedPSMemory"} <= set(api.events)


async def test_memory_grows_from_the_limit_that_a_pod_was_killed_at_and_not_from_one_that_came_too_late() -> None:
    """This holds for an operator that saw the pod run, and for the next operator."""
    api = MemoryApi(job_body(ps={"replicas": 1, "resources": {"limits": {"memory": "1Gi"}}}))
    operator = Operator(api)
    await operator.settle()
    ps = api.live_pod("ps-0")
    running = {
        "name": "ps",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    ps["status"]["containerStatuses"] = [running]
    api.sync()
    await operator.settle(2)
    operator.controller = operator.start()
    ps["spec"]["containers"][0]["resources"]["limits"]["memory"] = "4Gi"
    api.end_pod(ps, 137, "OOMKilled")
    api.sync()
    await operator.settle()
    assert api.body["status"]["ps"]["memoryBytes"] == 1536 << 20
