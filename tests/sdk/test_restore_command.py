"""`emberscale checkpoints restore`: from which checkpoint it starts, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from tests.sdk.test_checkpoints_command import checkpoints, flip_a_bit

from emberscale._run.audit import ServerRecord, contradictions_of
from emberscale._run.checkpoints import SavedCheckpoints, check_initial
from emberscale_api.checkpoint import DataFileIdentity
from emberscale_api.errors import InvalidError
from emberscale_api.job import DataContinuation, load_manifest
from emberscale_api.origin import origin_of
from master_stand_in import write_manifest
from trained_run import TrainedRun


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    run = TrainedRun(tmp_path / "run")
    run.chain(3)
    return run


def manifest(run: TrainedRun, **spec: object) -> Path:
    file = run.root.parent / "job.yaml"
    document = {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "next"},
        "spec": {
            "data": {
                "format": "Parquet",
                "train": ["train.parquet"],
                "columns": {"label": "y", "dense": ["a"], "categorical": ["user", "item/id"]},
            },
            "model": {"architecture": "DCNv2", "embeddings": {"dimension": 4}},
            **spec,
        },
    }
    file.write_text(yaml.safe_dump(document))
    return file


def test_the_printed_manifest_starts_from_the_checkpoint(run: TrainedRun) -> None:
    code, printed, told = checkpoints("restore", run.root, manifest(run), "--print", "--set", "spec.ps.replicas=3")
    assert code == 0, told
    spec = yaml.safe_load(printed)["spec"]
    assert spec["checkpoint"] == {"initialFrom": {"uri": str(run.root.resolve() / "checkpoints")}}
    assert spec["ps"] == {"replicas": 3}
    assert "continuation" not in spec["data"]


def test_one_checkpoint_is_named_by_its_folder_or_by_its_id(run: TrainedRun) -> None:
    place = run.root.resolve() / "checkpoints"
    for arguments in ((place / "00000002",), (place, "--id", "00000002")):
        code, printed, told = checkpoints(
            "restore", arguments[0], manifest(run), *arguments[1:], "--print", "--continuation", "Resume"
        )
        assert code == 0, told
        spec = yaml.safe_load(printed)["spec"]
        assert spec["checkpoint"]["initialFrom"] == {"uri": str(place), "id": "00000002"}
        assert spec["data"]["continuation"] == "Resume"
    assert (
        "PLACE is checkpoint 00000002"
        in checkpoints("restore", place / "00000002", manifest(run), "--id", "00000001", "--print")[2]
    )


def test_a_chain_whose_base_is_gone_is_refused_before_anything_starts(run: TrainedRun) -> None:
    lost = next((run.root / "checkpoints" / "00000002").rglob("*.rows"))
    lost.unlink()
    code, _, told = checkpoints("restore", run.root, manifest(run), "--id", "00000003", "--print")
    assert code == 2
    (line,) = told.splitlines()
    assert line.startswith("error: spec.checkpoint.initialFrom: ")
    assert f"{lost.resolve()}: is missing; give spec.checkpoint.initialFrom.id: '00000001' instead" in line


def test_another_model_is_refused(run: TrainedRun) -> None:
    code, _, told = checkpoints(
        "restore", run.root, manifest(run), "--print", "--set", "spec.model.embeddings.dimension=8"
    )
    assert code == 2
    assert "spec.model.embeddings.dimension is 8 and 4 there" in told


def test_a_damaged_newest_checkpoint_is_skipped_and_named(run: TrainedRun) -> None:
    flip_a_bit(run.root / "checkpoints" / "00000003" / "manifest.json")
    initial = SavedCheckpoints(str(run.root / "checkpoints")).initial()
    place = {"uri": str(run.root / "checkpoints")}
    job = load_manifest(manifest(run), [f"spec.checkpoint.initialFrom={json.dumps(place)}"])
    chosen, damaged = initial.choose(job)
    assert chosen.id == "00000002"
    assert list(damaged) == ["00000003"]
    (skipped,) = check_initial(job)
    assert "00000003" in skipped


def test_a_job_without_new_files_is_refused_before_anything_starts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.root.parent)
    Path("train.parquet").touch()
    spec = ["spec.checkpoint.initialFrom={uri: earlier}", "spec.data.continuation=Append"]
    job = load_manifest(manifest(run), spec)
    Path("earlier/00000001").mkdir(parents=True)
    file = DataFileIdentity(uri=str(Path("train.parquet").resolve()), bytes=0)
    write_manifest(Path("earlier/00000001"), [], id="00000001", job=job, training_files=(file,), training_records=0)
    with pytest.raises(InvalidError, match=r"spec\.data\.train: the checkpoint has trained all files; add new ones"):
        check_initial(job)
    Path("february.parquet").touch()
    assert check_initial(load_manifest(manifest(run), [*spec, "spec.data.train=['*.parquet']"])) == ()
    assert check_initial(load_manifest(manifest(run), [*spec, "spec.data.train=[elsewhere.parquet]"])) == ()
    assert check_initial(load_manifest(manifest(run), [*spec, "spec.data.train=['memory://more.parquet']"])) == ()
    Path("train.parquet").write_bytes(b"more")
    for train in ("['*.parquet']", "[train.parquet, 'memory://more.parquet']"):
        with pytest.raises(
            InvalidError, match=rf"spec\.data\.train: {file.uri} has 4 bytes, and had 0 when earlier/00"
        ):
            check_initial(load_manifest(manifest(run), [*spec, f"spec.data.train={train}"]))


def test_the_audit_counts_the_steps_of_this_job_alone(run: TrainedRun) -> None:
    server = ServerRecord({0: [(0, 4, 1)]}, {0: 5, 1: 5})
    assert contradictions_of([server], steps_before=1) == ()
    (line,) = contradictions_of([server])
    assert "recorded 4 pushes, but dense piece 0 took 5 steps" in line


def test_show_says_where_a_job_started(run: TrainedRun) -> None:
    saved = SavedCheckpoints(str(run.root / "checkpoints"))
    manifest = next(entry.manifest for entry in saved.entries())
    assert manifest is not None
    origin = origin_of(manifest, "s3://january/00000009", DataContinuation.FRESH)
    sealed = manifest.model_copy(update={"origin": origin}).to_json()
    (run.root / "checkpoints" / manifest.id / "manifest.json").write_text(sealed)
    assert "s3://january/00000009" in checkpoints("show", run.root)[1]
