"""Where pods run: servers that hold parity of each other on different nodes, and no pod on a node that is silent."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from emberscale_api.job.roles import Role
from emberscale_api.job.status import MemberStatus
from emberscale_operator.kubernetes.names import JOB_LABEL, ROLE_LABEL
from emberscale_operator.machine import InstanceState


def spread_over_nodes(job: str, role: Role) -> dict[str, Any]:
    """The constraint by which pods of a role are spread over nodes, as evenly as there is room.

    It is soft: a job with more servers than nodes runs. Unlike a preferred anti-affinity, it stands beside the affinity
    that a person gives and need not be merged into it.
    """
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {JOB_LABEL: job, ROLE_LABEL: str(role)}},
    }


def rather_not_on(nodes: Collection[str], affinity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns an affinity with a preference for other nodes added, the strongest possible; unchanged without `nodes`.

    A node that has crashed counts as ready until the cluster notices. The preference is soft: where no other node has
    room, a pod goes to one that answers again.
    """
    given = affinity or {}
    if not nodes:
        return dict(given)
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    of_nodes, preferred = given.get("nodeAffinity") or {}, "preferredDuringSchedulingIgnoredDuringExecution"
    terms = [*(of_nodes.get(preferred) or ()), {"weight": 100, "preference": {"matchFields": others}}]
    return {**given, "nodeAffinity": {**of_nodes, preferred: terms}}


def shared_nodes(group: Collection[int], members: Iterable[MemberStatus], parity: int) -> Mapping[str, Sequence[str]]:
    """The nodes that run more servers of a parity group than parity covers; by name, each with their names.

    `group` has the indexes of the servers.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for member in sorted(members, key=lambda one: one.index):
        runs = member.node and member.state == str(InstanceState.RUNNING)
        if runs and member.role == str(Role.PS) and member.index in group:
            found[member.node].append(f"{member.role}-{member.index}")
    return {node: servers for node, servers in sorted(found.items()) if len(servers) > parity}


def sharing_text(shared: Mapping[str, Sequence[str]]) -> str:
    """Says which nodes take several servers away at once."""
    places = ", and ".join(f"{', '.join(servers)} share node {node}" for node, servers in shared.items())
    losses = "the loss of that node takes" if len(shared) == 1 else "the loss of one of these nodes takes"
    return f"{places}: {losses} the job back to a checkpoint"
