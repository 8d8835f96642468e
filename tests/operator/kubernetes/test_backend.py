"""One job's controller against an in-memory API server, and killed at any of its calls."""

import asyncio
import base64
import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobPlan, JobStatus, ProtectionStatus
from emberscale_api.job.status import JobPhase
from emberscale_api.shape import RoleShape
from emberscale_operator.controller import BackendUnavailableError, News, Observed
from emberscale_operator.kubernetes import disruption
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.client import ApiError, ApiInternalError, ApiUnavailableError
from emberscale_operator.kubernetes.disruption import DisruptionBudget
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_state import GRACE_SECONDS
from emberscale_operator.machine import Backoff, Decision, JobIntent, JobStanding, Policy
from eventually import unwrap
from memory_api import KEY, START, MemoryApi, Operator, slot_of
from training_jobs import job_body


def names_of(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(slot_of(pod) for pod in pods)


WANTED = ["master-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]


def new_api(**spec: Any) -> MemoryApi:
    return MemoryApi(job_body(ps={"replicas": 2}, worker={"replicas": 3}, **spec))


async def test_a_job_gets_its_pods_and_a_status() -> None:
    api = new_api()
    await Operator(api).settle()
    assert names_of(api.live_pods()) == WANTED
    status = api.body["status"]
    assert status["worker"]["summary"] == "3/3"
    assert status["observedGeneration"] == 1
    assert [condition["type"] for condition in status["conditions"]] == ["Progressing"]
    assert api.events.count("CreatedWorkerPod") == 3


BUDGETS = "/apis/policy/v1/namespaces/team-a/poddisruptionbudgets"
BUDGET = f"{BUDGETS}/ctr-ps"


def route(routed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a plan for four servers, of which `routed` are in the routing table."""
    shapes = {Role.PS: RoleShape(4), Role.WORKER: RoleShape(3)}

    async def recall(_: KubernetesBackend) -> tuple[JobStanding, JobPlan]:
        return JobStanding(), JobPlan(shapes=shapes, routed_ps=routed)

    monkeypatch.setattr(KubernetesBackend, "recall", recall)


@pytest.mark.parametrize("routed", [0, 2, 3])
async def test_all_servers_with_rows_but_one_are_kept(routed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    api = new_api()
    route(routed, monkeypatch)
    await Operator(api).settle()
    if not routed:
        assert BUDGET not in api.objects
        return
    spec = api.objects[BUDGET]["spec"]
    assert spec["minAvailable"] == routed - 1
    assert spec["selector"]["matchLabels"] == {"emberscale.io/job-name": "ctr", "emberscale.io/role": "ps"}


async def test_the_next_operator_keeps_as_many_as_there_are_then(job: Job) -> None:
    api: Any = new_api()
    await DisruptionBudget(api).keep(job, 2, START)
    budget = DisruptionBudget(api)
    for servers, kept in ((4, 3), (0, 3), (1, 0)):
        await budget.keep(job, servers, START)
        assert api.objects[BUDGET]["spec"]["minAvailable"] == kept
    writes = dict(api.writes)
    await budget.keep(job, 1, START)
    assert api.writes == writes


async def test_a_job_gets_its_budget_once_that_of_an_earlier_job_of_its_name_is_gone(job: Job) -> None:
    api: Any = new_api()
    api.objects[BUDGET] = {"metadata": {"uid": "earlier", "name": "ctr-ps"}, "spec": {"minAvailable": 7}}
    budget = DisruptionBudget(api)
    await budget.keep(job, 2, START)
    del api.objects[BUDGET]
    with capture_logs() as logs:
        for seconds in range(60):
            await budget.keep(job, 2, START + seconds)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 1
    assert (api.writes["create"], logs) == (1, [])


async def test_a_webhook_for_budgets_that_hangs_is_asked_less_often(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = new_api()
    budget, asked = DisruptionBudget(api), list[int]()

    async def hanging(path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(seconds)
        elapsed[0] += 10.0
        raise ApiInternalError("failed calling webhook: context deadline exceeded")

    elapsed = [0.0]
    monkeypatch.setattr(disruption, "time", SimpleNamespace(monotonic=lambda: elapsed[0]))
    api.create = hanging
    for seconds in range(300):
        await budget.keep(job, 2, START + seconds)
    assert asked == [0, 115, 230]


async def test_a_budget_whose_answer_was_lost_is_looked_at_again(job: Job) -> None:
    api: Any = new_api()
    budget, patch = DisruptionBudget(api), api.patch
    await budget.keep(job, 2, START)

    async def lossy(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        await patch(path, body, kind)
        raise ApiUnavailableError("connection reset")

    api.patch = lossy
    with pytest.raises(ApiUnavailableError):
        await budget.keep(job, 4, START)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 3
    api.patch = patch
    await budget.keep(job, 2, START)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 1


async def test_a_budget_that_is_refused_or_of_somebody_else_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = new_api()
    route(2, monkeypatch)
    theirs = {"metadata": {"uid": "theirs", "name": "ctr-ps"}, "spec": {"minAvailable": 7}}
    api.objects[BUDGET] = copy.deepcopy(theirs)
    await Operator(api).settle()
    assert names_of(api.live_pods()) == WANTED
    assert api.objects[BUDGET] == theirs


@pytest.mark.parametrize("kind", ["events", "poddisruptionbudgets"])
async def test_a_webhook_that_fails_for_a_side_object_holds_up_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = new_api()
    route(2, monkeypatch)
    create, fails = api.create, True

    async def guarded(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if fails and path.endswith(f"/{kind}"):
            raise ApiInternalError("failed calling webhook")
        return await create(path, body)

    api.create = guarded  # type: ignore[method-assign]
    operator = Operator(api)
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert api.body["status"]["worker"]["summary"] == "3/3"
    fails = False
    await operator.settle(2, seconds=60.0)
    api.end_pod(api.live_pod("worker-0"), 137)
    api.sync()
    await operator.settle(2)
    assert BUDGET in api.objects
    assert api.events.count("CreatedPSPod") == 2, "what could not be written then is written now"


async def test_pods_that_no_watch_shows_are_not_made_again() -> None:
    """A watch may be late by minutes, as with an API server that has too much to do."""
    api = new_api()
    operator = Operator(api)
    for _ in range(60):
        await operator.step(5.0)
    assert names_of(api.all_pods()) == WANTED
    del api.objects["/api/v1/namespaces/team-a/pods/ctr-worker-0-1"]
    for _ in range(20):
        await operator.step(5.0)
    assert names_of(api.all_pods()) == WANTED, "what the API server does not have any more is made again"
    assert "/api/v1/namespaces/team-a/pods/ctr-worker-0-2" in api.objects
    api.run_pods()
    api.sync()
    await operator.settle()
    assert names_of(api.all_pods()) == WANTED
    assert api.body["status"]["worker"]["summary"] == "3/3"


@pytest.mark.parametrize(("ready", "lost_after"), [("True", 85.0), ("False", 15.0)])
async def test_a_server_that_leaves_has_its_time_though_our_clock_is_ahead(ready: str, lost_after: float) -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    server = api.live_pod("ps-0")
    by_their_clock = datetime.fromtimestamp(api.now + 85.0 - 300.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    server["metadata"] |= {"deletionTimestamp": by_their_clock, "deletionGracePeriodSeconds": 85}
    server["status"]["conditions"] = [{"type": "Ready", "status": ready}]
    api.sync()
    began = api.now
    while not any(pod["metadata"]["name"] == "ctr-ps-0-2" for pod in api.all_pods()):
        await operator.step(1.0)
        assert api.now < START + 200.0
    assert lost_after < api.now - began < lost_after + 20.0


async def test_a_resync_without_news_writes_nothing() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.writes.clear()
    for _ in range(5):
        await operator.step(30.0)
    operator.controller = operator.start()
    await operator.step(30.0)
    assert not api.writes


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(1, 26))
async def test_killed_at_any_call_it_makes_no_duplicate_no_orphan_and_loses_no_event(call: int, after: bool) -> None:
    undisturbed, api = new_api(), new_api()
    await Operator(undisturbed).settle()
    api.kill_in, api.kill_after = call, after
    await Operator(api).settle()
    assert names_of(api.all_pods()) == WANTED
    assert max(api.most_live.values()) == 1
    assert Counter(api.events) == Counter(undisturbed.events)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(1, 16))
def test_killed_at_any_call_it_tells_how_a_job_lost_pods_and_shrank(call: int, after: bool) -> None:
    def told(kill_in: int) -> Counter[str]:
        api = new_api()

        async def scenario() -> None:
            operator = Operator(api)
            await operator.settle()
            api.end_pod(api.live_pod("ps-0"), 137, "OOMKilled")
            api.edit(worker={"replicas": 1})
            api.kill_in, api.kill_after = kill_in, after
            await operator.settle()

        asyncio.run(scenario())
        return Counter(api.events)

    undisturbed = told(1 << 30)
    assert undisturbed["DeletedWorkerPod"] == 2
    assert undisturbed["OOMKilledPSPod"] == 1
    assert told(call) == undisturbed


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


async def test_a_protected_job_says_how_many_servers_its_manifest_lets_it_lose() -> None:
    api = MemoryApi(job_body(ps={"replicas": 3}, faultTolerance={"strategy": "ErasureCoding", "parity": 2}))
    operator = Operator(api)
    await operator.settle()
    standing = JobStanding(JobPhase.TRAINING)
    status = JobStatus(JobPhase.TRAINING, protection=ProtectionStatus(protected=True))
    news = News(standing, Decision(standing, (), ()), plan_before=None, plan=None, status=status, answers=True)
    await operator.controller._backend.report(news, api.now)
    (condition,) = (one for one in api.body["status"]["conditions"] if one["type"] == "Protected")
    assert "any 2 parameter servers at once" in condition["message"]


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
    assert [round(later - sooner) for sooner, later in itertools.pairwise(asked)] == [
        5,
        10,
        20,
        40,
        80,
        160,
        300,
        300,
        300,
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["kill pod", "delete pod", "evict pod", "scale", "sync", "run", "step", "kill operator"]),
            st.integers(0, 7),
        ),
        max_size=30,
    )
)
@settings(max_examples=20)
def test_whatever_happens_there_is_one_pod_a_slot_in_the_end(events: list[tuple[str, int]]) -> None:
    api = new_api()
    workers = 3

    async def scenario() -> None:
        nonlocal workers
        operator = Operator(api)
        for event, number in events:
            live = api.live_pods()
            pod = live[number % len(live)] if live else None
            match event:
                case "kill pod" if pod:
                    api.end_pod(pod, 137)
                case "evict pod" if pod:
                    api.end_pod(pod, 137)
                    pod["status"]["reason"] = "Evicted"
                case "delete pod" if pod:
                    del api.objects[f"/api/v1/namespaces/team-a/pods/{pod['metadata']['name']}"]
                case "scale":
                    workers = 1 + number
                    api.body["spec"]["worker"] = {"replicas": workers}
                    api.body["metadata"]["generation"] += 1
                case "sync":
                    api.sync()
                case "run":
                    api.run_pods()
                case "kill operator":
                    api.kill_in, api.kill_after = 1 + number, number % 2 == 0
                case _:
                    await operator.step()
        api.kill_in = 1 << 30
        await operator.settle(6, seconds=20.0)  # a pod that is never seen counts as live for a while

    asyncio.run(scenario())
    assert names_of(api.live_pods()) == sorted(
        ["master-0", "ps-0", "ps-1", *(f"worker-{index}" for index in range(workers))]
    )
    assert all(count == 1 for count in api.most_live.values())


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


async def test_members_that_are_done_are_not_replaced_before_the_master_has_said_that_it_wants_any() -> None:
    """They may be done because the job is, which an operator that has just started cannot know."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    for pod in api.live_pods():
        if slot_of(pod) in ("worker-0", "ps-1"):
            api.end_pod(pod, 0, "Completed")
        if slot_of(pod) == "worker-1":
            api.end_pod(pod, 1)
    operator.controller = operator.start()
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == ["master-0", "ps-0", "worker-1", "worker-2"]
    restarts = {
        member["role"] + str(member["index"]): member.get("restarts", 0) for member in api.body["status"]["members"]
    }
    assert (restarts["worker0"], restarts["ps1"], restarts["worker1"]) == (0, 0, 1)


def test_errors_of_its_own_fail_a_job_and_evictions_do_not() -> None:
    def outcome(evicted: bool) -> tuple[str, str]:
        api = new_api(runPolicy={"backoffLimit": 2})

        async def scenario() -> None:
            operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=2))
            await operator.settle()
            for _ in range(5):
                for pod in [pod for pod in api.live_pods() if slot_of(pod) == "worker-0"]:
                    api.end_pod(pod, 1)
                    if evicted:
                        pod["status"]["reason"] = "Evicted"
                api.sync()
                await operator.settle(3)

        asyncio.run(scenario())
        return api.body["status"]["phase"], api.body["status"].get("reason", "")

    assert outcome(evicted=True)[0] == "Pending"
    assert outcome(evicted=False) == ("Failed", "BackoffLimitExceeded")


async def test_a_failed_job_keeps_its_status_and_loses_its_running_pods() -> None:
    api = new_api(runPolicy={"backoffLimit": 0})
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert api.live_pods() == []
    assert names_of(api.all_pods()) == ["worker-0"], "the one that failed stays, for its log"
    conditions = {condition["type"]: condition["status"] for condition in api.body["status"]["conditions"]}
    assert conditions == {"Progressing": "False", "Failed": "True"}


async def test_a_job_that_is_suspended_from_the_start_gets_no_pod_until_it_is_resumed() -> None:
    api = new_api(suspend=True)
    operator = Operator(api)
    await operator.settle(3)
    assert api.all_pods() == []
    assert api.body["status"]["phase"] == "Suspended"
    assert "startTime" not in api.body["status"]
    api.edit(suspend=False)
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    conditions = {condition["type"]: condition["status"] for condition in api.body["status"]["conditions"]}
    assert conditions == {"Progressing": "True", "Suspended": "False"}


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
    assert [round(later - sooner) for sooner, later in itertools.pairwise(asked)] == [5, 5]
    (condition,) = api.body["status"]["conditions"]
    assert condition["reason"] == "LabelsChanged"
    assert "pod ctr-ps-0-1 does not have the labels" in condition["message"]


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
    assert [round(later - sooner) for sooner, later in itertools.pairwise(asked)] == [
        5,
        10,
        20,
        40,
        80,
        160,
        300,
        300,
        300,
    ]
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
    assert [round(later - sooner) for sooner, later in itertools.pairwise(asked)] == [5, 5]


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


async def test_a_finished_job_is_deleted_after_its_time() -> None:
    api = new_api(runPolicy={"backoffLimit": 0, "ttlAfterFinished": "60s"})
    job_path = "/apis/emberscale.io/v1alpha1/namespaces/team-a/trainingjobs/ctr"
    deleted: list[float] = []
    real = api.delete

    async def delete(path: str, uid: str, grace_seconds: int | None = None) -> None:
        if path == job_path:
            deleted.append(api.now)
        await real(path, uid, grace_seconds)

    api.delete = delete  # type: ignore[method-assign]
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert not deleted
    await operator.step(60)
    assert deleted


async def test_servers_of_a_job_that_is_over_get_no_time_to_give_rows_away() -> None:
    api = new_api(runPolicy={"backoffLimit": 0})
    graces: dict[str, int | None] = {}
    real = api.delete

    async def delete(path: str, uid: str, grace_seconds: int | None = None) -> None:
        graces[path.rsplit("/", 1)[1]] = grace_seconds
        await real(path, uid, grace_seconds)

    api.delete = delete  # type: ignore[method-assign]
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    server = api.live_pod("ps-0")["metadata"]["name"]
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert graces[server] == GRACE_SECONDS


async def test_fields_of_a_newer_definition_are_no_trouble() -> None:
    api = new_api(novelty={"level": 3}, training={"momentumOfTomorrow": 0.5})
    operator = Operator(api)
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert api.body["status"]["conditions"][0]["status"] == "True"


async def test_a_job_whose_phase_is_of_another_version_is_kept_and_left_alone() -> None:
    """After a downgrade of the operator, the job must not look like a new one."""
    api = new_api()
    await Operator(api).settle()
    left = {**api.body["status"], "phase": "Rebalancing", "novelty": 3}
    api.body["status"] = copy.deepcopy(left)
    for pod in api.all_pods():
        if slot_of(pod) == "worker-0":
            pod["status"]["phase"] = "Failed"
    pods, events = names_of(api.live_pods()), len(api.events)
    api.sync()
    api.writes.clear()
    operator = Operator(api)
    await operator.settle()
    assert names_of(api.live_pods()) == pods
    assert len(api.events) == events
    conditions = api.body["status"].pop("conditions")
    assert {**left, "conditions": None} == {**api.body["status"], "conditions": None}
    (condition,) = conditions
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "Progressing",
        "Unknown",
        "UnreadableStatus",
    )
    assert "cannot read status.phase ('Rebalancing')" in condition["message"]
    assert sum(api.writes.values()) == 1, "what was said is said once"
    api.body["status"] = {**left, "phase": "Training"}
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert api.body["status"]["conditions"][0]["status"] == "True"


