"""Which run owns a folder, and when another may replace it."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from emberscale._run.folder import CompleteAlreadyError, Run, open_run
from emberscale._run.record import RunPaths, RunStatus, read_record
from emberscale_api.checkpoint import DataFileIdentity, EpochApplied, Origin
from emberscale_api.errors import InvalidError
from emberscale_api.job import DataContinuation, TrainingJob, load_manifest
from master_stand_in import write_manifest


@pytest.fixture
def job(manifest: Path) -> TrainingJob:
    return load_manifest(manifest)


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "toy"


def leave(root: Path, job: TrainingJob, status: RunStatus) -> str:
    """Leaves a run with this status, and a file in each of its folders."""
    with open_run(root, job, resume=False, overwrite=False) as held:
        held.begin()
        for path in (held.paths.state, held.paths.checkpoints, held.paths.model, held.paths.logs):
            path.mkdir()
            (path / "file").touch()
        held.save(status=status, seconds=7.0)
        return held.record.uid


def begin(root: Path, job: TrainingJob, resume: bool = False, overwrite: bool = False) -> Run:
    with open_run(root, job, resume, overwrite) as held:
        held.begin()
        return held


def test_a_new_run_has_its_checkpoints_in_its_folder(root: Path, job: TrainingJob) -> None:
    held = begin(root, job)
    assert held.job.spec.checkpoint.uri == str(root.resolve() / "checkpoints")


def test_a_uri_in_the_manifest_stands(root: Path, manifest: Path) -> None:
    held = begin(root, load_manifest(manifest, ["spec.checkpoint.uri=s3://bucket/x"]))
    assert held.job.spec.checkpoint.uri == "s3://bucket/x"


def test_a_run_that_failed_is_replaced_at_once(root: Path, job: TrainingJob) -> None:
    before = leave(root, job, RunStatus.FAILED)
    held = begin(root, job)
    assert held.record.uid != before
    assert [path.name for path in root.iterdir()] == ["run.json"]


def run_again(root: Path, job: TrainingJob, status: RunStatus, resume: bool = False) -> str:
    """Makes a run with this status in a folder that may hold another."""
    with open_run(root, job, resume, overwrite=False) as held:
        held.begin()
        held.paths.model.mkdir(exist_ok=True)
        (held.paths.model / "new").touch()
        held.save(status=status)
        held.take_place()
        return held.record.uid


def test_a_complete_run_stays_until_another_is_complete(root: Path, job: TrainingJob) -> None:
    before = leave(root, job, RunStatus.COMPLETE)
    with open_run(root, job, resume=False, overwrite=False) as held:
        held.begin()
        assert held.job.spec.checkpoint.uri == str(root.resolve() / "next" / "checkpoints")
        held.cancel()
    assert (root / "model" / "file").exists()
    for status in (RunStatus.FAILED, RunStatus.FAILED):
        run_again(root, job, status)
        assert read_record(RunPaths(root)).uid == before
        assert (root / "model" / "file").exists()
    after = run_again(root, job, RunStatus.COMPLETE)
    assert read_record(RunPaths(root)).uid == after
    assert sorted(path.name for path in root.iterdir()) == ["model", "run.json"]
    assert [path.name for path in (root / "model").iterdir()] == ["new"]


def test_the_run_beside_a_complete_one_can_be_resumed_and_is_not_replaced_by_accident(
    root: Path, job: TrainingJob
) -> None:
    leave(root, job, RunStatus.COMPLETE)
    begun = run_again(root, job, RunStatus.SUSPENDED)
    with pytest.raises(InvalidError, match=r"next holds a run that was interrupted.*--resume.*--overwrite"):
        begin(root, job)
    assert run_again(root, job, RunStatus.COMPLETE, resume=True) == begun
    assert read_record(RunPaths(root)).uid == begun
    assert begin(root, job).job.spec.checkpoint.uri == str(root.resolve() / "next" / "checkpoints")


@pytest.mark.parametrize("steps", range(6))
def test_taking_the_place_goes_on_where_it_was_cut_short(
    root: Path, job: TrainingJob, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(root, job, RunStatus.COMPLETE)
    left = iter(range(steps))
    remove, rename = shutil.rmtree, Path.rename

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def one_step(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return act(*arguments, **options)

        return one_step

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dying(remove))
        patch.setattr(Path, "rename", dying(rename))
        with pytest.raises(KeyboardInterrupt):
            run_again(root, job, RunStatus.COMPLETE)
    with pytest.raises(CompleteAlreadyError), open_run(root, job, resume=True, overwrite=False):
        pass
    assert sorted(path.name for path in root.iterdir()) == ["model", "run.json"]
    assert [path.name for path in (root / "model").iterdir()] == ["new"]


def test_a_folder_can_be_moved(root: Path, job: TrainingJob, tmp_path: Path) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    moved = root.rename(tmp_path / "elsewhere")
    assert begin(moved, job, resume=True).job.spec.checkpoint.uri == str(moved.resolve() / "checkpoints")


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.SUSPENDED, RunStatus.INTERRUPTED])
def test_a_run_that_can_be_resumed_is_not_replaced_by_accident(root: Path, job: TrainingJob, status: RunStatus) -> None:
    before = leave(root, job, status)
    with pytest.raises(InvalidError, match=r"--resume.*--overwrite"):
        begin(root, job)
    assert (root / "checkpoints" / "file").exists()
    assert begin(root, job, resume=True).record.uid == before
    assert begin(root, job, overwrite=True).record.uid != before
    assert not (root / "checkpoints").exists()


def test_resuming_keeps_the_files_and_counts_the_launches(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    held = begin(root, job, resume=True)
    assert (held.record.launches, held.record.seconds, held.record.status) == (2, 7.0, RunStatus.RUNNING)
    assert (root / "state" / "file").exists()


def test_a_resumed_run_has_no_picture_of_an_earlier_launch(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    (root / "metrics.png").touch()
    begin(root, job, resume=True)
    assert not (root / "metrics.png").exists()


def test_a_resumed_run_may_have_other_processes(root: Path, job: TrainingJob, manifest: Path) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    wider = load_manifest(manifest, ["spec.ps.replicas=5"])
    assert begin(root, wider, resume=True).job.spec.ps.replicas == 5


def test_a_resumed_run_is_refused_what_contradicts_the_number_that_it_was_scaled_to(
    root: Path, job: TrainingJob, manifest: Path
) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    coded = load_manifest(manifest, ["spec.faultTolerance.strategy=ErasureCoding", "spec.ps.replicas=3"])
    with open_run(root, coded, resume=True, overwrite=False) as held:
        held.scaled = {"ps": 1}
        with pytest.raises(InvalidError, match=r"^ps=1: faultTolerance\.parity \(1\) needs at least 2"):
            _ = held.job


@pytest.mark.parametrize(
    "override",
    [
        "spec.training.batchSize=7",
        "spec.training.seed=7",
        "spec.model.topMlp=[7]",
        "spec.data.train=[other.tsv]",
        "spec.optimizers.dense.type=SGD",
        "spec.checkpoint.uri=s3://elsewhere",
    ],
)
def test_a_resumed_run_trains_the_same_model_on_the_same_data(
    root: Path, job: TrainingJob, manifest: Path, override: str
) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    field, _, value = override.partition("=")
    value = json.dumps(yaml.safe_load(value))
    with pytest.raises(InvalidError, match=re.escape(f"--resume: {field} is {value} and was ")):
        begin(root, load_manifest(manifest, [override]), resume=True)


def test_what_let_a_run_fail_may_be_changed_to_resume_it(root: Path, job: TrainingJob, manifest: Path) -> None:
    before = leave(root, job, RunStatus.FAILED)
    changed = load_manifest(
        manifest, ["spec.data.maxBadRecords=9", "spec.optimizers.dense.learningRate=0.001", "spec.training.epochs=3"]
    )
    held = begin(root, changed, resume=True)
    assert held.record.uid != before
    assert held.record.earlier_uids == [before]
    assert (root / "checkpoints" / "file").exists()


def test_a_resumed_run_trains_no_fewer_epochs_than_it_has_begun(root: Path, manifest: Path) -> None:
    uid = leave(root, load_manifest(manifest, ["spec.training.epochs=9"]), RunStatus.SUSPENDED)
    saved = root / "checkpoints" / "00000001"
    saved.mkdir()
    applied = tuple(EpochApplied(epoch=epoch, ranges=((0, 1),)) for epoch in range(3))
    write_manifest(saved, [], id=saved.name, job_uid=uid, applied=applied)
    with pytest.raises(InvalidError, match=r"epochs is 2, and checkpoint 00000001 is in epoch 3: give 3 at least"):
        begin(root, load_manifest(manifest, ["spec.training.epochs=2"]), resume=True)
    assert begin(root, load_manifest(manifest, ["spec.training.epochs=3"]), resume=True).record.uid == uid


def test_a_complete_run_has_nothing_to_resume(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    with pytest.raises(CompleteAlreadyError):
        begin(root, job, resume=True)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("spec.training.epochs=2", "spec.training.epochs is 2 and was 1"),
        ("spec.data.train=[other.tsv]", 'spec.data.train is ["other.tsv"] and was ["train.tsv"]'),
        ("spec.worker.replicas=3", "spec.worker.replicas is 3 and was 2"),
        ("spec.checkpoint.uri=elsewhere", 'spec.checkpoint.uri is "elsewhere" and was not given'),
    ],
)
def test_a_complete_run_does_not_go_on_as_another(
    root: Path, job: TrainingJob, manifest: Path, override: str, told: str
) -> None:
    leave(root, job, RunStatus.COMPLETE)
    with pytest.raises(InvalidError, match=re.escape(told)) as refused:
        begin(root, load_manifest(manifest, [override]), resume=True)
    assert "is Complete and cannot continue" in str(refused.value)


def test_a_complete_run_does_not_go_on_with_data_that_grew(root: Path, job: TrainingJob, tmp_path: Path) -> None:
    data = tmp_path / "train.tsv"
    leave(root, job, RunStatus.COMPLETE)
    read = DataFileIdentity(uri=str(data), bytes=data.stat().st_size)
    write_manifest(root / "model", job=job, training_files=(read,))
    with pytest.raises(CompleteAlreadyError):
        begin(root, job, resume=True)
    data.write_text(data.read_text() * 2)
    with pytest.raises(InvalidError, match=r"spec\.data\.train: .*train\.tsv has 4 bytes and has 2 bytes in the run"):
        begin(root, job, resume=True)


def test_files_that_another_job_had_trained_are_no_change(root: Path, job: TrainingJob, tmp_path: Path) -> None:
    data = tmp_path / "train.tsv"
    leave(root, job, RunStatus.COMPLETE)
    files = [
        DataFileIdentity(uri=str(tmp_path / name), bytes=data.stat().st_size) for name in ("train.tsv", "gone.tsv")
    ]
    origin = Origin(
        checkpoint="s3://january/00000007",
        job="january",
        job_uid="j",
        samples=1,
        continuation=DataContinuation.APPEND,
        trained=tuple(files),
    )
    write_manifest(root / "model", job=job, training_files=(), origin=origin)
    with pytest.raises(CompleteAlreadyError):
        begin(root, job, resume=True)


@pytest.mark.parametrize("status", [RunStatus.COMPLETE, RunStatus.FAILED, RunStatus.SUSPENDED])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_never_replaces_the_checkpoints_from_which_it_starts(
    root: Path, job: TrainingJob, manifest: Path, status: RunStatus, scheme: str
) -> None:
    leave(root, job, status)
    place = {"uri": f"{scheme}{root / 'checkpoints'}"}
    starts = load_manifest(manifest, [f"spec.checkpoint.initialFrom={json.dumps(place)}"])
    with pytest.raises(InvalidError, match=r"holds the checkpoints of spec\.checkpoint\.initialFrom"):
        begin(root, starts, overwrite=True)
    assert (root / "checkpoints" / "file").exists()
    assert begin(root.with_name("another"), starts).job.spec.checkpoint.initial_from is not None


def test_there_must_be_a_run_to_resume(root: Path, job: TrainingJob) -> None:
    with pytest.raises(InvalidError, match="holds no run"):
        begin(root, job, resume=True)
    assert not root.exists()


def test_a_folder_with_anything_else_in_it_is_never_touched(root: Path, job: TrainingJob) -> None:
    root.mkdir(parents=True)
    (root / "thesis.tex").touch()
    with pytest.raises(InvalidError, match=r"not empty and holds no run\.json"):
        begin(root, job, overwrite=True)
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]


def test_a_run_whose_first_record_could_not_be_written_leaves_nothing(
    root: Path, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_part(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:5].encode(encoding))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_part)
    with pytest.raises(OSError, match="No space left"):
        begin(root, job)
    assert list(root.iterdir()) == []


def test_a_run_that_was_killed_as_it_wrote_its_first_record_does_not_stand_in_the_way(
    root: Path, job: TrainingJob
) -> None:
    begin(root, job)
    (root / "run.json").rename(root / ".run.json.new")
    begin(root, job)
    assert [path.name for path in root.iterdir()] == ["run.json"]


def test_files_that_are_not_the_runs_outlive_it(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    (root / "notes.md").touch()
    run_again(root, job, RunStatus.COMPLETE)
    assert sorted(path.name for path in root.iterdir()) == ["model", "notes.md", "run.json"]


def test_two_runs_never_share_a_folder(root: Path, job: TrainingJob) -> None:
    with (
        open_run(root, job, resume=False, overwrite=False),
        pytest.raises(InvalidError, match=r"in use by another .*choose another folder with --workdir"),
    ):
        begin(root, job, overwrite=True)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path, job: TrainingJob) -> None:
    with pytest.raises(InvalidError, match="is not a folder"):
        begin(tmp_path / "train.tsv", job)


def test_a_record_that_is_none_is_refused(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    (root / "run.json").write_text("{}")
    with pytest.raises(InvalidError, match=r"run\.json: is not the record of a run"):
        begin(root, job)


def test_nothing_is_replaced_before_the_run_begins(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    with open_run(root, job, resume=False, overwrite=False):
        pass
    assert (root / "model" / "file").exists()


def test_a_launch_that_came_to_nothing_does_not_stand_in_the_way(root: Path, job: TrainingJob) -> None:
    with open_run(root, job, resume=False, overwrite=False) as held:
        held.begin()
        held.cancel()
    assert begin(root, job).record.launches == 1


def test_a_resumed_launch_that_came_to_nothing_can_be_resumed(root: Path, job: TrainingJob) -> None:
    before = leave(root, job, RunStatus.SUSPENDED)
    with open_run(root, job, resume=True, overwrite=False) as held:
        held.begin()
        held.cancel()
    assert begin(root, job, resume=True).record.uid == before
