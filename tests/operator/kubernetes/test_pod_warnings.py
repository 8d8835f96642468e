"""The reasons for which pods wait that are slow to be prepared."""

import asyncio
from typing import Any

import pytest

from emberscale_operator.kubernetes.client import ApiError, ApiUnavailableError
from emberscale_operator.kubernetes.pod_state import Waiting
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from memory_api import MemoryApi, Operator, slot_of
from training_jobs import job_body


class Events:
    """An API server with Warnings by their pod's uid; it counts how often it is asked."""

    def __init__(self, **reasons: list[str]) -> None:
        self.reasons = reasons
        self.asked = 0

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        self.asked += 1
        uid = query["fieldSelector"].split(",")[0].removeprefix("involvedObject.uid=")
        return {
            "items": [
                {"reason": reason, "message": "why", "lastTimestamp": f"2026-01-01T00:00:{99 - number}Z"}
                for number, reason in enumerate(self.reasons.get(uid, ()))
            ]
        }


async def with_a_server_in_preparation(api: MemoryApi) -> Operator:
    """Runs an operator of a job whose server has a node and does not start, and whose worker has just ended."""
    operator = Operator(api)
    await operator.settle()
    server = api.live_pod("ps-0")
    server["spec"]["nodeName"] = "node-1"
    server["status"] = {"phase": "Pending"}
    api.end_pod(api.live_pod("worker-0"), 137)
    api.sync()
    return operator


async def test_the_last_warning_tells_and_is_asked_for_again_after_a_while() -> None:
    api = Events(a=["FailedMount", "FailedScheduling"])
    warnings = PodWarnings(api)  # type: ignore[arg-type]  # the one call that it makes is there
    said = [await warnings.last("team", "a", now) for now in (100.0, 101.0, 104.9)]
    assert said == [Waiting("FailedMount", "why")] * 3
    assert api.asked == 1
    api.reasons["a"] = []
    assert await warnings.last("team", "a", 105.0) is None
    assert api.asked == 2


async def test_of_many_warnings_few_are_asked_for_and_one_without_a_reason_is_one() -> None:
    class Odd:
        async def get(self, path: str, **query: str) -> dict[str, Any]:
            assert query["limit"] == "20"
            return {"items": [{"lastTimestamp": "2026-01-01T00:00:00Z"}]}

    warnings = PodWarnings(Odd())  # type: ignore[arg-type]
    assert await warnings.last("team", "a", 100.0) == Waiting("Unknown", "")


@pytest.mark.parametrize("message", ["", "mount /data: read-only", "Policy violation: mount /data"])
async def test_a_warning_whose_reason_is_free_text_holds_up_no_job(message: str) -> None:
    warning = {"reason": "Policy violation", "message": message, "lastTimestamp": "2026-01-01T00:00:00Z"}

    class Warned(MemoryApi):
        async def get(self, path: str, **query: str) -> dict[str, Any]:
            return {"items": [warning]} if path.endswith("/events") else await super().get(path, **query)

    api = Warned(job_body(ps={"replicas": 1}, worker={"replicas": 1}))
    operator = await with_a_server_in_preparation(api)
    for _ in range(3):
        await operator.step(10.0)
        api.sync()
    (condition,) = api.body["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Unknown")
    assert condition["message"].count("Policy violation") == 1
    assert message in condition["message"]
    assert sorted(map(slot_of, api.live_pods())) == ["master-0", "ps-0", "worker-0"]


@pytest.mark.parametrize(
    "problem", [ApiUnavailableError("HTTP status 504: Timeout"), ApiError(403, "Forbidden", "cannot list events")]
)
async def test_a_job_goes_on_where_warnings_cannot_be_listed(problem: Exception) -> None:
    """Whoever writes a million Events into a namespace makes each list of them time out."""

    class Flooded(MemoryApi):
        asked = 0

        async def get(self, path: str, **query: str) -> dict[str, Any]:
            if not path.endswith("/events"):
                return await super().get(path, **query)
            self.asked += 1
            raise problem

    api = Flooded(job_body(ps={"replicas": 1}, worker={"replicas": 1}))
    operator = await with_a_server_in_preparation(api)
    for _ in range(20):
        await operator.step(3.0)
        api.sync()
    assert sorted(map(slot_of, api.live_pods())) == ["master-0", "ps-0", "worker-0"]
    assert api.asked == 1, "each answer may take until its time is over"


async def test_one_list_that_hangs_holds_up_one_job() -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    class Hanging(Events):
        async def get(self, path: str, **query: str) -> dict[str, Any]:
            answer = await super().get(path, **query)
            asked.set()
            await answers.wait()
            return answer

    api = Hanging(a=["FailedMount"], b=["FailedMount"])
    warnings = PodWarnings(api)  # type: ignore[arg-type]
    first = asyncio.create_task(warnings.last("team", "a", 100.0))
    await asked.wait()
    assert await warnings.last("team", "b", 110.0) is None
    answers.set()
    assert await first == await warnings.last("team", "b", 111.0) == Waiting("FailedMount", "why")


async def test_hundreds_of_jobs_at_once_ask_no_more_often_than_one() -> None:
    api = Events(**{f"pod{number}": ["FailedMount"] for number in range(500)})
    warnings = PodWarnings(api)  # type: ignore[arg-type]
    heard: set[str] = set()

    async def all_ask(now: float) -> None:
        for number in range(500):
            if await warnings.last("team", f"pod{number}", now):
                heard.add(f"pod{number}")

    for tick in range(40):
        await all_ask(100.0 + tick / 4)
    assert api.asked == 20
    assert len(heard) > 1
