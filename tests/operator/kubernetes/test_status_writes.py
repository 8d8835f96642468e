"""A job's status: when it is written, onto which version, and what it says."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from emberscale_api.job.running import JobStatus, ProtectionStatus
from emberscale_api.job.status import JobPhase, Progress, TrainingJobStatus
from emberscale_operator.controller import BackendUnavailableError, News
from emberscale_operator.kubernetes.client import ApiUnavailableError
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.status_writer import StatusWriter
from emberscale_operator.machine import Decision, JobStanding, Policy
from emberscale_operator.machine.restarts import Backoff
from memory_api import WANTED, MemoryApi, Operator, names_of, new_api
from training_jobs import job_body


async def test_a_protected_job_says_how_many_servers_its_manifest_lets_it_lose() -> None:
    api = MemoryApi(job_body(ps={"replicas": 3}, faultTolerance={"strategy": "ErasureCoding", "parity": 2}))
    operator = Operator(api)
    await operator.settle()
    standing = JobStanding(JobPhase.TRAINING)
    status = JobStatus(JobPhase.TRAINING, protection=ProtectionStatus(protected=True))
    news = News(standing, Decision(standing, (), ()), plan_before=None, plan=None, status=status, answers=True)
    await operator.controller._backend.report(news, api.now)
    (condition,) = (one for one in api.body["status"]["conditions"] if one["type"] == "Protected")
    assert "any 2 parameter servers at once" in condition["message"]


async def test_a_job_that_was_expelled_from_redis_says_so() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    operator.tenancy.why = "its pods kept 120 MiB in Redis"
    await operator.settle()
    (condition,) = api.body["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "StateTooLarge")
    assert condition["message"] == "its pods kept 120 MiB in Redis"


async def test_the_job_that_has_the_most_in_a_full_redis_says_so_and_continues() -> None:
    api = new_api()
    operator = Operator(api)
    operator.tenancy.full = "Redis fills up, and of all jobs this one has the most in it"
    await operator.settle()
    (condition,) = api.body["status"]["conditions"]
    assert condition["status"] == "True"
    assert "this one has the most in it" in condition["message"]
    assert names_of(api.live_pods()) == WANTED


async def test_a_job_waits_aloud_each_time_that_it_waits() -> None:
    """This includes repeated waits within one generation; each is told once, even by several looks and operators."""
    api = new_api()

    def block(blocked: bool) -> None:
        pod = api.live_pod("ps-0")
        unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
        ready = {"type": "Ready", "status": "True"}
        pod["status"] = {
            "phase": "Pending" if blocked else "Running",
            "conditions": [unschedulable if blocked else ready],
        }
        api.sync()

    operator = Operator(api)
    await operator.settle()
    for times in (1, 2):
        block(True)
        await operator.step(5.0)
        api.sync()
        operator.controller = operator.start()
        await operator.step(5.0)
        assert api.events.count("WaitingForPods") == times
        block(False)
        await operator.step(5.0)


async def test_looks_while_a_pod_is_backed_off_write_nothing() -> None:
    api = new_api()
    operator = Operator(api, Policy(backoff=Backoff(base=60.0), backoff_limit=1000))
    await operator.settle()
    for _ in range(2):  # the first restart is immediate
        api.end_pod(api.live_pod("worker-0"), 1)
        api.sync()
        await operator.settle(3)
    status = api.body["status"]
    assert "worker-0 is restarted at 2026-01-01T00:01:" in status["message"]
    api.writes.clear()
    for _ in range(2):
        await operator.step(3.0)
    assert not api.writes
    operator.controller = operator.start()
    await operator.step(3.0)
    assert api.body["status"] == status, "the next operator says the same"


async def test_a_status_that_changes_all_the_time_is_written_at_a_steady_pace(job: Job) -> None:
    """A job's master runs a team's own code, and may say something else ten times a second."""
    api: Any = new_api()
    writer = StatusWriter(job.key, job.uid, api, api)
    now, written = 1000.0, 0
    waits: list[float] = []
    for number in range(6000):
        now += 0.1
        status = TrainingJobStatus(message=f"says {number}")
        try:
            writer.schedule(status, now)
        except BackendUnavailableError as error:
            waits.append(error.retry_seconds)
        else:
            writer.note_version(api.body)
            await writer.write(status)
            written += 1
    assert 0.0 < min(waits) <= max(waits) <= 1.0
    assert 600 <= written <= 660 + 1


async def test_statuses_are_written_though_the_clock_was_set_back(job: Job) -> None:
    api: Any = new_api()
    writer = StatusWriter(job.key, job.uid, api, api)
    for now, message, samples in ((9000.0, "a", 0), (1000.0, "b", 0), (1005.0, "b", 1), (500.0, "b", 2)):
        status = TrainingJobStatus(message=message, progress=Progress(samples=samples))
        assert writer.schedule(status, now) == 0.0, message
        writer.note_version(api.body)
        await writer.write(status)


async def test_nothing_is_done_before_it_could_be_recorded() -> None:
    """An operator that ends while a status that changed too often waits must leave no pod whose end nobody knows."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    server = api.live_pod("ps-0")
    for number in range(61):
        unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": str(number)}
        server["status"] = {"phase": "Pending", "conditions": [unschedulable]}
        api.sync()
        with suppress(BackendUnavailableError):
            await operator.step(0.0)
    api.end_pod(api.live_pod("master-0"), 1)
    api.sync()
    with suppress(BackendUnavailableError):
        await operator.step(0.0)
    api.sync()
    operator.controller = operator.start()
    await operator.settle()
    (master,) = (member for member in api.body["status"]["members"] if member["role"] == "master")
    assert (master["incarnation"], master["restarts"], master.get("faults")) == (2, 1, 1)
    assert api.events.count("FailedMasterPod") == 1
    assert "LostMasterPod" not in api.events


