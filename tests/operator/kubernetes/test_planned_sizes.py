"""A job that the brain sizes: what is wanted before its plan, what its master gets, and which changes are told."""

from dataclasses import replace
from typing import Any

import pytest

from emberscale_api.errors import InvalidError
from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobPlan, Sizing
from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_api.rpc.token import JobClaims, claims_of
from emberscale_api.shape import RoleShape
from emberscale_operator.kubernetes import stories
from emberscale_operator.kubernetes.job import Job, read_job
from emberscale_operator.kubernetes.observation import plan_of
from emberscale_operator.kubernetes.pod_spec import Credentials, JobObjects, build_pod, build_store_secret
from emberscale_operator.kubernetes.settings import Settings, read_settings
from emberscale_operator.kubernetes.status import Facts, build_status
from emberscale_operator.machine import InstanceId, JobStanding, Resources, demands_of
from eventually import unwrap
from training_jobs import job_body


@pytest.fixture
def open_job() -> Job:
    return read_job(job_body(ps={"maxReplicas": 4}, worker={"maxReplicas": 8}))


def plan(workers: int, ps: int, cpu: float = 2.0, scalings: int = 0) -> JobPlan:
    sizing = Sizing(
        reason="Scale", message="it pays", plan_version=3, expected_samples_per_second=900.4, scalings=scalings
    )
    shapes = {Role.PS: RoleShape(ps, cpu, 1 << 30), Role.WORKER: RoleShape(workers, cpu, 1 << 30)}
    return JobPlan(version=5, reason="Training", shapes=shapes, sizing=sizing, phase=JobPhase.TRAINING)


def counts(job: Job, given: JobPlan | None, planned_by_brain: bool = True) -> dict[Role, int]:
    return {
        demand.role: demand.replicas
        for demand in demands_of(job.spec, given.shapes if given else None, planned=planned_by_brain)
    }


def test_a_job_without_sizes_begins_with_its_master_alone(open_job: Job) -> None:
    assert counts(open_job, None) == {Role.MASTER: 1}
    assert counts(open_job, plan(0, 0)) == {Role.MASTER: 1}
    assert counts(open_job, plan(6, 2)) == {Role.MASTER: 1, Role.PS: 2, Role.WORKER: 6}


def test_without_a_brain_it_begins_as_small_as_it_may(open_job: Job) -> None:
    assert counts(open_job, None, planned_by_brain=False) == {Role.MASTER: 1, Role.PS: 1, Role.WORKER: 1}


def test_the_manifest_bounds_the_plan(open_job: Job) -> None:
    assert counts(open_job, plan(100, 100)) == {Role.MASTER: 1, Role.PS: 4, Role.WORKER: 8}


def test_only_the_master_gets_the_brains_token(open_job: Job, settings: Settings) -> None:
    advised = replace(settings, brain_address="brain:50061", brain_token="hush")
    objects = JobObjects.of(open_job, advised)
    assert objects.store_secret != JobObjects.of(open_job, settings).store_secret
    secret = build_store_secret(open_job, objects, advised, Credentials("token", "steering", "password"))["stringData"]
    assert claims_of("hush", secret["brain-token"]) == JobClaims(open_job.uid, open_job.key.namespace)
    assert "hush" not in str(secret)

    def variables(role: Role) -> dict[str, Any]:
        pod = build_pod(open_job, objects, InstanceId(role, 0, 1), Resources(), advised)
        return {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}

    master = variables(Role.MASTER)
    assert master["EMBERSCALE_BRAIN_ADDRESS"]["value"] == "brain:50061"
    assert master["EMBERSCALE_BRAIN_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "brain-token"
    assert not [name for name in variables(Role.WORKER) if "BRAIN" in name]


def test_an_address_without_a_token_is_refused() -> None:
    given = {"EMBERSCALE_IMAGE": "i", "EMBERSCALE_REDIS_URL": "redis://r", "EMBERSCALE_NAMESPACE": "n"}
    with pytest.raises(InvalidError, match="EMBERSCALE_BRAIN_TOKEN"):
        read_settings({**given, "EMBERSCALE_BRAIN_ADDRESS": "brain:1"})


def test_the_status_says_which_plan_is_in_force_and_why(open_job: Job) -> None:
    given = plan(6, 2, scalings=2)
    demands = demands_of(open_job.spec, given.shapes, planned=True)
    facts = Facts(
        name="toy",
        generation=1,
        standing=JobStanding(JobPhase.TRAINING),
        reason="Training",
        message="",
        demands=demands,
        members=(),
        now=0.0,
        plan=given,
    )
    status = unwrap(build_status(TrainingJobStatus(), facts).plan)
    assert (status.reason, status.message, status.brain_version, status.scalings) == ("Scale", "it pays", 3, 2)
    assert status.expected_samples_per_second == 900
    assert status.worker is not None
    assert (status.worker.replicas, status.worker.cpu, status.worker.memory) == (6, "2", "1024Mi")
    kept = unwrap(plan_of(status))
    assert counts(open_job, kept) == {Role.MASTER: 1, Role.PS: 2, Role.WORKER: 6}
    assert kept.sizing.message == "it pays"


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def normal(self, job: Job, reason: str, message: str, key: str) -> None:
        self.events.append((reason, message))


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (plan(1, 1), plan(3, 1), ["ScaledUpWorker"]),
        (plan(3, 2), plan(3, 1), ["ScaledDownPS"]),
        (plan(3, 1), plan(1, 2), ["ScaledUpPS", "ScaledDownWorker"]),
        (plan(1, 1), plan(1, 1, cpu=3.0), ["PlannedPSResources", "PlannedWorkerResources"]),
        (plan(1, 1), plan(1, 1), []),
        (plan(0, 0), plan(4, 2), []),
        (None, plan(4, 2), []),
    ],
)
def test_every_change_of_shape_is_an_event(
    open_job: Job, before: JobPlan | None, after: JobPlan, reasons: list[str]
) -> None:
    heard = Heard()
    stories.tell_scaling(heard, open_job, before, after)  # type: ignore[arg-type]  # it only listens
    assert [reason for reason, _ in heard.events] == reasons
    assert all("it pays" in message for _, message in heard.events)
