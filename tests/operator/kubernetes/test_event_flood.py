"""A job's master runs a team's own code, and much of what it says becomes Events: they are bounded."""

from types import SimpleNamespace
from typing import Any

import pytest

from emberscale_api.job.roles import MAX_REPLICAS, Role
from emberscale_api.job.running import JobPlan, ScalingStep, Sizing
from emberscale_operator.kubernetes import events, stories
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.master_bounds import MAX_STEPS
from memory_api import MemoryApi, new_api
from own_logs import own_logs

PODS = 2 * MAX_REPLICAS + 1
PLANS_PER_SECOND = 10
"""What `MasterLink` takes from one master."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: self.now))


def a_recorder() -> tuple[MemoryApi, EventRecorder]:
    api: Any = new_api()
    return api, EventRecorder(api, "op-1")


def plan_of_steps(first: int) -> JobPlan:
    steps = tuple(ScalingStep(first + number, "CopiedRows", "again") for number in range(MAX_STEPS))
    return JobPlan(shapes={}, sizing=Sizing(steps=steps))


async def test_a_master_that_makes_up_steps_without_end_fills_neither_the_cluster_nor_the_operator(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (api, recorder) = Clock(monkeypatch), a_recorder()
    with own_logs() as logs:
        for second in range(600):
            clock.now += 1.0
            for plan in range(PLANS_PER_SECOND):
                first = (second * PLANS_PER_SECOND + plan) * MAX_STEPS + 1
                stories.tell_steps(recorder, job, None, plan_of_steps(first))
                await recorder.flush()
                api.objects.clear()
    assert len(api.events) < 4 * PODS + 600 + 1
    assert len(recorder._known) <= 4 * PODS
    assert [entry["event"] for entry in logs] == ["events_dropped"], "told once"


async def test_every_pod_of_the_largest_job_may_come_and_go_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    api, recorder = a_recorder()
    for pod in range(PODS):
        for reason in ("CreatedWorkerPod", "LostWorkerPod", "DeletedWorkerPod"):
            recorder.normal(job, reason, f"{Role.WORKER}-{pod}", str(pod))
            await recorder.flush()
    assert len(api.events) == 3 * PODS


async def test_events_are_written_again_once_a_job_has_been_quiet(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (api, recorder) = Clock(monkeypatch), a_recorder()
    for number in range(5 * PODS):
        recorder.normal(job, "CopiedRows", "again", str(number))
        await recorder.flush()
    before = len(api.events)
    clock.now += 60.0
    recorder.normal(job, "CompletedJob", "every sample is trained", "end")
    await recorder.flush()
    assert api.events[before:] == ["CompletedJob"]


async def test_a_slow_api_server_delays_events_and_not_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (api, recorder) = Clock(monkeypatch), a_recorder()
    create = api.create

    async def slowly(path: str, body: Any) -> Any:
        clock.now += 2.0
        return await create(path, body)

    monkeypatch.setattr(api, "create", slowly)
    for number in range(7):
        recorder.normal(job, "CopiedRows", "again", str(number))
    written = []
    for _ in range(3):
        await recorder.flush()
        written.append(len(api.events))
    assert written == [3, 6, 7]
