"""Persistent checkpoints of a driven job: which one counts, and when the next is taken."""

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.storage_double import as_ranges

from emberscale_api.checkpoint import is_flash, is_priority
from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.effects import WriteManifest
from emberscale_jobmaster.events import ManifestWritten
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.statistics import Tally

INTERVAL = 20.0


def trained(batches: int = 3, **settings: object) -> Driven:
    """A job that has trained this many batches, and taken a checkpoint of them."""
    driven = Driven(**{"interval": INTERVAL, **settings})  # type: ignore[arg-type]  # any of its fields
    driven.start()
    driven.train(batches)
    driven.pass_time(INTERVAL + 2)
    assert list(kept(driven).values()) == [{0: ((0, batches),)}]
    return driven


def kept(driven: Driven) -> dict[str, Applied]:
    """Returns the batches in the persistent checkpoints that were completed and not pruned, by id."""
    return {
        name: as_ranges(held)
        for name, (held, whole) in sorted(driven.storage.checkpoints.items())
        if whole and not is_flash(name) and not is_priority(name)
    }


def train_anew(driven: Driven, batches: int) -> None:
    """Another worker trains, since the lease of the one that trained nothing is over."""
    driven.join(Role.WORKER, 0)
    driven.train(batches)


def answer(driven: Driven, checkpoint: str) -> None:
    """The storage answers at last that it has written the manifest of this checkpoint."""
    for effect in driven.unanswered:
        if isinstance(effect, WriteManifest) and effect.checkpoint == checkpoint:
            driven.tell(ManifestWritten(now=driven.now, operation=effect.operation, serial=effect.serial))


@pytest.mark.parametrize("purpose", [CheckpointPurpose.FINAL, CheckpointPurpose.SUSPENSION])
def test_a_checkpoint_whose_manifest_is_late_does_not_replace_the_one_that_ends_the_job(
    purpose: CheckpointPurpose,
) -> None:
    driven = Driven(interval=30.0, records=200, incremental="OneShot")
    driven.start()
    driven.train(3)
    driven.storage.behaviour = "hangs"
    driven.pass_time(47)  # the manifest is given up once, and asked for again
    assert driven.job.troubles
    if purpose is CheckpointPurpose.FINAL:
        driven.train_all()
    else:
        driven.train(4)
        driven.suspend()
    driven.pass_time(1)
    assert [(one.checkpoint, one.purpose) for one in driven.job.checkpointings] == [
        ("00000001", CheckpointPurpose.PERIODIC),
        ("00000002", purpose),
    ]

    answer(driven, "00000002")
    chain = driven.job.chain
    driven.pass_time(5)  # old checkpoints are being removed
    answer(driven, "00000001")

    held = {0: ((0, 20 if purpose is CheckpointPurpose.FINAL else 7),)}
    assert (driven.job.checkpoint, driven.job.restored.applied, driven.job.chain) == ("00000002", held, chain)
    driven.pass_time(30)
    assert driven.job.outcome is not None
    assert driven.job.outcome.phase in (JobPhase.COMPLETE, JobPhase.SUSPENDED)
    assert (driven.job.checkpoint, driven.job.restored.applied) == ("00000002", held)


def test_a_manifest_that_comes_before_that_of_the_final_checkpoint_changes_nothing_about_the_end() -> None:
    driven = Driven(interval=30.0, records=200)
    driven.start()
    driven.train(3)
    driven.storage.behaviour = "hangs"
    driven.pass_time(47)
    driven.train_all()
    driven.pass_time(1)
    answer(driven, "00000001")
    assert driven.job.checkpoint == "00000001"
    assert not driven.job.over
    answer(driven, "00000002")
    driven.pass_time(31)
    assert driven.job.outcome is not None
    assert driven.job.outcome.phase is JobPhase.COMPLETE
    assert (driven.job.checkpoint, driven.job.restored.applied) == ("00000002", {0: ((0, 20),)})


def test_while_nothing_is_trained_no_checkpoint_follows_and_the_older_one_stays() -> None:
    driven = trained(3)
    driven.train(3)
    driven.pass_time(INTERVAL)
    before = kept(driven)
    assert list(before.values()) == [{0: ((0, 3),)}, {0: ((0, 6),)}]
    called = driven.called.copy()
    driven.pass_time(20 * INTERVAL)
    assert kept(driven) == before
    assert driven.called == called, "no pushes are held"


