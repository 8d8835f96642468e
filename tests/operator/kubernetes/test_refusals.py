"""Requests that the API server refuses: the status says why, and each is repeated less and less often."""

from typing import Any

import pytest

from emberscale_api.job.status import JobPhase
from emberscale_operator.controller import BackendUnavailableError
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.client import ApiError, ApiInternalError, ApiUnavailableError
from emberscale_operator.machine import JobStanding
from memory_api import BACK_OFF, WANTED, MemoryApi, Operator, names_of, new_api, pauses, slot_of
from training_jobs import job_body


async def test_a_pod_that_may_not_be_deleted_holds_up_no_other_action() -> None:
    api = MemoryApi(job_body(ps={"replicas": 1}, worker={"replicas": 2}))
    operator = Operator(api)
    await operator.settle()
    delete = api.delete

    async def guarded(path: str, uid: str, grace_seconds: int | None = None) -> None:
        if path.endswith("ctr-master-0-1"):
            raise ApiError(403, "Forbidden", "ValidatingAdmissionPolicy 'keep' denied request")
        await delete(path, uid, grace_seconds)

    api.delete = guarded  # type: ignore[method-assign]
    api.edit(worker={"replicas": 3}, runPolicy={"backoffLimit": 9})
    with pytest.raises(BackendUnavailableError, match="denied request"):
        await operator.step()
    assert names_of(api.live_pods()) == ["master-0", "ps-0", "worker-0", "worker-1", "worker-2"]


@pytest.mark.parametrize(
    ("refusal", "reason", "words"),
    [
        (
            ApiError(403, "Forbidden", "pods is forbidden: exceeded quota: q, requested: pods=1"),
            "QuotaExceeded",
            "exceeded quota: q",
        ),
        (
            ApiInternalError('Internal error occurred: failed calling webhook "guard.example.com"'),
            "InternalError",
            'failed calling webhook "guard.example.com"',
        ),
        (
            ApiError(403, "image must come from x", 'admission webhook "guard" denied the request'),
            "Refused",
            'image must come from x: admission webhook "guard" denied the request',
        ),
        (ApiError(403, "", "denied"), "Refused", "denied"),
    ],
)
async def test_what_refuses_a_pod_is_named_and_waited_for(
    refusal: ApiError | ApiUnavailableError, reason: str, words: str
) -> None:
    api = new_api()
    api.refusal = refusal
    operator = Operator(api)
    await operator.settle(3)
    (condition,) = api.body["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", reason)
    assert words in condition["message"]
    api.refusal = None
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert api.body["status"]["conditions"][0]["status"] == "True"


@pytest.mark.parametrize("by", ["a webhook that takes labels away", "a pod of the same name"])
async def test_a_pod_without_the_labels_that_it_needs_is_told_and_not_made_at_each_look(by: str) -> None:
    """No watch shows it, so it would seem to be missing for ever."""
    api = new_api()
    asked: list[float] = []
    create = api.create

    async def stripping(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods") and slot_of(body) == "ps-0":
            asked.append(api.now)
            body = {**body, "metadata": {**body["metadata"], "labels": {"app": "x"}}}
        return await create(path, body)

    if by == "a pod of the same name":
        owners = [{"uid": "job-uid"}]
        metadata = {"name": "ctr-ps-0-1", "uid": "theirs", "ownerReferences": owners, "labels": {"app": "x"}}
        theirs = {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}}
        api.objects["/api/v1/namespaces/team-a/pods/ctr-ps-0-1"] = theirs
    api.create = stripping  # type: ignore[method-assign]
    api.live_pods = list  # type: ignore[method-assign]  # it counts by labels
    operator = Operator(api)
    for _ in range(120):
        await operator.step(0.1)
        api.sync()
    assert pauses(asked) == [5, 5]
    (condition,) = api.body["status"]["conditions"]
    assert condition["reason"] == "LabelsChanged"
    assert "pod ctr-ps-0-1 does not have the labels" in condition["message"]


@pytest.mark.parametrize(("refused", "goes_on"), [("worker-", "False"), ("worker-1", "True")])
async def test_a_job_that_trains_waits_once_it_has_no_worker_any_more(
    refused: str, goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LimitRange may appear in the middle of a job, and be noticed when a node is drained."""
    api = MemoryApi(job_body(ps={"replicas": 1}, worker={"replicas": 2}))

    async def recall(_: KubernetesBackend) -> tuple[JobStanding, None]:
        return JobStanding(phase=JobPhase.TRAINING, message="epoch 1 of 2"), None

    monkeypatch.setattr(KubernetesBackend, "recall", recall)
    create = api.create

    async def bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods") and slot_of(body).startswith(refused):
            raise ApiError(403, "Forbidden", "maximum memory usage per Container is 512Mi, but limit is 1Gi")
        return await create(path, body)

    api.create = bounded  # type: ignore[method-assign]
    await Operator(api).settle()
    status = api.body["status"]
    (condition,) = (one for one in status["conditions"] if one["type"] == "Progressing")
    assert (status["phase"], condition["status"]) == ("Training", goes_on)
    assert "maximum memory usage per Container is 512Mi" in condition["message"]
    assert (condition["reason"] == "Forbidden") == (goes_on == "False")


async def test_a_quota_that_is_used_up_is_asked_less_and_less_often() -> None:
    api = new_api()
    api.refusal = ApiError(403, "Forbidden", "pods is forbidden: exceeded quota: q, requested: pods=1")
    asked: list[float] = []
    create = api.create

    async def counted(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods") and slot_of(body) == "ps-0":
            asked.append(api.now)
        return await create(path, body)

    api.create = counted  # type: ignore[method-assign]
    operator = Operator(api)
    await operator.settle(1300)
    assert pauses(asked) == BACK_OFF
    api.refusal = None
    await operator.settle(310)
    assert names_of(api.live_pods()) == WANTED


async def test_a_refusal_that_reads_differently_each_time_is_not_asked_for_at_each_look() -> None:
    """The status says it, and the watch shows that status at once."""
    api = new_api()
    asked: list[float] = []
    create = api.create

    async def guarded(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods") and slot_of(body) == "ps-0":
            asked.append(api.now)
            raise ApiError(403, "Forbidden", f'admission webhook "guard" denied request {len(asked)}')
        return await create(path, body)

    api.create = guarded  # type: ignore[method-assign]
    operator = Operator(api)
    for _ in range(120):
        await operator.step(0.1)
        api.sync()
    assert pauses(asked) == [5, 5]


async def test_refusals_of_sizes_that_nobody_wants_any_more_are_forgotten() -> None:
    """A job's master runs a team's own code, and may plan other sizes without end."""
    api = new_api()
    api.refusal = ApiError(403, "Forbidden", "pods is forbidden: exceeded quota: q, requested: pods=1")
    operator = Operator(api)
    for size in range(100):
        api.edit(worker={"replicas": 1, "resources": {"limits": {"memory": f"{size + 100}Mi"}}})
        await operator.step(100.0)
    assert len(operator.controller._backend._actuator._refusals) < 10  # type: ignore[attr-defined]


async def test_a_namespace_that_is_being_deleted_is_asked_once() -> None:
    api = new_api()
    asked: list[str] = []
    real = api.create

    async def create(path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(path)
        return await real(path, body)

    api.create = create  # type: ignore[method-assign]
    text = "pods is forbidden: unable to create new content in namespace team-a because it is being terminated"
    api.refusal = ApiError(403, "Forbidden", text, frozenset({"NamespaceTerminating"}))
    operator = Operator(api)
    await operator.settle(10, seconds=10)
    assert len([path for path in asked if path.endswith("/pods")]) == 1
