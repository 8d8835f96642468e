"""Persistent checkpoints of a driven job: which one counts, and when the next is taken."""

import pytest
from tests.jobmaster.driven import Driven

from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.effects import WriteManifest
from emberscale_jobmaster.events import ManifestWritten
from emberscale_jobmaster.operations import CheckpointPurpose


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
    driven.storage = "hangs"
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
    driven.storage = "hangs"
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
