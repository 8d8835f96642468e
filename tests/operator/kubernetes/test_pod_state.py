"""What a pod's status means."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberscale_api.job.roles import Role
from emberscale_operator.kubernetes.pod_state import LOST_SECONDS, PodView, view_pod
from emberscale_operator.machine import ExitReason, Instance, InstanceId, InstanceState, Resources
from eventually import unwrap

NOW = 1_767_225_700.0  # 2026-01-01T00:01:40Z
INJECTED = {"name": "proxy", "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}}}
PROXY_RUNS = {"name": "proxy", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
PROXY_DONE = {"name": "proxy", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}


def pod(status: dict[str, Any], deletion: str | None = None, **limits: str) -> dict[str, Any]:
    metadata = {
        "name": "ctr-ps-1-4",
        "uid": "pod-uid",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"emberscale.io/role": "ps", "emberscale.io/index": "1", "emberscale.io/incarnation": "4"},
    }
    if deletion is not None:
        metadata["deletionTimestamp"] = deletion
    spec = {"nodeName": "node1", "containers": [INJECTED, {"name": "ps", "resources": {"limits": limits}}]}
    return {"metadata": metadata, "spec": spec, "status": status}


def view(status: dict[str, Any], deletion: str | None = None, now: float = NOW, **limits: str) -> PodView:
    return unwrap(view_pod(pod(status, deletion, **limits), now))


def ended(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason, "finishedAt": "2026-01-01T00:01:00Z", "message": "why\n"}
    phase = "Succeeded" if code == 0 else "Failed"
    return {"phase": phase, "containerStatuses": [{"name": "ps", "state": {"terminated": terminated}}], **more}


def test_an_end_by_a_clock_that_is_ahead_is_now() -> None:
    early = NOW - 3600
    ending = unwrap(view(ended(1), now=early).instance.exit)
    assert ending.at == early


def test_a_pod_of_somebody_else_is_no_instance() -> None:
    assert view_pod({"metadata": {"labels": {"app": "x"}}, "spec": {}}, NOW) is None


@pytest.mark.parametrize(("label", "value"), [("index", "1024"), ("index", "9" * 60), ("incarnation", "9" * 60)])
def test_a_pod_with_a_number_that_no_job_reaches_is_no_instance(label: str, value: str) -> None:
    """The status could not hold it, nor the label of the next incarnation; whoever creates pods may write it."""
    body = pod({"phase": "Running"})
    body["metadata"]["labels"] |= {f"emberscale.io/{label}": value}
    assert view_pod(body, NOW) is None


def test_a_running_pod_lives() -> None:
    running = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [PROXY_RUNS, {"name": "ps", "state": {"running": {"startedAt": "2026-01-01T00:00:30Z"}}}],
    }
    seen = view(running, cpu="1500m", memory="1Gi")
    assert seen.id == InstanceId(Role.PS, 1, 4)
    assert seen.instance.state is InstanceState.RUNNING
    assert seen.instance.resources == Resources(1.5, 1 << 30)
    assert seen.instance.started_at == NOW - 70
    assert seen.instance.ready


FULL = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
FULL_NODE = "The node was low on resource: ephemeral-storage. Threshold quantity: 2Gi, available: 1Gi. "


@pytest.mark.parametrize(
    ("status", "reason", "code", "cause"),
    [
        (ended(0, "Completed"), ExitReason.COMPLETED, 0, "Completed"),
        (ended(1), ExitReason.ERROR, 1, "Error"),
        (ended(139), ExitReason.ERROR, -11, "Error"),
        (ended(137, "OOMKilled"), ExitReason.OOM_KILLED, -9, "OOMKilled"),
        (ended(137), ExitReason.KILLED, -9, "Killed"),
        (ended(143), ExitReason.KILLED, -15, "Killed"),
        (ended(3), ExitReason.KILLED, 3, "Superseded"),
        (ended(2), ExitReason.KILLED, 2, "Unusable"),
        (ended(1) | {"reason": "Evicted"}, ExitReason.KILLED, 1, "Evicted"),
        (ended(137) | {"reason": "Evicted", "message": FULL_NODE}, ExitReason.KILLED, -9, "Evicted"),
        (ended(137) | {"reason": "Evicted", "message": FULL}, ExitReason.ERROR, -9, "StorageLimitExceeded"),
        (
            {
                "phase": "Failed",
                "reason": "Evicted",
                "message": 'Usage of EmptyDir volume "data" exceeds the limit "1Gi". ',
            },
            ExitReason.ERROR,
            1,
            "StorageLimitExceeded",
        ),
        (
            ended(0)
            | {"reason": "Evicted", "message": 'Container trainer exceeded its local ephemeral storage limit "1Gi". '},
            ExitReason.ERROR,
            -15,
            "StorageLimitExceeded",
        ),
        (
            ended(0, "Completed")
            | {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
            ExitReason.KILLED,
            0,
            "EvictionByEvictionAPI",
        ),
        (ended(255, "Unknown"), ExitReason.KILLED, -127, "NodeRestarted"),
        (ended(255), ExitReason.ERROR, -127, "Error"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, ExitReason.KILLED, 1, "UnexpectedAdmissionError"),
        (
            ended(1)
            | {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            ExitReason.KILLED,
            1,
            "PreemptionByScheduler",
        ),
    ],
)
def test_an_end_has_a_class(status: dict[str, Any], reason: ExitReason, code: int, cause: str) -> None:
    seen = view(status)
    assert seen.instance.exit is not None
    assert (seen.instance.exit.reason, seen.instance.exit.code, seen.cause) == (reason, code, cause)


PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "default-scheduler: preempting to accommodate a higher priority pod",
}


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (ended(1), "why"),
        (ended(137) | {"reason": "Evicted", "message": FULL}, FULL.strip()),
        (ended(143) | {"conditions": [PREEMPTED]}, PREEMPTED["message"]),
        (ended(137) | {"reason": "Evicted"}, "why"),
        (ended(137, "OOMKilled") | {"conditions": [PREEMPTED]}, "why"),
    ],
)
def test_an_end_is_explained_by_whoever_caused_it(status: dict[str, Any], detail: str) -> None:
    """The last line of the log of a pod that was evicted says nothing of what for, such as a full disk."""
    assert view(status).detail == detail


@pytest.mark.parametrize("around", [PROXY_RUNS, PROXY_DONE])
def test_an_end_is_that_of_the_jobs_own_process_whatever_was_injected_beside_it(around: dict[str, Any]) -> None:
    status = ended(137, "OOMKilled")
    status["containerStatuses"].insert(0, around)
    if around is PROXY_RUNS:
        status["phase"] = "Running"
    seen = view(status, memory="1Gi")
    assert (unwrap(seen.instance.exit).reason, seen.cause) == (ExitReason.OOM_KILLED, "OOMKilled")
    assert seen.instance.resources.memory_bytes == 1 << 30
    assert not seen.instance.ready


@pytest.mark.parametrize(("around", "holds"), [((), True), ((PROXY_DONE,), True), ((PROXY_RUNS,), False)])
def test_a_pod_holds_its_log_once_nothing_of_it_runs_though_its_phase_lags(
    around: tuple[dict[str, Any], ...], holds: bool
) -> None:
    status = ended(0, "Completed")
    status["phase"] = "Running"
    status["containerStatuses"].extend(around)
    assert view(status).instance.holds_log is holds


def test_a_process_whose_sidecar_is_done_runs_on() -> None:
    own = {"name": "ps", "state": {"running": {"startedAt": "2026-01-01T00:00:30Z"}}}
    seen = view({"phase": "Running", "containerStatuses": [PROXY_DONE, own]})
    assert seen.running
    assert seen.instance.started_at == NOW - 70


def test_a_pod_that_is_being_deleted_still_lives() -> None:
    assert view({"phase": "Running"}, deletion="2026-01-01T00:01:35Z").instance.state is InstanceState.TERMINATING


@pytest.mark.parametrize(("ready", "state"), [("True", InstanceState.TERMINATING), ("False", InstanceState.EXITED)])
def test_a_pod_that_may_take_long_to_end_is_not_waited_for_on_a_lost_node(ready: str, state: InstanceState) -> None:
    going = pod({"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}, "2026-01-01T00:03:00Z")
    going["metadata"]["deletionGracePeriodSeconds"] = 120  # it was told to end at 00:01:00
    seen = unwrap(view_pod(going, NOW))
    assert seen.instance.state is state
    early = unwrap(view_pod(going, NOW - 30))
    assert early.instance.state is InstanceState.TERMINATING


def test_a_pod_that_outlives_its_deletion_is_on_a_lost_node() -> None:
    seen = view({"phase": "Running"}, deletion="2026-01-01T00:01:35Z", now=NOW + LOST_SECONDS)
    assert not seen.instance.holds_log
    assert (unwrap(seen.instance.exit).reason, seen.cause) == (ExitReason.NODE_LOST, "NodeLost")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
            },
            "Unschedulable",
        ),
        *(
            (
                {"phase": "Pending", "containerStatuses": [{"name": "ps", "state": {"waiting": {"reason": reason}}}]},
                reason,
            )
            for reason in ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "InvalidImageName")
        ),
    ],
)
def test_a_waiting_pod_says_for_what(status: dict[str, Any], reason: str) -> None:
    seen = view(status)
    assert unwrap(seen.waiting).reason == reason
    assert not seen.mounting


UNPLACED = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}


@pytest.mark.parametrize(
    "written",
    ['{"cpu": "1100m", "memory": "1073741824"}', "[1]", "?", pytest.param("[" * 200_000, id="nested"), None],
)
def test_a_pod_that_no_node_takes_has_the_limits_that_it_was_created_with(written: str | None) -> None:
    """Some clusters round the limits of pods, and would do so with a successor, too."""

    def seen(status: dict[str, Any]) -> Instance:
        body = pod(status, cpu="1250m", memory="2Gi")
        if written is not None:
            body["metadata"]["annotations"] = {"emberscale.io/limits": written}
        return unwrap(view_pod(body, NOW)).instance

    readable = written is not None and written.startswith("{")
    assert seen(UNPLACED).unplaced
    assert seen(UNPLACED).resources == (Resources(1.1, 1 << 30) if readable else Resources(1.25, 2 << 30))
    for status in ({"phase": "Pending"}, {"phase": "Running"}):
        assert not seen(status).unplaced
        assert seen(status).resources == Resources(1.25, 2 << 30)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("1e9", 10**9), ("2E", 2 * 10**18), ("1Ei", 1 << 60), ("5e3", 5000), ("3000000u", 3), ("2000000000n", 2)],
)
def test_limits_that_others_set_are_read_in_any_notation_of_the_cluster(quantity: str, value: int) -> None:
    """A LimitRange gives limits to pods that ask for none, and they keep its notation."""
    assert view({"phase": "Running"}, cpu=quantity, memory=quantity).instance.resources == Resources(value, value)


def test_a_container_that_is_only_being_created_waits_for_nothing() -> None:
    seen = view({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]})
    assert seen.waiting is None
    assert seen.mounting


statuses = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "reason": st.sampled_from(["Evicted", "NodeLost", "Whatever"]),
        "conditions": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["Ready", "PodScheduled", "DisruptionTarget"]),
                    "status": st.sampled_from(["True", "False"]),
                }
            )
        ),
        "containerStatuses": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["proxy", "ps"]),
                    "state": st.one_of(
                        st.just({}),
                        st.builds(lambda reason: {"waiting": {"reason": reason}}, st.text(max_size=4)),
                        st.just({"running": {"startedAt": "2026-01-01T00:00:30Z"}}),
                        st.builds(
                            lambda code: {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:01:00Z"}},
                            st.integers(0, 255),
                        ),
                    ),
                }
            ),
            max_size=2,
        ),
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first of the nested documents takes a while to generate
@given(statuses, st.none() | st.just("2026-01-01T00:01:35Z"), st.floats(0, 100))
def test_every_status_has_a_meaning(status: dict[str, Any], deletion: str | None, later: float) -> None:
    seen = view(status, deletion, now=NOW + later)
    assert (seen.instance.exit is not None) is (seen.instance.state is InstanceState.EXITED)
    assert not (seen.instance.ready and not seen.instance.live)
    if status.get("phase") in ("Succeeded", "Failed"):
        assert seen.instance.state is InstanceState.EXITED
