"""From which checkpoint of another job a job starts, and why it refuses the others."""

from collections.abc import Mapping
from typing import Any

import pytest

from emberscale_api.checkpoint import (
    CheckpointFile,
    CheckpointManifest,
    DamagedCheckpointError,
    DataFileIdentity,
    EpochApplied,
    Origin,
)
from emberscale_api.job import DataContinuation, ManifestError, TrainingJob, parse_manifest
from emberscale_api.origin import InitialCheckpoints, RefusedCheckpoint, UnusableOriginError, origin_of
from master_stand_in import checkpoint_manifest

PLACE = "s3://bucket/january"


def job(identifier: object = None, **sections: Mapping[str, object]) -> TrainingJob:
    initial = {"uri": PLACE} | ({} if identifier is None else {"id": identifier})
    spec = {"data": {"train": ["day"]}, "checkpoint": {"initialFrom": initial}, **sections}
    return parse_manifest(
        {"apiVersion": "emberscale.io/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    )


def checkpoint(number: int, batches: int = 10, **changes: Any) -> CheckpointManifest:
    fields: dict[str, Any] = {
        "id": f"{number:08}",
        "number": number,
        "batch_size": 10,
        "training_records": 100,
        "applied": (EpochApplied(epoch=0, ranges=((0, batches),)),),
        "training_files": (DataFileIdentity(uri="/day_0", bytes=5),),
        "job": job(model={"embeddings": {"dimension": 8}}),
    }
    return checkpoint_manifest(**{**fields, **changes})


class Folder:
    """Checkpoints by id; a damaged one has its problem instead of a manifest."""

    def __init__(self, *checkpoints: CheckpointManifest | tuple[int, str]) -> None:
        self.held = {one.id if isinstance(one, CheckpointManifest) else f"{one[0]:08}": one for one in checkpoints}

    def choose(
        self, job: TrainingJob, pinned: Origin | None = None, refused: Mapping[str, RefusedCheckpoint] | None = None
    ) -> str:
        initial = InitialCheckpoints(PLACE, sorted(self.held), self._read, refused or {})
        return initial.choose(job, pinned)[0].id

    def refusal(self, job: TrainingJob, refused: Mapping[str, RefusedCheckpoint] | None = None) -> str:
        with pytest.raises(UnusableOriginError) as caught:
            self.choose(job, refused=refused)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def _read(self, identifier: str) -> CheckpointManifest:
        found = self.held[identifier]
        if isinstance(found, CheckpointManifest):
            return found
        raise DamagedCheckpointError(found[1])


MODEL = {"embeddings": {"dimension": 8}}


class TestChoice:
    def test_the_newest_that_can_be_restored(self) -> None:
        folder = Folder(checkpoint(3), checkpoint(4), (5, "s3://bucket/january/00000005/ps-0/a.rows: is missing"))
        initial = InitialCheckpoints(PLACE, sorted(folder.held), folder._read)
        manifest, damaged = initial.choose(job(model=MODEL))
        assert manifest.id == "00000004"
        assert list(damaged) == ["00000005"]

    def test_the_one_that_the_manifest_names(self) -> None:
        assert Folder(checkpoint(3), checkpoint(4)).choose(job("00000003", model=MODEL)) == "00000003"

    def test_the_one_from_before_whatever_came_since(self) -> None:
        before = origin_of(checkpoint(3), f"{PLACE}/00000003", DataContinuation.FRESH)
        assert Folder(checkpoint(3), checkpoint(4)).choose(job(model=MODEL), pinned=before) == "00000003"

    def test_one_from_before_in_another_folder_says_nothing_of_this_one(self) -> None:
        before = origin_of(checkpoint(3), "s3://elsewhere/00000003", DataContinuation.FRESH)
        assert Folder(checkpoint(3), checkpoint(4)).choose(job(model=MODEL), pinned=before) == "00000004"

    def test_one_that_failed_while_it_was_loaded_is_not_taken_again(self) -> None:
        folder = Folder(checkpoint(3), checkpoint(4))
        assert folder.choose(job(model=MODEL), refused={"00000004": RefusedCheckpoint("a bit flipped")}) == "00000003"

    def test_one_that_needs_a_file_that_failed_in_another_one_is_not_taken(self) -> None:
        damaged = CheckpointFile(path="ps-0/table-3-0.b4", bytes=1, crc32=1)
        others = CheckpointFile(path="ps-0/table-3-0.b4x", bytes=1, crc32=1)
        folder = Folder(
            checkpoint(2, files=(others,)),
            checkpoint(3, files=(damaged,)),
            checkpoint(4, files=(damaged.model_copy(update={"checkpoint": "00000003"}),)),
        )
        refused = {"00000004": RefusedCheckpoint("a bit flipped", f"{PLACE}/00000003/ps-0/table-3-0.b4")}
        assert folder.choose(job(model=MODEL), refused=refused) == "00000002"
        told = folder.refusal(job("00000004", model=MODEL), refused)
        assert "give spec.checkpoint.initialFrom.id: '00000002' instead" in told

    def test_what_a_reason_says_of_files_rules_out_no_other_checkpoint(self) -> None:
        shared = CheckpointFile(path="ps-0/a.rows", bytes=1, crc32=1)
        folder = Folder(checkpoint(3, files=(shared,)), checkpoint(4))
        refused = {"00000004": RefusedCheckpoint(f"{PLACE}/00000003/ps-0/a.rows is not what it was")}
        assert folder.choose(job(model=MODEL), refused=refused) == "00000003"


class TestRefusals:
    def test_a_chain_whose_base_is_gone(self) -> None:
        folder = Folder(checkpoint(2), (4, f"{PLACE}/00000003/ps-0/table-0-0.rows: is missing"), checkpoint(5))
        assert folder.refusal(job("00000004", model=MODEL)) == (
            f"spec.checkpoint.initialFrom: {PLACE}/00000004 cannot be restored: {PLACE}/00000003/ps-0/table-0-0.rows: "
            "is missing; give spec.checkpoint.initialFrom.id: '00000002' instead"
        )

    def test_a_format_of_a_later_version(self) -> None:
        later = checkpoint(7).to_json().replace('"format_version": 1', '"format_version": 9')
        with pytest.raises(DamagedCheckpointError) as caught:
            CheckpointManifest.from_json(later, f"{PLACE}/00000007/manifest.json")
        told = Folder((7, str(caught.value))).refusal(job(model=MODEL))
        assert f"{PLACE}/00000007/manifest.json: has format 9, and this version reads formats up to" in told

    def test_another_model(self) -> None:
        told = Folder(checkpoint(3), checkpoint(4)).refusal(job(model={"embeddings": {"dimension": 16}}))
        assert told == (
            f"spec.checkpoint.initialFrom: {PLACE}/00000004 does not fit this job: spec.model.embeddings.dimension is "
            "16 and 8 there; no other checkpoint there can be taken"
        )

    def test_what_batches_mean_matters_only_to_a_job_that_resumes(self) -> None:
        folder, training = Folder(checkpoint(4)), {"batchSize": 20, "seed": 4}
        assert folder.choose(job(model=MODEL, training=training)) == "00000004"
        resuming = job(model=MODEL, training=training, data={"train": ["day"], "continuation": "Resume"})
        assert "spec.training.batchSize is 20 and 2048 there, spec.training.seed is 4 and 0" in folder.refusal(resuming)

    def test_one_that_is_beyond_the_epochs_of_a_job_that_resumes(self) -> None:
        applied = tuple(EpochApplied(epoch=epoch, ranges=((0, 10),)) for epoch in range(3))
        folder = Folder(checkpoint(4, applied=applied))
        resuming = job(model=MODEL, data={"train": ["day"], "continuation": "Resume"})
        assert "00000004 is in epoch 3, and spec.training.epochs is 1: give 3 at least" in folder.refusal(resuming)
        assert folder.choose(job(model=MODEL)) == "00000004"

    def test_one_that_is_missing(self) -> None:
        told = Folder(checkpoint(3)).refusal(job("00000009", model=MODEL))
        assert "00000009 is missing, or was never completed; give spec.checkpoint.initialFrom.id: '00000003'" in told

    def test_an_empty_folder(self) -> None:
        told = Folder().refusal(job(model=MODEL))
        assert told == f"spec.checkpoint.initialFrom.uri: {PLACE} holds no complete checkpoint"

    def test_data_that_the_checkpoint_has_not_trained_yet(self) -> None:
        appending = job(model=MODEL, data={"train": ["day"], "continuation": "Append"})
        assert Folder(checkpoint(4), checkpoint(5)).choose(appending) == "00000005"
        told = Folder(checkpoint(4), checkpoint(5, batches=7)).refusal(appending)
        assert "has not trained all of its own files: 30 samples are left" in told
        assert told.endswith("give spec.checkpoint.initialFrom.id: '00000004' instead")
        assert "100 samples are left" in Folder(checkpoint(4, applied=())).refusal(appending)


class TestManifest:
    @pytest.mark.parametrize(
        ("sections", "complaint"),
        [
            ({"checkpoint": {"initialFrom": {"uri": PLACE, "id": 8}}}, "must be text in quotes"),
            ({"checkpoint": {"initialFrom": {"uri": PLACE, "id": "7"}}}, "spec.checkpoint.initialFrom.id"),
            ({"checkpoint": {"initialFrom": {"id": "00000007"}}}, "spec.checkpoint.initialFrom.uri"),
            ({"checkpoint": {"uri": "/a/", "initialFrom": {"uri": "/a"}}}, "initialFrom.uri must differ from uri"),
            ({"checkpoint": {}, "data": {"train": ["x"], "continuation": "Append"}}, "needs checkpoint.initialFrom"),
        ],
    )
    def test_mistakes_are_named(self, sections: dict[str, Mapping[str, object]], complaint: str) -> None:
        with pytest.raises(ManifestError, match=complaint):
            job(**sections)


class TestOrigin:
    def test_a_job_that_resumes_inherits_where_the_other_started(self) -> None:
        first = origin_of(checkpoint(3), f"{PLACE}/00000003", DataContinuation.APPEND)
        assert (first.samples, first.dense_steps, [one.uri for one in first.trained]) == (100, 1, ["/day_0"])
        second = checkpoint(4, origin=first, training_files=(DataFileIdentity(uri="/day_1", bytes=6),))
        resumed = origin_of(second, "/b/00000004", DataContinuation.RESUME)
        assert (resumed.dense_steps, [one.uri for one in resumed.trained]) == (1, ["/day_0"])
        appended = origin_of(second, "/b/00000004", DataContinuation.APPEND)
        assert (appended.dense_steps, [one.uri for one in appended.trained]) == (1, ["/day_0", "/day_1"])
        fresh = origin_of(second, "/b/00000004", DataContinuation.FRESH)
        assert (fresh.dense_steps, fresh.trained) == (1, ())

    def test_a_model_that_was_never_stepped_counts_no_step(self) -> None:
        untrained = checkpoint(1, applied=())
        assert origin_of(untrained, "/b/00000001", DataContinuation.FRESH).dense_steps == 0

    def test_it_survives_in_the_manifest_of_a_checkpoint(self) -> None:
        origin = origin_of(checkpoint(3), f"{PLACE}/00000003", DataContinuation.APPEND)
        text = checkpoint(4, origin=origin).to_json()
        assert CheckpointManifest.from_json(text, "m").origin == Origin.model_validate(origin.model_dump())
