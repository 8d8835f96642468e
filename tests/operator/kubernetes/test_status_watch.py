"""The end-to-end suite compares a status with pods; these tests show that it can find fault."""

from typing import Any

import pytest

from status_watch import contradictions, duplicates


def pod(name: str, role: str = "worker", phase: str = "Running", ready: bool = True, **metadata: Any) -> dict[str, Any]:
    labels = {"emberscale.io/role": role, "emberscale.io/index": "0"}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "labels": labels, **metadata},
        "status": {"phase": phase, "conditions": conditions},
    }


def status(*running: str, ready: int = 0) -> dict[str, Any]:
    return {"members": [{"pod": name, "state": "Running"} for name in running], "worker": {"ready": ready}}


def test_a_status_that_is_true_is_not_contradicted() -> None:
    assert list(contradictions(status("a", ready=1), [pod("a")])) == []
    assert list(contradictions(status("a", ready=0), [pod("a", ready=False)])) == []
    assert list(contradictions({}, [pod("a", phase="Pending", ready=False)])) == []


@pytest.mark.parametrize(
    ("said", "pods", "words"),
    [
        (status("a"), [], "a is said to run, and does not"),
        (status("a"), [pod("a", phase="Failed", ready=False)], "a is said to run, and does not"),
        (status("a"), [pod("a", deletionTimestamp="now")], "a is said to run, and does not"),
        (status(), [pod("a")], "a runs, and is not said to"),
        (status("a", ready=2), [pod("a")], "2 worker are said to be ready, and 1 are"),
        (status("a", ready=1), [pod("a", ready=False)], "1 worker are said to be ready, and 0 are"),
    ],
)
def test_a_status_that_is_not_true_is_named(said: dict[str, Any], pods: list[Any], words: str) -> None:
    assert words in list(contradictions(said, pods))


def test_two_pods_of_one_member_are_found_unless_one_of_them_has_ended() -> None:
    killed = pod("a", ready=False)
    assert duplicates([killed, pod("b", phase="Pending", ready=False)]) == {"worker-0"}
    killed["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": {"exitCode": 137}}}]
    assert duplicates([killed, pod("b", phase="Pending", ready=False)]) == set()
    assert "a runs, and is not said to" not in list(contradictions(status(), [killed]))
