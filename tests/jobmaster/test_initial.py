"""A job starts from another job's checkpoint, and what it goes back to when it loses a server."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.small_job import BATCH
from tests.jobmaster.storage_double import INITIAL, StorageDouble

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DataFileIdentity, EpochApplied, Origin
from emberscale_api.job import DataContinuation
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.figures import committed_samples, phase_of
from emberscale_jobmaster.state import Stage
from eventually import unwrap

BATCHES = 10


def another(identifier: str = "00000007", done: int = BATCHES, **changes: Any) -> CheckpointManifest:
    """A checkpoint of another job, which has trained `done` batches of its one file."""
    fields: dict[str, Any] = {
        "id": identifier,
        "number": int(identifier),
        "created": datetime.now(UTC),
        "job_uid": "another-uid",
        "job": Driven().manifest.model_copy(
            update={"metadata": Driven().manifest.metadata.model_copy(update={"name": "another"})}
        ),
        "ps_count": 5,
        "generation": 3,
        "routing_version": 4,
        "epoch": 0,
        "batch_size": BATCH,
        "training_records": BATCHES * BATCH,
        "applied": (EpochApplied(epoch=0, ranges=((0, done),)),),
        "evaluations": (),
        "training_files": (DataFileIdentity(uri="/data/day_0", bytes=1000),),
        "evaluation_files": (),
        "training_seconds": 90.0,
        "files": (),
    }
    return CheckpointManifest(**{**fields, **changes})


def beside(*checkpoints: CheckpointManifest) -> StorageDouble:
    """Returns a storage that also has these checkpoints of the other job."""
    return StorageDouble(initial={one.id: one for one in checkpoints})


def started(continuation: str, *checkpoints: CheckpointManifest, **fields: Any) -> Driven:
    fields.setdefault("records", BATCHES * BATCH)
    driven = Driven(storage=beside(*checkpoints or (another(),)), continuation=continuation, **fields)
    driven.start()
    return driven


def origin(driven: Driven) -> Origin:
    return unwrap(driven.job.restored.origin)


def failure(driven: Driven) -> tuple[str, str]:
    outcome = unwrap(driven.job.outcome)
    assert outcome.phase is JobPhase.FAILED
    return outcome.reason, outcome.message


class TestWhatIsTrained:
    def test_fresh_trains_all_data_from_the_first_batch_on(self) -> None:
        driven = started("Fresh")
        assert committed_samples(driven.job, driven.spec) == 0
        assert driven.job.clock.training_seconds < 90
        driven.train_all()
        assert [server.applied for server in driven.ps.values()] == [{0: set(range(BATCHES))}] * 2
        assert origin(driven).trained == ()

    def test_append_reads_only_files_that_the_checkpoint_has_not_trained(self) -> None:
        driven = started("Append", files=("/data/day_1", "/data/day_0", "/data/day_2"))
        assert [file.uri for file in driven.job.read_files] == ["/data/day_1", "/data/day_2"]
        assert driven.job.training_records == 2 * BATCHES * BATCH
        driven.train_all()
        assert driven.ps[0].applied == {0: set(range(2 * BATCHES))}

    def test_resume_goes_on_where_the_checkpoint_stood(self) -> None:
        driven = started("Resume", another(done=4))
        assert committed_samples(driven.job, driven.spec) == 4 * BATCH
        assert driven.job.clock.training_seconds >= 90
        driven.train_all()
        assert driven.ps[0].applied == {0: set(range(BATCHES))}

    def test_the_start_is_told_once(self) -> None:
        driven = started("Append", files=("/data/day_0", "/data/day_1"))
        driven.kill(Role.PS, 0)
        driven.join(Role.PS, 0)
        told = [step.message for step in driven.job.scaling.steps if step.reason == "StartedFromCheckpoint"]
        place = f"{INITIAL}/00000007"
        assert told == [f"from {place} of job another, trained on 100 samples; files that count as trained: 1"]

    def test_what_a_chain_of_jobs_has_trained_adds_up(self) -> None:
        before = Origin(
            checkpoint="/first/00000001",
            job="first",
            job_uid="f",
            samples=50,
            continuation=DataContinuation.APPEND,
            trained=(DataFileIdentity(uri="/data/day_9", bytes=1000),),
            dense_steps=1,
        )
        driven = started("Append", another(origin=before), files=("/data/day_0", "/data/day_9", "/data/day_1"))
        assert [file.uri for file in driven.job.read_files] == ["/data/day_1"]


class TestRecovery:
    @pytest.mark.parametrize("continuation", ["Fresh", "Append", "Resume"])
    def test_without_a_checkpoint_of_its_own_a_job_goes_back_to_its_start(self, continuation: str) -> None:
        files = ("/data/day_0", "/data/day_1") if continuation == "Append" else ("/data/day_0",)
        done = 4 if continuation == "Resume" else BATCHES
        driven = started(continuation, another("00000006"), another(done=done), files=files)
        driven.train(3)
        began = origin(driven)
        unwrap(driven.storage.initial)["00000008"] = another("00000008")  # the other job goes on
        driven.kill(Role.PS, 1)
        driven.join(Role.PS, 1)
        assert origin(driven) == began
        assert committed_samples(driven.job, driven.spec) == (4 * BATCH if continuation == "Resume" else 0)
        driven.train_all()
        assert driven.ps[0].applied == driven.ps[1].applied == {0: set(range(BATCHES))}

    def test_a_checkpoint_that_another_run_has_replaced_is_not_what_the_job_started_from(self) -> None:
        """Otherwise the rows would already contain the data that the job trains, or lack the files that it skips."""
        driven = started("Append", files=("/data/day_0", "/data/day_1"))
        driven.train(3)
        day_1 = (DataFileIdentity(uri="/data/day_1", bytes=1000),)
        driven.storage.initial = {"00000007": another(job_uid="another-run", training_files=day_1)}
        driven.kill(Role.PS, 1)
        driven.join(Role.PS, 1)
        assert failure(driven) == (
            "InitialCheckpointUnusable",
            f"spec.checkpoint.initialFrom: {INITIAL}/00000007 is another run's now, and not what the job started from: "
            "start a new job",
        )

    def test_its_own_checkpoint_wins(self) -> None:
        driven = started("Append", files=("/data/day_0", "/data/day_1"), interval=5.0)
        driven.train(3)
        driven.pass_time(6)
        assert driven.storage.checkpoints
        driven.train(2)
        driven.kill(Role.PS, 0)
        driven.join(Role.PS, 0)
        assert committed_samples(driven.job, driven.spec) == 3 * BATCH
        assert origin(driven).checkpoint == f"{INITIAL}/00000007"
        driven.train_all()
        assert driven.ps[0].applied == {0: set(range(BATCHES))}

    @pytest.mark.parametrize("has_origin", [True, False])
    def test_a_job_whose_checkpoints_are_gone_waits_for_them_and_does_not_begin_again(self, has_origin: bool) -> None:
        """A volume may disappear, and come back."""
        storage = beside(another()) if has_origin else StorageDouble()
        driven = Driven(records=BATCHES * BATCH, interval=5.0, storage=storage)
        driven.start()
        driven.train(3)
        driven.pass_time(6)
        volume, storage.checkpoints = storage.checkpoints, {}
        driven.kill(Role.PS, 0)
        driven.join(Role.PS, 0)
        (trouble,) = driven.job.troubles.values()
        newest = max(volume)
        assert trouble.message == f"spec.checkpoint.uri (/checkpoints) holds no checkpoint, and held {newest}"
        storage.checkpoints = volume
        driven.pass_time(20)
        assert committed_samples(driven.job, driven.spec) == 3 * BATCH
        driven.train_all()
        assert driven.ps[0].applied == driven.ps[1].applied == {0: set(range(BATCHES))}

    def test_an_empty_ledger_goes_back_to_its_own_checkpoint_and_skips_the_same_files(self) -> None:
        driven = started("Append", files=("/data/day_0", "/data/day_1"), interval=5.0)
        driven.train(3)
        driven.pass_time(6)
        own = StorageDouble(initial={}, checkpoints=driven.storage.checkpoints, written=driven.storage.written)
        again = Driven(storage=own, continuation="Append", records=BATCHES * BATCH, files=driven.files)
        again.start()
        assert [file.uri for file in again.job.read_files] == ["/data/day_1"]
        assert committed_samples(again.job, again.spec) == 3 * BATCH

    @pytest.mark.parametrize("continuation", ["Fresh", "Resume"])
    def test_a_job_soon_has_a_checkpoint_of_its_own_though_it_has_trained_nothing(self, continuation: str) -> None:
        """The other job may remove the one that it started from."""
        driven = started(continuation, another(done=4), interval=5.0)
        driven.pass_time(6)
        (own,) = driven.storage.checkpoints
        assert driven.job.checkpoint == own
        assert driven.storage.written[own].image.origin == origin(driven)
        driven.pass_time(20)
        assert [*driven.storage.checkpoints] == [own]

    def test_a_partial_recovery_never_reloads_the_other_jobs_rows(self) -> None:
        driven = started("Fresh", target_pls=1.0)
        driven.train(3)
        driven.kill(Role.PS, 1)
        driven.join(Role.PS, 1)
        assert driven.job.recoveries == 1
        assert driven.job.forgotten == ()

    def test_a_checkpoint_that_fails_while_it_is_loaded_gives_way_to_the_one_before(self) -> None:
        driven = Driven(storage=beside(another("00000006"), another()), records=100)
        driven.faults["Assign", 0] = Fault(code="DATA_LOSS")
        driven.start()
        assert origin(driven).checkpoint == f"{INITIAL}/00000006"
        assert driven.job.damaged == {f"{INITIAL}/00000007": "Assign failed"}
        assert phase_of(driven.job, driven.spec) is JobPhase.TRAINING

    def test_a_file_that_is_damaged_rules_out_all_checkpoints_that_need_it(self) -> None:
        shared = CheckpointFile(path="ps-0/a.rows", bytes=1, crc32=1)
        base, newest = another("00000006", files=(shared,)), shared.model_copy(update={"checkpoint": "00000006"})
        driven = Driven(storage=beside(another("00000005"), base, another(files=(newest,))), records=100)
        driven.faults["Assign", 0] = Fault(code="DATA_LOSS", damaged_file=f"{INITIAL}/00000006/ps-0/a.rows")
        driven.start()
        assert origin(driven).checkpoint == f"{INITIAL}/00000005"


class TestBadInput:
    def test_an_incomplete_checkpoint_is_not_appended_to(self) -> None:
        driven = Driven(storage=beside(another("00000006", 3)), continuation="Append")
        for index in range(2):
            driven.join(Role.PS, index)
        assert failure(driven) == (
            "InitialCheckpointUnusable",
            f"spec.checkpoint.initialFrom: {INITIAL}/00000006 has not trained all of its own files: 70 samples are "
            "left, which data.continuation Append would skip; Fresh takes the model alone; no other checkpoint there "
            "can be taken",
        )

    def test_a_file_that_changed_since_it_was_trained_is_named(self) -> None:
        grown = another(training_files=(DataFileIdentity(uri="/data/day_0", bytes=999),))
        driven = started("Append", grown, files=("/data/day_0", "/data/day_1"))
        assert failure(driven) == (
            "DataChanged",
            f"/data/day_0 has 1,000 bytes, and had 999 when {INITIAL}/00000007 trained it; data.continuation Append "
            "trains new files only: restore it, or give the new data under another name",
        )

    def test_append_without_a_new_file_trains_nothing(self) -> None:
        reason, message = failure(started("Append"))
        assert reason == "DataEmpty"
        assert message == "spec.data.train: the checkpoint has trained all files; add new ones"

    def test_resume_needs_the_same_files(self) -> None:
        reason, message = failure(started("Resume", files=("/data/day_0", "/data/day_1")))
        assert reason == "DataChanged"
        assert message.startswith("/data/day_1 was not among the data files of the checkpoint")

    def test_a_server_that_does_not_know_how_to_begin_another_history_fails_the_job(self) -> None:
        """Otherwise each batch that it takes for applied would be lost."""
        driven = Driven(storage=beside(another()), forgets_anew=True)
        for index in range(2):
            driven.join(Role.PS, index)
        assert failure(driven) == (
            "InitialCheckpointUnusable",
            "ps-0 counts the batches of another job as applied: it runs a version before initialFrom",
        )

    def test_nothing_is_indexed_before_the_checkpoint_is_known(self) -> None:
        driven = Driven(storage=beside(another()), continuation="Append", files=("/data/day_0", "/data/day_1"))
        driven.prepare()
        stages = [driven.job.stage]
        for index in range(2):
            driven.join(Role.PS, index)
        assert [*stages, driven.job.stage] == [Stage.DISCOVER, Stage.INDEX]
