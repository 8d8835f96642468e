"""Flash checkpoints beside persistent ones: which tier a job goes back to, and what a failing Redis costs."""

import json

import pytest
from pydantic import TypeAdapter
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, is_flash
from emberscale_api.job import FlashMode
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster import flash
from emberscale_jobmaster.effects import SavedCall
from emberscale_jobmaster.events import ManifestWritten
from emberscale_jobmaster.flash import Flash
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import CheckpointPhase, CheckpointPurpose
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.status import explanation, job_status
from emberscale_jobmaster.warning_signs import warning_signs
from eventually import unwrap


@pytest.fixture
def driven() -> Driven:
    """A job that trains, with a flash checkpoint every 5 seconds and a persistent one every 1000."""
    driven = Driven(flash_interval=5.0)
    driven.start()
    return driven


def replace_server(driven: Driven, index: int = 0) -> None:
    driven.kill(Role.PS, index)
    driven.join(Role.PS, index)
    driven.pass_time(2)


def tiers(driven: Driven) -> list[bool]:
    return [is_flash(name) for name, (_, whole) in sorted(driven.storage.checkpoints.items()) if whole]


def warnings(driven: Driven) -> str:
    return " ".join(warning_signs(driven.job, Observations(), driven.spec))


def test_each_tier_has_its_own_interval() -> None:
    driven = Driven(flash_interval=5.0, interval=12.0)
    driven.start()
    driven.train_for(26)
    assert driven.job.flash.checkpoint == max(name for name in driven.storage.checkpoints if is_flash(name))
    assert tiers(driven).count(False) == 2
    assert tiers(driven).count(True) >= 4
    assert not is_flash(driven.job.checkpoint)


def test_a_lost_server_takes_the_job_back_to_the_newest_of_both_tiers(driven: Driven) -> None:
    driven.train(3)
    driven.pass_time(6)
    kept = driven.job.flash.checkpoint
    driven.train(4)
    replace_server(driven)
    assert driven.job.restored.applied == {0: ((0, 3),)}
    assert driven.job.checkpoint == kept
    assert driven.storage.found[-1].flash == kept
    driven.train_all()
    driven.pass_time(5)
    assert driven.job.outcome is not None
    assert not is_flash(driven.job.checkpoint), "the last checkpoint is one that lasts"


def test_a_job_that_is_suspended_while_it_goes_back_keeps_its_flash_checkpoint(driven: Driven) -> None:
    driven.train(3)
    driven.pass_time(6)
    driven.kill(Role.PS, 0)
    driven.suspend()
    assert driven.job.outcome is None
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert driven.job.outcome is not None
    assert driven.job.outcome.phase is JobPhase.SUSPENDED
    assert not is_flash(driven.job.checkpoint), "Redis may end with the job"
    assert driven.job.restored.applied == {0: ((0, 3),)}


def test_a_suspended_job_does_not_promise_to_resume_from_a_checkpoint_that_may_end_with_redis(driven: Driven) -> None:
    driven.train(3)
    driven.pass_time(6)
    replace_server(driven)
    assert is_flash(driven.job.checkpoint)
    driven.storage.behaviour = "fails"
    driven.suspend()
    driven.pass_time(200)
    outcome = unwrap(driven.job.outcome)
    assert outcome.phase is JobPhase.SUSPENDED
    assert outcome.message == "resumes from the newest checkpoint, or from the start if there is none"


def test_a_newer_persistent_checkpoint_is_preferred() -> None:
    driven = Driven(flash_interval=900.0, interval=7.0)
    driven.start()
    driven.pass_time(8)
    replace_server(driven)
    assert not is_flash(driven.job.checkpoint)
    assert driven.storage.found[-1].flash == ""


def test_damage_to_the_flash_tier_leads_to_the_next_and_never_fails_the_job(driven: Driven) -> None:
    driven.train(3)
    driven.pass_time(6)
    lost = driven.job.flash.checkpoint
    driven.faults["Assign", 0] = Fault(code="DATA_LOSS")
    replace_server(driven)
    driven.pass_time(2)
    assert lost in driven.job.damaged
    assert driven.job.routing.ready
    assert driven.job.restored.applied == {}
    assert driven.job.stage is Stage.TRAIN
    assert lost not in (driven.job.flash.checkpoint, driven.job.checkpoint)
    assert "a damaged checkpoint was skipped" in warnings(driven)


@pytest.mark.parametrize("call", ["Hold", "Settle", "Snapshot", "Saved"])
def test_a_flash_checkpoint_that_fails_costs_only_itself(driven: Driven, call: str) -> None:
    driven.faults[call, 1] = Fault(code="RESOURCE_EXHAUSTED")
    driven.train(2)
    driven.pass_time(6)
    assert driven.job.flash.checkpoint == ""
    assert f"{call} failed" in warnings(driven)
    assert f"{call} failed" in job_status(driven.job, Observations(), driven.spec, driven.now).flash.problem
    assert explanation(driven.job, driven.spec)[0] == "Training"
    driven.train(2)
    driven.pass_time(12)
    assert driven.job.flash.checkpoint
    assert "flash" not in warnings(driven)


