"""Rebuilds in a job that is being suspended, or that takes its last checkpoint."""

import pytest
from tests.jobmaster.driven import Driven, protected
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe

from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_api.routing import ParityTrouble
from emberscale_jobmaster import losses, rebuilding, retry
from emberscale_jobmaster.effects import CallServer, WriteManifest
from emberscale_jobmaster.events import ManifestWritten
from emberscale_jobmaster.figures import committed_samples
from emberscale_jobmaster.state import Stage


def suspended() -> Driven:
    """A job that is to rest while a server is lost, whose rows only its successor can have."""
    driven = protected(adopts_rows=False)
    driven.kill(Role.PS, 1)
    driven.suspend()
    return driven


def test_a_suspension_waits_for_the_lost_server_and_rests_at_a_checkpoint_of_now() -> None:
    driven = suspended()
    driven.pass_time(30)
    assert not driven.job.over
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert "resumes from checkpoint" in describe(driven)
    assert (driven.job.recoveries, driven.job.rebuilt.count, committed_samples(driven.job, driven.spec)) == (0, 1, 40)


def test_a_suspension_waits_for_rows_that_are_being_rebuilt() -> None:
    driven = suspended()
    driven.faults["Prepare", 1] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    driven.pass_time(retry.SUSPENSION_PATIENCE_SECONDS + 5)
    assert not driven.job.over
    driven.answer(next(call for call in driven.unanswered if isinstance(call, CallServer)))
    driven.pass_time(5)
    assert "resumes from checkpoint" in describe(driven)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_suspension_does_not_wait_for_a_successor_that_does_not_come() -> None:
    driven = suspended()
    driven.pass_time(retry.SUSPENSION_PATIENCE_SECONDS + 1)
    assert "Suspended: resumes from the start: no checkpoint was taken" in describe(driven)


def saving(call: str) -> Driven:
    """A job whose last checkpoint waits for the answer of ps-1 to a call."""
    driven = protected(adopts_rows=False)
    driven.faults[call, 1] = Fault(hangs=True, times=99)
    driven.train_all()
    driven.pass_time(1)
    assert driven.job.stage is Stage.SAVE
    return driven


@pytest.mark.parametrize("call", ["Hold", "Snapshot", "Saved"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_server_that_is_lost_during_the_last_checkpoint_is_rebuilt_and_saves_its_rows(call: str, dies: bool) -> None:
    driven = saving(call)
    assert not losses.unprotected_reason(driven.job, driven.spec)
    given_up = driven.job.checkpointings[0].checkpoint
    driven.kill(Role.PS, 1)
    assert not driven.job.checkpointings, "the snapshot of the lost server is gone"
    driven.faults.clear()
    if dies:
        driven.master_dies()
    driven.pass_time(30)
    assert driven.job.stage is Stage.SAVE
    assert not driven.job.checkpointings
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert "Completed" in describe(driven)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    assert driven.job.checkpoint > given_up
    applied, is_complete = driven.storage.checkpoints[driven.job.checkpoint]
    assert (applied, is_complete) == ({0: set(range(50))}, True)


def test_a_last_checkpoint_whose_files_are_all_written_does_not_wait_for_a_lost_server() -> None:
    driven = protected()
    driven.storage.behaviour = "fails"
    driven.train_all()
    driven.pass_time(1)
    driven.kill(Role.PS, 1)
    assert driven.job.rebuilding is not None
    driven.storage.behaviour = "works"
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_a_server_that_is_lost_after_the_last_checkpoint_takes_nothing_back() -> None:
    driven = protected()
    driven.storage.behaviour = "hangs"
    driven.train_all()
    (write,) = (effect for effect in driven.unanswered if isinstance(effect, WriteManifest))
    driven.tell(ManifestWritten(now=driven.now, operation=write.operation, serial=write.serial))
    assert driven.job.prunings, "older checkpoints are still being removed"
    driven.kill(Role.PS, 1)
    driven.pass_time(60)
    assert "Completed" in describe(driven)
    assert driven.job.recoveries == 0


def test_the_last_checkpoint_does_not_wait_for_rows_that_no_longer_come() -> None:
    driven = saving("Hold")
    group = replace(driven.job.parity_group, missing=frozenset({1}))
    driven.state = replace(driven.state, job=replace(driven.job, parity_group=group))
    version = driven.job.routing.table.version
    driven.troubles[1] = ParityTrouble(version, "9 rows do not arrive", rebuilding.PARTED_SECONDS, broken=True)
    driven.missing[1] = 9
    driven.pass_time(rebuilding.PARTED_SECONDS + 1)
    assert driven.job.recoveries == 1