async def test_a_running_job_with_a_value_of_a_newer_version_is_looked_after_and_a_new_one_is_refused() -> None:
    """The operator was downgraded, but the definition, which allows more values, was not."""
    api = new_api()
    await Operator(api).settle()
    api.body["spec"]["optimizers"] = {"sparse": {"type": "Shampoo"}}
    api.body["status"]["image"] = "example.org/emberscale:next"
    before = {pod["metadata"]["uid"] for pod in api.all_pods() if slot_of(pod) != "worker-0"}
    api.end_pod(api.live_pod("worker-0"), 137, "Error")
    api.sync()
    await Operator(api).settle()
    assert names_of(api.live_pods()) == WANTED
    assert before <= {pod["metadata"]["uid"] for pod in api.live_pods()}, "no other pod was replaced"
    master = api.live_pod("master-0")
    api.end_pod(master, 137, "Error")
    api.sync()
    await Operator(api).settle()
    (condition,) = api.body["status"]["conditions"]
    assert condition["status"] == "True"
    assert "does not know spec.optimizers.sparse.type ('Shampoo')" in condition["message"]
    manifests = [body["data"]["manifest.json"] for path, body in api.objects.items() if "/configmaps/" in path]
    assert '"type": "Shampoo"' in manifests[-1], "the next master reads what is asked for"

    fresh = new_api(optimizers={"sparse": {"type": "Shampoo"}})
    await Operator(fresh).settle(2)
    assert fresh.all_pods() == []
    assert fresh.body["status"]["conditions"][0]["reason"] == "InvalidSpec"