def test_the_first_batch_after_a_pause_waits_for_the_end_of_an_interval() -> None:
    driven = trained(3)
    driven.pass_time(3.5 * INTERVAL)
    train_anew(driven, 1)
    driven.pass_time(2)
    assert len(kept(driven)) == 1
    driven.pass_time(INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 3),)}, {0: ((0, 4),)}]


def test_an_evaluation_brings_no_checkpoint_before_its_end_and_then_its_result() -> None:
    driven = Driven(interval=INTERVAL, records=50, evaluation=50)
    driven.spec = driven.spec.model_copy(update={"training": driven.spec.training.model_copy(update={"epochs": 2})})
    driven.start()
    driven.train_all()
    assert driven.job.stage is Stage.EVALUATE
    driven.pass_time(4 * INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 5),)}]
    worker = driven.workers[0]
    while driven.job.stage is Stage.EVALUATE:
        driven._finish(worker, driven._ask(worker), Tally(samples=10))
    assert driven.job.stage is Stage.TRAIN
    assert driven.job.evaluations
    driven.pass_time(4 * INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 5),)}] * 2
    newest = driven.storage.written[driven.job.checkpoint]
    assert newest.image.evaluations == driven.job.evaluations


def test_a_job_that_went_back_to_its_checkpoint_takes_none_before_it_trains() -> None:
    driven = trained(3)
    driven.train(4)
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(4 * INTERVAL)
    assert (driven.job.stage, driven.job.recoveries) == (Stage.TRAIN, 1)
    assert list(kept(driven).values()) == [{0: ((0, 3),)}]
    train_anew(driven, 1)
    driven.pass_time(INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 3),)}, {0: ((0, 4),)}]


def test_a_job_that_went_back_to_a_flash_checkpoint_takes_one_that_lasts() -> None:
    driven = Driven(interval=INTERVAL, flash_interval=5.0)
    driven.start()
    driven.train(3)
    driven.pass_time(6)
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert is_flash(driven.job.checkpoint)
    driven.pass_time(INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 3),)}]


def test_flash_checkpoints_are_renewed_before_redis_forgets_them_even_if_nothing_is_trained() -> None:
    driven = trained(3, flash_interval=5.0)
    before = driven.job.flash.checkpoint
    driven.pass_time(2 * INTERVAL)
    assert driven.job.flash.checkpoint > before
    assert len(kept(driven)) == 1


def test_rows_that_forgot_something_are_in_a_checkpoint_though_nothing_is_trained() -> None:
    driven = trained(20, target_pls=1.0)
    driven.train(3)
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert driven.job.forgotten
    driven.pass_time(2 * INTERVAL)
    assert driven.storage.written[driven.job.checkpoint].image.forgotten == driven.job.forgotten
    assert list(kept(driven).values()) == [{0: ((0, 20),)}, {0: ((0, 23),)}]
    driven.pass_time(4 * INTERVAL)
    assert len(driven.storage.written) == 2


def test_a_damaged_checkpoint_is_replaced_though_nothing_is_trained() -> None:
    driven = trained(3)
    job = replace(driven.job, damaged={driven.job.checkpoint: "its checksum differs"})
    driven.state = replace(driven.state, job=job)
    driven.pass_time(4 * INTERVAL)
    assert list(kept(driven).values()) == [{0: ((0, 3),)}] * 2


def test_a_suspension_takes_its_checkpoint_though_nothing_is_trained() -> None:
    driven = trained(3)
    driven.pass_time(3 * INTERVAL)
    driven.suspend()
    driven.pass_time(2)
    assert driven.job.outcome is not None
    assert driven.job.outcome.phase is JobPhase.SUSPENDED
    assert list(kept(driven).values()) == [{0: ((0, 3),)}] * 2


def test_while_nothing_is_trained_no_priority_rows_are_saved() -> None:
    driven = trained(20, target_pls=1.0, priority="MFU")
    driven.pass_time(4 * INTERVAL)
    assert [*driven.job.priority.saves] == []
    train_anew(driven, 1)
    driven.pass_time(INTERVAL / 4)
    assert len(driven.job.priority.saves) in (1, 2)
    assert driven.storage.written[driven.job.priority.saves[0]].partial_rows == driven.job.checkpoint
