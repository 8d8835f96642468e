"""What the operator's metrics say of jobs and of Redis."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.health import OperatorMetrics, Tallies
from memory_api import KEY, MemoryApi, Operator
from training_jobs import job_body

PHASE = "emberscale_job_phase"


async def bury(uid: str) -> None:
    pass


def served(controller: Any = None, up: bool | None = None, fill: float | None = None) -> dict[str, dict[str, float]]:
    """Returns the gauges by name, and their values by phase."""
    fleet = Fleet(lambda key, uid: controller, bury)
    if controller is not None:
        fleet.controllers[KEY, "job-uid"] = controller
    client: Any = SimpleNamespace(calls={}, refused={})
    tenants: Any = SimpleNamespace(up=up, fill=fill, sizes={"job-uid": 7 << 20, "gone": 1})
    registry = CollectorRegistry()
    registry.register(OperatorMetrics(client, fleet, tenants))
    return {
        family.name: {sample.labels.get("phase", ""): sample.value for sample in family.samples}
        for family in registry.collect()
        if family.type == "gauge"
    }


async def test_a_job_whose_status_cannot_be_read_is_in_no_phase_that_the_operator_knows() -> None:
    api = MemoryApi(job_body())
    before = Operator(api)
    assert served(before.controller)[PHASE] == {"Unknown": 1.0}, "nobody has looked at it yet"
    await before.settle()
    known = api.body["status"]["phase"]
    assert served(before.controller)[PHASE] == {known: 1.0}
    api.body["status"]["phase"] = "Rebalancing"
    api.sync()
    after = Operator(api)
    await after.settle()
    assert served(after.controller)[PHASE] == {"Unknown": 1.0}
    api.body["status"]["phase"] = known
    api.sync()
    await after.settle()
    assert served(after.controller)[PHASE] == {known: 1.0}


async def test_a_suspended_job_with_a_spec_that_cannot_run_is_still_suspended_to_the_next_operator() -> None:
    """A newer version may refuse what an older one took: nobody is to be woken for a job that rests."""
    api = MemoryApi(job_body())
    await Operator(api).settle()
    api.edit(suspend=True)
    await Operator(api).settle()
    assert api.body["status"]["phase"] == "Suspended"
    api.edit(training={"batchSize": "many"})
    after = Operator(api)
    await after.settle()
    assert api.body["status"]["reason"] == "InvalidSpec"
    assert served(after.controller)[PHASE] == {"Suspended": 1.0}


def test_redis_has_metrics_once_the_operator_has_asked_it() -> None:
    names = ("emberscale_redis_up", "emberscale_redis_memory_ratio")
    assert not served().keys() & set(names), "one that waits for the lease asks nothing"
    assert [served(up=False, fill=0.25)[name] for name in names] == [{"": 0.0}, {"": 0.25}]
    assert served(up=True)[names[0]] == {"": 1.0}
    assert names[1] not in served(up=True), "there is no maxmemory"


def test_what_jobs_have_in_redis_is_a_metric_of_each_job_that_is_there() -> None:
    controller: Any = SimpleNamespace(standing=None)
    assert served(controller)["emberscale_job_redis_bytes"] == {"": 7 << 20}


def test_a_call_that_was_never_refused_has_a_series_of_refusals() -> None:
    """Else the first refusals would make no increase, and no alert."""
    refused = {("GET", "pods", "500"): 3}
    client: Any = SimpleNamespace(calls={("GET", "pods"): 4, ("POST", "pods"): 1}, refused=refused)
    fleet: Any = SimpleNamespace(controllers={}, defects=0)
    tenants: Any = SimpleNamespace(up=None, fill=None, sizes={})
    registry = CollectorRegistry()
    registry.register(OperatorMetrics(client, fleet, tenants))

    def value(verb: str, status: str) -> float | None:
        labels = {"verb": verb, "resource": "pods", "status": status}
        return registry.get_sample_value("emberscale_operator_api_refused_total", labels)

    assert (value("GET", "500"), value("GET", "0"), value("POST", "0")) == (3, 0, 0)


def test_masters_that_make_up_reasons_for_their_end_make_up_few_series() -> None:
    registry = CollectorRegistry()
    tallies = Tallies(registry)
    for number in range(1000):
        tallies.count_job_end(TrainingJobStatus(phase=JobPhase.FAILED, reason=f"MadeUp{number}"))
    (family,) = (one for one in registry.collect() if one.name == "emberscale_jobs_ended")
    ends = {one.labels["reason"]: one.value for one in family.samples if one.name == "emberscale_jobs_ended_total"}
    assert len(ends) <= 100
    assert sum(ends.values()) == 1000