async def test_a_job_that_was_expelled_from_redis_says_so() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    operator.tenancy.why = "its pods kept 120 MiB in Redis"
    await operator.settle()
    (condition,) = api.body["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "StateTooLarge")
    assert condition["message"] == "its pods kept 120 MiB in Redis"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (
            {"worker": {"template": {"env": [{"name": f"A{i}", "value": "a" * 30_000} for i in range(4)]}}},
            "spec.worker.template.env",
        ),
        ({"ps": {"template": {"annotations": {"note": "a" * 100_000}}}}, "spec.ps.template.annotations.note"),
        ({"data": {"train": [f"/data/{day:0100}" for day in range(8000)]}}, "spec.data.train"),
    ],
    ids=["env", "annotations", "data"],
)
async def test_a_job_that_is_too_large_for_what_it_is_copied_into_is_refused_by_its_field(
    spec: dict[str, Any], path: str
) -> None:
    api = MemoryApi(job_body(**spec))
    await Operator(api).settle(2)
    assert api.all_pods() == []
    (condition,) = api.body["status"]["conditions"]
    assert condition["reason"] == "InvalidSpec"
    assert condition["message"].startswith(f"{path}: is too large: the ")


async def test_what_can_be_done_about_a_value_is_said_however_long_the_value_is() -> None:
    api = new_api(optimizers={"dense": {"type": "a" * 100_000}})
    await Operator(api).settle(2)
    (condition,) = api.body["status"]["conditions"]
    assert condition["message"].startswith("spec.optimizers.dense.type: ")
    assert "of 100000 characters" in condition["message"]
    assert condition["message"].endswith("delete the TrainingJob and apply a corrected one")


