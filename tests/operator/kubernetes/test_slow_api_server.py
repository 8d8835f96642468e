"""An API server that takes its time, as behind slow webhooks: no step of a large job may seem stuck."""

from types import SimpleNamespace
from typing import Any

import pytest

from emberscale_operator.kubernetes import actuator
from memory_api import MemoryApi, Operator
from training_jobs import job_body

PATIENCE_SECONDS = 300.0
"""Of the fleet: a step that takes longer makes the operator unhealthy, and the kubelet restarts it for all jobs."""
POD_SECONDS = 1.0
WORKERS = 400


class SlowApi(MemoryApi):
    """Takes a second to create or delete a pod."""

    def __init__(self) -> None:
        super().__init__(job_body(ps={"replicas": 2}, worker={"replicas": WORKERS}))
        self.elapsed = 0.0

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/pods"):
            self.elapsed += POD_SECONDS
        return await super().create(path, body)

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> None:
        self.elapsed += POD_SECONDS
        await super().delete(path, uid, grace_seconds)


async def steps_until(operator: Operator, api: SlowApi, pods: int) -> list[float]:
    """Takes steps until there are so many pods; returns how long each took."""
    took: list[float] = []
    while len(api.live_pods()) != pods and len(took) < 50:
        before = api.elapsed
        await operator.settle(1)
        took.append(api.elapsed - before)
    return took


async def test_no_step_of_a_large_job_lasts_until_it_seems_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SlowApi()
    monkeypatch.setattr(actuator, "time", SimpleNamespace(monotonic=lambda: api.elapsed), raising=False)
    operator = Operator(api)
    made = await steps_until(operator, api, WORKERS + 3)
    assert len(api.live_pods()) == WORKERS + 3
    assert sum(made) == (WORKERS + 3) * POD_SECONDS, "each pod is created once"
    api.edit(suspend=True)
    ended = await steps_until(operator, api, 0)
    assert api.live_pods() == []
    assert max(*made, *ended) < PATIENCE_SECONDS / 2
