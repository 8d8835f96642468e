"""Parameter servers that hold parity of each other's rows: spread over nodes, and named where they share one."""

from typing import Any

import pytest

from emberscale_api.job.roles import Role
from emberscale_api.job.status import MemberStatus
from emberscale_operator.kubernetes import names, pod_spec
from emberscale_operator.kubernetes.job import read_job
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.spreading import shared_nodes, sharing_text
from emberscale_operator.machine import InstanceId, Resources
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