async def test_the_job_that_has_the_most_in_a_full_redis_says_so_and_continues() -> None:
    api = new_api()
    operator = Operator(api)
    operator.tenancy.full = "Redis fills up, and of all jobs this one has the most in it"
    await operator.settle()
    (condition,) = api.body["status"]["conditions"]
    assert condition["status"] == "True"
    assert "this one has the most in it" in condition["message"]
    assert names_of(api.live_pods()) == WANTED


async def test_a_spec_that_cannot_run_is_said_and_mended_by_an_edit() -> None:
    api = new_api(optimizers={"dense": {"type": "FTRL"}})
    operator = Operator(api)
    await operator.settle(2)
    assert api.all_pods() == []
    (condition,) = api.body["status"]["conditions"]
    assert condition["reason"] == "InvalidSpec"
    assert "spec.optimizers.dense.type" in condition["message"]
    assert "immutable: delete the TrainingJob" in condition["message"], "the API server refuses that edit"
    del api.body["spec"]["optimizers"]
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED


async def test_what_keeps_a_server_from_starting_is_part_of_the_intent() -> None:
    api = new_api()

    async def intent(operator: Operator) -> JobIntent:
        observed = await operator.controller._backend.observe(api.now)
        assert isinstance(observed, Observed)
        return observed.job

    operator = Operator(api)
    await operator.settle()
    assert (await intent(operator)).waits == ""
    for name in ("ps-1", "worker-0"):
        pod = api.live_pod(name)
        unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": name}
        pod["status"] = {"phase": "Pending", "conditions": [unschedulable]}
    api.sync()
    await operator.step(5.0)
    assert (await intent(operator)).waits == "ps-1: Unschedulable: ps-1"


