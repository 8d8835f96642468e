"""Specs and statuses that the operator cannot use: of another version, too large, or invalid."""

import copy
from typing import Any

import pytest

from emberscale_operator.machine import Policy
from emberscale_operator.machine.restarts import Backoff
from memory_api import WANTED, MemoryApi, Operator, names_of, new_api, slot_of
from training_jobs import job_body


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


@pytest.mark.parametrize(
    ("member", "plan", "field"),
    [
        ({"role": "evaluator"}, {}, "status.members.0.role ('evaluator')"),
        ({"memory": "1.5GiB"}, {}, "status.members.0.memory ('1.5GiB')"),
        ({}, {"ps": {"replicas": 1, "memory": "1.5GiB"}}, "status.plan.ps.memory ('1.5GiB')"),
        ({}, {"worker": {"replicas": 1, "cpu": "all"}}, "status.plan.worker.cpu ('all')"),
    ],
)
async def test_a_job_with_a_member_or_a_plan_of_another_version_is_left_alone(
    member: dict[str, Any], plan: dict[str, Any], field: str
) -> None:
    api = new_api()
    await Operator(api).settle()
    api.body["status"]["members"][0] |= member
    api.body["status"]["plan"] = plan
    api.end_pod(api.live_pod("worker-0"), 137, "Error")
    pods = names_of(api.live_pods())
    api.sync()
    await Operator(api).settle()
    assert names_of(api.live_pods()) == pods
    assert f"cannot read {field}" in api.body["status"]["conditions"][0]["message"]


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


async def test_a_running_job_whose_spec_becomes_invalid_shows_the_pods_that_run_on() -> None:
    """An older definition may take what this version refuses."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    parts = {role: api.body["status"][role] for role in ("master", "ps", "worker")}
    assert [part["summary"] for part in parts.values()] == ["1/1", "2/2", "3/3"]
    valid = copy.deepcopy(api.body["spec"])
    api.edit(training={"batchSize": "many"})
    for one in (operator, Operator(api)):
        await one.settle()
        assert api.body["status"]["reason"] == "InvalidSpec"
        assert {role: api.body["status"][role] for role in parts} == parts
    api.end_pod(api.live_pod("worker-0"), 137, "Error")
    api.sync()
    await operator.settle()
    assert api.body["status"]["worker"]["summary"] == "2/3"
    api.body["spec"] = valid
    api.sync()
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    assert {role: api.body["status"][role]["summary"] for role in parts} == {
        "master": "1/1",
        "ps": "2/2",
        "worker": "3/3",
    }


async def test_a_job_that_has_ended_keeps_its_outcome_if_its_spec_becomes_invalid() -> None:
    """Nobody can continue it, and the reason of its end must not be lost."""
    api = new_api()
    policy = Policy(backoff=Backoff(base=0.0), backoff_limit=0)
    operator = Operator(api, policy)
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    told = copy.deepcopy(api.body["status"])
    assert (told["phase"], told["reason"]) == ("Failed", "BackoffLimitExceeded")
    api.edit(training={"batchSize": "many"})
    for one in (operator, Operator(api, policy)):
        await one.settle()
        assert api.body["status"] == told


async def test_a_suspended_job_whose_spec_was_invalid_for_a_while_is_no_longer_called_so() -> None:
    api = new_api()
    await Operator(api).settle()
    api.edit(suspend=True)
    await Operator(api).settle()
    valid = copy.deepcopy(api.body["spec"])
    api.edit(training={"batchSize": "many"})
    await Operator(api).settle()
    refused = api.body["status"]["conditions"]
    assert {condition["reason"] for condition in refused} == {"InvalidSpec"}
    successor = Operator(api)
    await successor.settle()
    api.body["spec"] = valid
    api.sync()
    await successor.settle()
    told = {condition["type"]: condition["reason"] for condition in api.body["status"]["conditions"]}
    assert (api.body["status"]["phase"], told["Suspended"]) == ("Suspended", "JobSuspended")
    assert "InvalidSpec" not in (api.body["status"]["reason"], *told.values())