def test_a_failure_removes_what_servers_have_left_that_are_gone() -> None:
    driven = Driven(servers=2, sizes_open=True, flash_interval=5.0)
    driven.start()
    driven.plan(3)
    driven.join(Role.PS, 2)
    driven.pass_time(6)
    driven.plan(2)
    driven.train(2)
    assert not driven.storage.swept
    driven.faults["Saved", 1] = Fault(code="RESOURCE_EXHAUSTED")
    driven.pass_time(6)
    assert driven.storage.swept == [(2,)]


def test_a_flash_manifest_that_cannot_be_written_is_given_up_at_once(driven: Driven) -> None:
    driven.storage.behaviour = "fails"
    driven.pass_time(6)
    assert driven.job.checkpointings == ()
    assert CheckpointPurpose.FLASH in driven.job.troubles
    driven.storage.behaviour = "works"
    driven.pass_time(12)
    assert CheckpointPurpose.FLASH not in driven.job.troubles
    assert driven.job.flash.checkpoint


def test_a_server_that_dies_at_the_moment_of_the_manifest_costs_that_checkpoint_and_no_more(driven: Driven) -> None:
    driven.train(3)
    driven.pass_time(6)
    kept = driven.job.flash.checkpoint
    driven.train(2)
    driven.storage.behaviour = "hangs"
    driven.pass_time(6)
    [writing] = driven.job.checkpointings
    assert writing.phase is CheckpointPhase.WRITE
    driven.storage.behaviour = "works"
    replace_server(driven)
    assert driven.job.restored.applied == {0: ((0, 3),)}
    driven.tell(ManifestWritten(now=driven.now, operation=writing.id, serial=1))
    assert driven.job.checkpoint == kept
    assert driven.job.flash.checkpoint == kept
    driven.train_all()
    driven.pass_time(5)
    assert driven.job.outcome is not None
    assert driven.job.outcome.reason == "Completed"


def test_attempts_that_fail_get_rarer(driven: Driven) -> None:
    driven.faults["Saved", 0] = Fault(code="RESOURCE_EXHAUSTED", times=1000)
    driven.pass_time(300)
    assert driven.called["Saved", 0] < 10


def test_redis_that_never_answers_keeps_no_other_checkpoint_from_being_taken(driven: Driven) -> None:
    driven.faults["Saved", 0] = Fault(hangs=True)
    driven.pass_time(6)
    assert any(taking.is_flash for taking in driven.job.checkpointings)
    driven.train_all()
    driven.pass_time(3)
    assert driven.job.outcome is not None
    assert driven.job.outcome.reason == "Completed"


def test_the_next_master_goes_on_with_a_flash_checkpoint(driven: Driven) -> None:
    driven.faults["Saved", 0] = Fault(hangs=True)
    driven.train(3)
    driven.pass_time(6)
    assert any(isinstance(call.request, SavedCall) for call in driven.unanswered)  # type: ignore[union-attr]
    driven.master_dies()
    driven.pass_time(1)
    assert driven.job.flash.checkpoint
    replace_server(driven)
    assert driven.job.restored.applied == {0: ((0, 3),)}


def test_a_master_without_a_redis_for_rows_takes_none_and_says_so_where_they_are_asked_for() -> None:
    driven = Driven()
    driven.start()
    driven.pass_time(60)
    assert driven.storage.checkpoints == {}
    assert not job_status(driven.job, Observations(), driven.spec, driven.now).HasField("flash")
    asked = driven.spec.model_copy(
        update={
            "checkpoint": driven.spec.checkpoint.model_copy(
                update={"flash": driven.spec.checkpoint.flash.model_copy(update={"mode": FlashMode.ENABLED})}
            )
        }
    )
    assert any("redis.flash" in sign for sign in warning_signs(driven.job, Observations(), asked))


def test_the_state_of_the_version_before_is_read() -> None:
    adapter = TypeAdapter(JobState)
    document = json.loads(adapter.dump_json(JobState()))
    del document["flash"]
    assert adapter.validate_json(json.dumps(document)).flash == Flash()


def test_without_an_interval_a_flash_checkpoint_costs_a_hundredth_of_the_time() -> None:
    spec = Driven().spec
    assert flash.interval(Flash(cost_seconds=0.05), spec) == flash.LEAST_INTERVAL_SECONDS
    assert flash.interval(Flash(cost_seconds=0.5), spec) == pytest.approx(50)
    assert flash.interval(Flash(cost_seconds=100.0), spec) == flash.LONGEST_INTERVAL_SECONDS


def test_the_next_flash_checkpoint_comes_before_redis_forgets_the_last() -> None:
    spec = Driven(flash_interval=7200.0).spec
    assert flash.interval(Flash(), spec) <= FLASH_KEPT_SECONDS / 2
    assert flash.interval(Flash(), Driven(flash_interval=900.0).spec) == 900.0