async def test_a_job_waits_aloud_each_time_that_it_waits() -> None:
    """This includes repeated waits within one generation; each is told once, even by several looks and operators."""
    api = new_api()

    def block(blocked: bool) -> None:
        pod = api.live_pod("ps-0")
        unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
        ready = {"type": "Ready", "status": "True"}
        pod["status"] = {
            "phase": "Pending" if blocked else "Running",
            "conditions": [unschedulable if blocked else ready],
        }
        api.sync()

    operator = Operator(api)
    await operator.settle()
    for times in (1, 2):
        block(True)
        await operator.step(5.0)
        api.sync()
        operator.controller = operator.start()
        await operator.step(5.0)
        assert api.events.count("WaitingForPods") == times
        block(False)
        await operator.step(5.0)


async def test_looks_while_a_pod_is_backed_off_write_nothing() -> None:
    api = new_api()
    operator = Operator(api, Policy(backoff=Backoff(base=60.0), backoff_limit=1000))
    await operator.settle()
    for _ in range(2):  # the first restart is immediate
        api.end_pod(api.live_pod("worker-0"), 1)
        api.sync()
        await operator.settle(3)
    status = api.body["status"]
    assert "worker-0 is restarted at 2026-01-01T00:01:" in status["message"]
    api.writes.clear()
    for _ in range(2):
        await operator.step(3.0)
    assert not api.writes
    operator.controller = operator.start()
    await operator.step(3.0)
    assert api.body["status"] == status, "the next operator says the same"


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