@pytest.mark.parametrize("applied", [False, True])
async def test_a_status_whose_answer_was_lost_is_told_again_in_full(applied: bool) -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    told, server = copy.deepcopy(api.body["status"]), api.live_pod("ps-0")
    running, patch = server["status"], api.patch

    async def lossy(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        if applied:
            await patch(path, body, kind)
        raise ApiUnavailableError("connection reset")

    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    server["status"] = {"phase": "Pending", "conditions": [unschedulable]}
    api.sync()
    api.patch = lossy  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(BackendUnavailableError):
            await operator.step(5.0)
    assert (api.body["status"] != told) == applied
    api.patch = patch  # type: ignore[method-assign]
    server["status"] = running
    api.sync()
    await operator.step(5.0)
    assert api.body["status"] == told
    api.writes.clear()
    await operator.step(30.0)
    assert not api.writes


async def test_the_status_of_a_job_is_not_written_to_a_later_job_of_its_name() -> None:
    api = new_api()
    operator, patch = Operator(api), api.patch
    later = job_body(uid="later")
    later["metadata"]["resourceVersion"] = "1000"

    async def created_anew(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        api.body = later
        return await patch(path, body, kind)

    api.patch = created_anew  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(BackendUnavailableError):
            await operator.step()
    assert "status" not in later
    api.sync()
    assert await operator.controller.step(api.now) is None


async def test_a_status_that_meets_an_edit_is_written_once_the_edit_is_seen() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    api.edit_unseen(worker={"replicas": 4})
    told = copy.deepcopy(api.body["status"])
    with pytest.raises(BackendUnavailableError) as conflict:
        await operator.step()
    assert (conflict.value.retry_seconds, api.body["status"]) == (1.0, told)
    api.sync()
    await operator.settle()
    assert api.body["status"]["observedGeneration"] == 2
    assert api.events.count("FailedWorkerPod") == 1


async def test_a_status_is_written_although_a_watch_is_late() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    api.edit_unseen(suspend=False)
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    await operator.step()
    assert api.events.count("FailedWorkerPod") == 1
    assert "worker-0" in names_of(api.live_pods())


async def test_statuses_are_written_though_the_versions_of_objects_begin_anew() -> None:
    """As in a cluster whose store was restored from a copy."""
    api = new_api()
    operator = Operator(api)
    api.body["metadata"]["resourceVersion"] = "5000"
    api.sync()
    await operator.settle()
    api.body["metadata"]["resourceVersion"] = "7"
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    with pytest.raises(BackendUnavailableError):
        await operator.step()
    await operator.settle()
    assert api.events.count("FailedWorkerPod") == 1
    assert api.body["status"]["worker"]["summary"] == "3/3"


async def test_fields_that_an_older_definition_drops_are_named_once() -> None:
    """The API server takes a status and silently leaves out what the definition does not know."""
    api = new_api()
    patch = api.patch

    async def older(path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        answer = await patch(path, body, kind)
        if path.endswith("/status"):
            api.body["status"].pop("image", None)
            for member in api.body["status"].get("members", ()):
                member.pop("state", None)
        return copy.deepcopy(api.body) if path.endswith("/status") else answer

    api.patch = older  # type: ignore[method-assign]
    with capture_logs() as logs:
        await Operator(api).settle()
    told = [entry for entry in logs if entry["event"] == "status_fields_dropped"]
    assert [entry["fields"] for entry in told] == [["status.image"], ["status.members.state"]]
    assert told[0]["crd"] == "trainingjobs"
