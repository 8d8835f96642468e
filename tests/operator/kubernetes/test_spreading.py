"""Where pods go: servers with parity of each other to different nodes, and successors rather not to a silent node."""

from datetime import UTC, datetime
from typing import Any

import pytest

from emberscale_api.job.roles import Role
from emberscale_api.job.status import MemberStatus
from emberscale_operator.kubernetes import names, pod_spec
from emberscale_operator.kubernetes.job import read_job
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.spreading import rather_not_on, shared_nodes, sharing_text
from emberscale_operator.machine import InstanceId, Resources
from memory_api import MemoryApi, Operator, new_api
from training_jobs import job_body


def server(index: int, node: str, state: str = "Running", role: str = "ps") -> MemberStatus:
    return MemberStatus(role=role, index=index, node=node, state=state, pod=f"ctr-{role}-{index}-1")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([server(0, "a"), server(1, "b"), server(2, "c")], {}),
        ([server(2, "a"), server(0, "a"), server(1, "b")], {"a": ["ps-0", "ps-2"]}),
        (
            [server(0, "b"), server(1, "a"), server(2, "b"), server(3, "a")],
            {"a": ["ps-1", "ps-3"], "b": ["ps-0", "ps-2"]},
        ),
        ([server(0, "a"), server(1, "a", role="worker")], {}),
        ([server(0, "a"), server(1, "a", state="Terminating")], {}),
        ([server(0, ""), server(1, "")], {}),
        ([server(0, "a"), server(4, "a")], {}),  # the last one has no rows yet
    ],
)
def test_a_node_with_two_servers_of_a_group_is_found(
    members: list[MemberStatus], expected: dict[str, list[str]]
) -> None:
    assert shared_nodes({0, 1, 2, 3}, members, parity=1) == expected


def test_what_a_shared_node_costs_is_said() -> None:
    assert sharing_text({"a": ["ps-0", "ps-2"]}) == (
        "ps-0, ps-2 share node a: the loss of that node takes the job back to a checkpoint"
    )
    assert sharing_text({"a": ["ps-1", "ps-3"], "b": ["ps-0", "ps-2"]}) == (
        "ps-1, ps-3 share node a, and ps-0, ps-2 share node b: "
        "the loss of one of these nodes takes the job back to a checkpoint"
    )


def spread_of(settings: Settings, role: Role, **spec: Any) -> list[dict[str, Any]]:
    job = read_job(job_body(**spec))
    pod = pod_spec.build_pod(job, JobObjects.of(job, settings), InstanceId(role, 1, 1), Resources(), settings)
    found: list[dict[str, Any]] = pod["spec"].get("topologySpreadConstraints", [])
    for one in found:
        assert one["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    return found


@pytest.mark.parametrize("strategy", ["ErasureCoding", "Auto"])
def test_servers_that_may_have_parity_are_spread_and_others_are_not(settings: Settings, strategy: str) -> None:
    manifest: dict[str, Any] = {"faultTolerance": {"strategy": strategy}, "ps": {"replicas": 3}}
    (constraint,) = spread_of(settings, Role.PS, **manifest)
    assert (constraint["topologyKey"], constraint["maxSkew"]) == ("kubernetes.io/hostname", 1)
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["labelSelector"]["matchLabels"] == {names.JOB_LABEL: "ctr", names.ROLE_LABEL: "ps"}
    assert not spread_of(settings, Role.WORKER, **manifest)
    rounds: dict[str, Any] = {"hotEmbeddings": {"mode": "Enabled"}, "faultTolerance": {"strategy": "Auto"}}
    without = [{"faultTolerance": {"strategy": name}} for name in ("FullRecovery", "PartialRecovery")]
    for other in (rounds, *without):
        assert not spread_of(settings, Role.PS, ps={"replicas": 3}, **other)


def avoided_by(pod: dict[str, Any]) -> list[str]:
    """The nodes that the scheduler is asked to avoid for a pod."""
    of_nodes = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = of_nodes.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return [node for term in terms for field in term["preference"].get("matchFields", []) for node in field["values"]]


def test_a_preference_for_other_nodes_stands_beside_the_affinity_that_a_person_gives() -> None:
    zone = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    given = {"nodeAffinity": {"required": "kept", preferred: [zone]}, "podAffinity": "kept"}
    added = rather_not_on({"b", "a"}, given)
    assert given["nodeAffinity"] == {"required": "kept", preferred: [zone]}, "what is given is not changed"
    assert (added["podAffinity"], added["nodeAffinity"]["required"]) == ("kept", "kept")
    assert added["nodeAffinity"][preferred][0] == zone
    assert avoided_by({"spec": {"affinity": added}}) == ["a", "b"]
    assert (rather_not_on((), given), rather_not_on((), None)) == (given, {})


def end_without_a_word(api: MemoryApi, name: str, node: str) -> None:
    """Deletes a pod on a node that has crashed: its end is never confirmed."""
    pod = api.live_pod(name)
    moment = datetime.fromtimestamp(api.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    pod["metadata"] |= {"deletionTimestamp": moment, "deletionGracePeriodSeconds": 1}
    pod["spec"]["nodeName"] = node
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    api.sync()


async def created(api: MemoryApi, operator: Operator, name: str) -> dict[str, Any]:
    """The pod of this name, once it is there."""
    path = f"/api/v1/namespaces/team-a/pods/{name}"
    for _ in range(100):
        if path in api.objects:
            return api.objects[path]
        await operator.step(1.0)
    raise AssertionError(f"{name} was not created")


async def test_successors_avoid_a_node_that_does_not_confirm_the_end_of_a_pod_until_the_cluster_must_know() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    assert avoided_by(api.live_pod("ps-0")) == []
    end_without_a_word(api, "ps-0", "node-a")
    assert avoided_by(await created(api, operator, "ctr-ps-0-2")) == ["node-a"]
    del api.objects["/api/v1/namespaces/team-a/pods/ctr-ps-0-1"]
    api.run_pods()
    api.sync()
    await operator.settle()
    end_without_a_word(api, "worker-0", "node-b")
    assert avoided_by(await created(api, operator, "ctr-worker-0-2")) == ["node-a", "node-b"], "only a moment later"
    del api.objects["/api/v1/namespaces/team-a/pods/ctr-worker-0-1"]
    api.run_pods()
    api.sync()
    await operator.settle()
    await operator.step(90.0)
    api.end_pod(api.live_pod("worker-1"), 1)
    api.sync()
    assert avoided_by(await created(api, operator, "ctr-worker-1-2")) == []
