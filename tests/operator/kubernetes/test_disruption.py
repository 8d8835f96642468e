"""The PodDisruptionBudget of a job's parameter servers."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobPlan
from emberscale_api.shape import RoleShape
from emberscale_operator.kubernetes import disruption, events
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.client import ApiInternalError, ApiUnavailableError
from emberscale_operator.kubernetes.disruption import DisruptionBudget
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.machine import JobStanding
from memory_api import START, WANTED, Operator, names_of, new_api
from own_logs import own_logs

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


async def test_a_job_at_rest_wants_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Common alerts report each budget that wants more pods than there are."""
    api = new_api()
    route(2, monkeypatch)
    operator = Operator(api)
    await operator.settle()
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 1
    api.edit(suspend=True)
    await operator.settle()
    assert api.body["status"]["phase"] == "Suspended"
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 0


async def test_an_operator_that_finds_a_job_at_rest_lowers_its_budget_and_makes_none(job: Job) -> None:
    api: Any = new_api()
    await DisruptionBudget(api).lower(job, START)
    assert BUDGET not in api.objects
    await DisruptionBudget(api).keep(job, 4, START)
    budget = DisruptionBudget(api)
    await budget.lower(job, START)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 0
    await budget.keep(job, 4, START)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 3


async def test_a_budget_that_somebody_deletes_or_edits_is_written_again(job: Job) -> None:
    api: Any = new_api()
    budget = DisruptionBudget(api)
    await budget.keep(job, 3, START)
    del api.objects[BUDGET]
    await budget.keep(job, 3, START + 600)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 2
    api.objects[BUDGET]["spec"]["minAvailable"] = 0
    await budget.keep(job, 3, START + 1200)
    assert api.objects[BUDGET]["spec"]["minAvailable"] == 2


async def test_a_job_gets_its_budget_once_that_of_an_earlier_job_of_its_name_is_gone(job: Job) -> None:
    api: Any = new_api()
    api.objects[BUDGET] = {"metadata": {"uid": "earlier", "name": "ctr-ps"}, "spec": {"minAvailable": 7}}
    budget = DisruptionBudget(api)
    await budget.keep(job, 2, START)
    del api.objects[BUDGET]
    with own_logs() as logs:
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
    for module in (disruption, events):  # a test that is stopped for a moment must not seem a slow API server
        monkeypatch.setattr(module, "PAUSE_FACTOR", 0.0)
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
