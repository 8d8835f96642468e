"""One job's controller against an in-memory API server, and killed at any of its calls."""

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_operator.controller import BackendUnavailableError, Observed
from emberscale_operator.kubernetes.client import ApiUnavailableError
from emberscale_operator.machine import JobIntent
from memory_api import START, WANTED, MemoryApi, Operator, names_of, new_api, slot_of


async def test_a_job_gets_its_pods_and_a_status() -> None:
    api = new_api()
    await Operator(api).settle()
    assert names_of(api.live_pods()) == WANTED
    status = api.body["status"]
    assert status["worker"]["summary"] == "3/3"
    assert status["observedGeneration"] == 1
    assert [condition["type"] for condition in status["conditions"]] == ["Progressing"]
    assert api.events.count("CreatedWorkerPod") == 3


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


async def test_no_member_starts_while_the_master_of_an_earlier_job_of_this_name_runs() -> None:
    """Members would call that one, which refuses their tokens."""
    former = new_api()
    await Operator(former).settle()
    path = "/api/v1/namespaces/team-a/pods/ctr-master-0-1"
    earlier = former.objects[path]
    earlier["metadata"]["ownerReferences"][0]["uid"] = "earlier"

    api = new_api()
    api.objects[path] = earlier
    operator = Operator(api)
    for _ in range(8):
        await operator.step(1.0)
    assert [pod["metadata"]["name"] for pod in api.all_pods()] == ["ctr-master-0-1"]
    assert api.body["status"]["reason"] == "NameTaken"
    del api.objects[path]
    api.sync()
    for _ in range(8):
        await operator.step(1.0)
    assert names_of(api.live_pods()) == WANTED
    assert all(pod["metadata"]["name"].endswith("-1") for pod in api.live_pods())


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
