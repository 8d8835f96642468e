"""Whose folder it is, and when it may be replaced."""

from pathlib import Path

import pytest

from emberscale.errors import BadInputError
from emberscale.run_folder import CompleteAlreadyError, Run, RunStatus, open_run
from emberscale_api.job import TrainingJob, load_manifest


@pytest.fixture
def job(manifest: Path) -> TrainingJob:
    return load_manifest(manifest)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "toy"


def leave(root: Path, job: TrainingJob, status: RunStatus) -> str:
    """A run that got as far as `status`, with a file in each of its places."""
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


@pytest.mark.parametrize("status", [RunStatus.COMPLETE, RunStatus.FAILED])
def test_a_run_that_ended_is_replaced(root: Path, job: TrainingJob, status: RunStatus) -> None:
    before = leave(root, job, status)
    held = begin(root, job)
    assert held.record.uid != before
    assert [path.name for path in root.iterdir()] == ["run.json"]


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.SUSPENDED, RunStatus.INTERRUPTED])
def test_a_run_that_can_be_resumed_is_not_replaced_by_accident(root: Path, job: TrainingJob, status: RunStatus) -> None:
    before = leave(root, job, status)
    with pytest.raises(BadInputError, match=r"--resume.*--overwrite"):
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


def test_a_resumed_run_may_have_other_processes(root: Path, job: TrainingJob, manifest: Path) -> None:
    leave(root, job, RunStatus.SUSPENDED)
    wider = load_manifest(manifest, ["spec.ps.replicas=5"])
    assert begin(root, wider, resume=True).job.spec.ps.replicas == 5


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
    field = override.partition("=")[0].replace(".topMlp", "")
    with pytest.raises(BadInputError, match=f"--resume: {field} differs"):
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


def test_a_complete_run_has_nothing_to_resume(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    with pytest.raises(CompleteAlreadyError):
        begin(root, job, resume=True)


def test_there_must_be_a_run_to_resume(root: Path, job: TrainingJob) -> None:
    with pytest.raises(BadInputError, match="holds no run"):
        begin(root, job, resume=True)
    assert not root.exists()


def test_a_folder_with_anything_else_in_it_is_never_touched(root: Path, job: TrainingJob) -> None:
    root.mkdir(parents=True)
    (root / "thesis.tex").touch()
    with pytest.raises(BadInputError, match=r"not empty and holds no run\.json"):
        begin(root, job, overwrite=True)
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]


def test_files_that_are_not_the_runs_outlive_it(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    (root / "notes.md").touch()
    begin(root, job)
    assert sorted(path.name for path in root.iterdir()) == ["notes.md", "run.json"]


def test_two_runs_never_share_a_folder(root: Path, job: TrainingJob) -> None:
    with open_run(root, job, resume=False, overwrite=False), pytest.raises(BadInputError, match="in use by another"):
        begin(root, job, overwrite=True)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path, job: TrainingJob) -> None:
    with pytest.raises(BadInputError, match="is not a folder"):
        begin(tmp_path / "train.tsv", job)


def test_a_record_that_is_none_is_refused(root: Path, job: TrainingJob) -> None:
    leave(root, job, RunStatus.COMPLETE)
    (root / "run.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"run\.json: is not the record of a run"):
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