@pytest.mark.parametrize("found", [False, True])
async def test_a_secret_that_others_deleted_comes_back_as_it_was_while_the_operator_knows_it(found: bool) -> None:
    """Members show its token to each other, so another one would part old members from new ones."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    path = "/api/v1/namespaces/team-a/secrets/ctr-token"
    if found:
        said = api.objects[path].pop("stringData")
        api.objects[path]["data"] = {name: base64.b64encode(text.encode()).decode() for name, text in said.items()}
        operator.controller = operator.start()
        api.end_pod(api.live_pod("worker-1"), 1)
        api.sync()
        await operator.settle()
    before = api.objects.pop(path)
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle()
    after = api.objects[path]
    assert (after.get("data"), after.get("stringData")) == (before.get("data"), before.get("stringData"))
    assert after["immutable"]
    assert names_of(api.live_pods()) == WANTED


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
async def test_a_master_whose_secret_cannot_be_made_is_called_later(refusal: ApiError | ApiInternalError) -> None:
    api = new_api()
    await Operator(api).settle()
    for path in [path for path in api.objects if "/secrets/" in path]:
        del api.objects[path]
    api.live_pod("master-0")["status"]["podIP"] = "127.0.0.1"
    api.sync()

    async def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise refusal

    api.create = refused  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailableError, match=str(refusal)):
        await Operator(api).step()


@pytest.mark.parametrize("applied", [False, True])
async def test_a_status_whose_answer_was_lost_is_told_again_in_full(applied: bool) -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    told, server = copy.deepcopy(api.body["status"]), api.live_pod("ps-0")
    running, patch = server["status"], api.patch

    async def lossy(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        if applied:
            await patch(path, body, kind)
        raise ApiUnavailableError("connection reset")

    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    server["status"] = {"phase": "Pending", "conditions": [unschedulable]}
    api.sync()
    api.patch = lossy  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(BackendUnavailableError):
            await operator.step(5.0)
    assert (api.body["status"] != told) == applied
    api.patch = patch  # type: ignore[method-assign]
    server["status"] = running
    api.sync()
    await operator.step(5.0)
    assert api.body["status"] == told
    api.writes.clear()
    await operator.step(30.0)
    assert not api.writes


async def test_the_status_of_a_job_is_not_written_to_a_later_job_of_its_name() -> None:
    api = new_api()
    operator, patch = Operator(api), api.patch
    later = job_body(uid="later")
    later["metadata"]["resourceVersion"] = "1000"

    async def created_anew(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        api.body = later
        return await patch(path, body, kind)

    api.patch = created_anew  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(BackendUnavailableError):
            await operator.step()
    assert "status" not in later
    api.sync()
    assert await operator.controller.step(api.now) is None


async def test_a_status_that_meets_an_edit_is_written_once_the_edit_is_seen() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    seen = api.job(KEY, "job-uid")
    api.edit(worker={"replicas": 4})
    api._seen_body = dict(unwrap(seen))
    told = copy.deepcopy(api.body["status"])
    with pytest.raises(BackendUnavailableError) as conflict:
        await operator.step()
    assert (conflict.value.retry_seconds, api.body["status"]) == (1.0, told)
    api.sync()
    await operator.settle()
    assert api.body["status"]["observedGeneration"] == 2
    assert api.events.count("FailedWorkerPod") == 1


async def test_a_status_is_written_although_a_watch_is_late() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    seen = api.job(KEY, "job-uid")
    api.edit(suspend=False)
    api._seen_body = dict(unwrap(seen))
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    await operator.step()
    assert api.events.count("FailedWorkerPod") == 1
    assert "worker-0" in names_of(api.live_pods())


async def test_statuses_are_written_though_the_versions_of_objects_begin_anew() -> None:
    """As in a cluster whose store was restored from a copy."""
    api = new_api()
    operator = Operator(api)
    api.body["metadata"]["resourceVersion"] = "5000"
    api.sync()
    await operator.settle()
    api.body["metadata"]["resourceVersion"] = "7"
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    await operator.settle()
    assert api.events.count("FailedWorkerPod") == 1
    assert api.body["status"]["worker"]["summary"] == "3/3"


@pytest.mark.parametrize("by_the_next_operator", [False, True])
async def test_a_pod_that_is_wanted_again_before_it_was_deleted_is_like_any_other(by_the_next_operator: bool) -> None:
    api = new_api()
    operator, delete = Operator(api), api.delete
    await operator.settle()

    async def away(path: str, uid: str, grace_seconds: int | None = None) -> None:
        raise ApiUnavailableError("connection refused")

    api.delete = away  # type: ignore[method-assign]
    api.edit(worker={"replicas": 2})
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    assert state_of(api, "worker", 2) == "Deleting"
    api.delete = delete  # type: ignore[method-assign]
    api.edit(worker={"replicas": 3})
    if by_the_next_operator:
        operator.controller = operator.start()
    await operator.settle(seconds=5.0)
    assert state_of(api, "worker", 2) == "Running"
    api.end_pod(api.live_pod("worker-2"), 1)
    api.sync()
    await operator.step()
    assert api.events.count("FailedWorkerPod") == 1


def state_of(api: MemoryApi, role: str, index: int) -> str:
    members = api.body["status"]["members"]
    (found,) = (one["state"] for one in members if (one["role"], one.get("index", 0)) == (role, index))
    return str(found)


async def test_a_suspended_job_does_not_use_up_its_deadline_and_no_operator_forgets_that() -> None:
    api = new_api(runPolicy={"activeDeadline": "100s"})

    operator = Operator(api)
    await operator.settle(4, seconds=5.0)
    api.edit(suspend=True)
    await operator.settle(4, seconds=5.0)
    assert api.body["status"]["phase"] == "Suspended"
    await operator.step(1000.0)
    api.edit(suspend=False)
    operator.controller = operator.start()
    await operator.settle(4, seconds=5.0)
    assert api.body["status"]["phase"] == "Pending"
    operator.controller = operator.start()
    await operator.step(100.0)
    assert api.body["status"]["reason"] == "DeadlineExceeded"


async def test_a_suspension_whose_master_cannot_start_comes_to_an_end() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.body["status"]["phase"] = "Training"  # as said by a master that is gone for good
    api.body["spec"]["suspend"] = True
    api.sync()
    operator.controller = operator.start()
    await operator.settle(2)
    assert api.body["status"]["phase"] == "Suspending"
    await operator.settle(4, seconds=200.0)
    assert api.body["status"]["phase"] == "Suspended"
    assert "resumes from its last checkpoint" in api.body["status"]["message"]
    assert api.live_pods() == []
