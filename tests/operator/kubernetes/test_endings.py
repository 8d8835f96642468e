"""How a job fails, suspends and resumes, and is deleted after its TTL."""

import asyncio

from emberscale_operator.kubernetes.pod_state import GRACE_SECONDS
from emberscale_operator.machine import Policy
from emberscale_operator.machine.restarts import Backoff
from memory_api import WANTED, MemoryApi, Operator, names_of, new_api, slot_of


def test_errors_of_its_own_fail_a_job_and_evictions_do_not() -> None:
    def outcome(evicted: bool) -> tuple[str, str]:
        api = new_api(runPolicy={"backoffLimit": 2})

        async def scenario() -> None:
            operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=2))
            await operator.settle()
            for _ in range(5):
                for pod in [pod for pod in api.live_pods() if slot_of(pod) == "worker-0"]:
                    api.end_pod(pod, 1)
                    if evicted:
                        pod["status"]["reason"] = "Evicted"
                api.sync()
                await operator.settle(3)

        asyncio.run(scenario())
        return api.body["status"]["phase"], api.body["status"].get("reason", "")

    assert outcome(evicted=True)[0] == "Pending"
    assert outcome(evicted=False) == ("Failed", "BackoffLimitExceeded")


async def test_a_failed_job_keeps_its_status_and_loses_its_running_pods() -> None:
    api = new_api(runPolicy={"backoffLimit": 0})
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert api.live_pods() == []
    assert names_of(api.all_pods()) == ["worker-0"], "the one that failed stays, for its log"
    conditions = {condition["type"]: condition["status"] for condition in api.body["status"]["conditions"]}
    assert conditions == {"Progressing": "False", "Failed": "True"}


async def test_the_brain_hears_of_a_failure_from_the_operator_if_no_master_knows_of_it() -> None:
    api = new_api(runPolicy={"backoffLimit": 0})
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    assert operator.tenancy.released == []
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert operator.tenancy.released == ["job-uid"]


async def test_a_job_that_is_suspended_from_the_start_gets_no_pod_until_it_is_resumed() -> None:
    api = new_api(suspend=True)
    operator = Operator(api)
    await operator.settle(3)
    assert api.all_pods() == []
    assert api.body["status"]["phase"] == "Suspended"
    assert "startTime" not in api.body["status"]
    api.edit(suspend=False)
    await operator.settle()
    assert names_of(api.live_pods()) == WANTED
    conditions = {condition["type"]: condition["status"] for condition in api.body["status"]["conditions"]}
    assert conditions == {"Progressing": "True", "Suspended": "False"}


async def test_a_finished_job_is_deleted_after_its_time() -> None:
    api = new_api(runPolicy={"backoffLimit": 0, "ttlAfterFinished": "60s"})
    job_path = "/apis/emberscale.io/v1alpha1/namespaces/team-a/trainingjobs/ctr"
    deleted: list[float] = []
    real = api.delete

    async def delete(path: str, uid: str, grace_seconds: int | None = None) -> None:
        if path == job_path:
            deleted.append(api.now)
        await real(path, uid, grace_seconds)

    api.delete = delete  # type: ignore[method-assign]
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert not deleted
    await operator.step(60)
    assert deleted


async def test_servers_of_a_job_that_is_over_get_no_time_to_give_rows_away() -> None:
    api = new_api(runPolicy={"backoffLimit": 0})
    graces: dict[str, int | None] = {}
    real = api.delete

    async def delete(path: str, uid: str, grace_seconds: int | None = None) -> None:
        graces[path.rsplit("/", 1)[1]] = grace_seconds
        await real(path, uid, grace_seconds)

    api.delete = delete  # type: ignore[method-assign]
    operator = Operator(api, Policy(backoff=Backoff(base=0.0), backoff_limit=0))
    await operator.settle()
    server = api.live_pod("ps-0")["metadata"]["name"]
    api.end_pod(api.live_pod("worker-0"), 1)
    api.sync()
    await operator.settle(30)
    assert graces[server] == GRACE_SECONDS


async def test_a_suspended_job_does_not_use_up_its_deadline_and_no_operator_forgets_that() -> None:
    api = new_api(runPolicy={"activeDeadline": "100s"})

    operator = Operator(api)
    await operator.settle(4, seconds=5.0)
    api.edit(suspend=True)
    await operator.settle(4, seconds=5.0)
    assert api.body["status"]["phase"] == "Suspended"
    await operator.step(1000.0)
    api.edit(suspend=False)
    operator.controller = operator.start()
    await operator.settle(4, seconds=5.0)
    assert api.body["status"]["phase"] == "Pending"
    operator.controller = operator.start()
    await operator.step(100.0)
    assert api.body["status"]["reason"] == "DeadlineExceeded"


async def test_a_suspension_whose_master_cannot_start_comes_to_an_end() -> None:
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    api.body["status"]["phase"] = "Training"  # as said by a master that is gone for good
    api.body["spec"]["suspend"] = True
    api.sync()
    operator.controller = operator.start()
    await operator.settle(2)
    assert api.body["status"]["phase"] == "Suspending"
    await operator.settle(4, seconds=200.0)
    assert api.body["status"]["phase"] == "Suspended"
    assert "resumes from its last checkpoint" in api.body["status"]["message"]
    assert api.live_pods() == []


def said_of_failure(api: MemoryApi) -> str:
    """Returns the message of the only Event of a failed worker."""
    (event,) = (one for path, one in api.objects.items() if "/events/" in path and one["reason"] == "FailedWorkerPod")
    return str(event["message"])


async def test_the_report_of_an_error_is_its_last_line_with_words() -> None:
    """That of a failed call ends with a bracket alone."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    pod = api.live_pod("worker-0")
    api.end_pod(pod, 1)
    said = 'Traceback\n<_InactiveRpcError of RPC that terminated with:\n\tdetails = "no valid token"\n>\n'
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = said
    api.sync()
    await operator.step()
    (member,) = (one for one in api.body["status"]["members"] if (one["role"], one["index"]) == ("worker", 0))
    assert (member["reason"], member["message"]) == ("Error", 'details = "no valid token"')
    await operator.settle()
    assert 'ended with exit code 1: details = "no valid token"; it counts' in said_of_failure(api)


async def test_a_pod_that_outgrows_its_own_storage_counts_against_the_job() -> None:
    """Its successors would outgrow theirs, too, for ever."""
    api = new_api()
    operator = Operator(api)
    await operator.settle()
    pod = api.live_pod("worker-0")
    api.end_pod(pod, 137)
    said = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
    pod["status"] |= {"reason": "Evicted", "message": said}
    api.sync()
    await operator.settle()
    assert f"was evicted: {said.strip()}; it counts against spec.runPolicy.backoffLimit" in said_of_failure(api)
