"""`emberscale audit`, on folders that a job left."""

import json
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._run.audit import Runs
from emberscale._run.folder import open_run
from emberscale._run.record import RunStatus
from emberscale_api.checkpoint import CheckpointFile, EpochApplied, ForgottenShare
from emberscale_api.job import OptimizerType, TrainingJob, load_manifest
from emberscale_trainer.checkpoint.files import PartitionFile, TablePart
from master_stand_in import write_manifest

RECORDS, BATCH = 1000, 64
EXACT: Runs = [(0, 16, 1)]


class Run:
    """The folder of a run, with checkpoints."""

    def __init__(self, root: Path, job: TrainingJob, status: RunStatus = RunStatus.COMPLETE) -> None:
        self.root = root
        with open_run(root, job, resume=False, overwrite=False) as held:
            held.save(status=status)
            self.uid, self.job = held.record.uid, held.job

    def checkpoint(
        self,
        cut: int,
        servers: list[Runs],
        uid: str | None = None,
        steps: int | None = None,
        forgotten: tuple[ForgottenShare, ...] = (),
    ) -> Path:
        """Writes a checkpoint; each server's dense piece is stepped once per recorded push, or `steps` times."""
        folder = self.root / "checkpoints" / f"{cut:08}"
        files = []
        for index, runs in enumerate(servers):
            pushes = sum(times * (stop - first) for first, stop, times in runs)
            written = {
                "applied.json": json.dumps({"epochs": [{"epoch": 0, "runs": runs}]}).encode(),
                "partition.json": _partition(index, len(servers)),
                "dense-0.rows": _dense_row(index, pushes if steps is None else steps),
            }
            (folder / f"ps-{index}").mkdir(parents=True)
            for name, content in written.items():
                (folder / f"ps-{index}" / name).write_bytes(content)
                files.append(CheckpointFile(path=f"ps-{index}/{name}", bytes=len(content), crc32=zlib.crc32(content)))
        write_manifest(
            folder,
            files,
            id=folder.name,
            number=cut,
            job_uid=uid or self.uid,
            job=self.job,
            ps_count=len(servers),
            batch_size=BATCH,
            training_records=RECORDS,
            forgotten=forgotten,
        )
        return folder


_DENSE = TablePart(name="(dense)", files=["dense-0.rows"], rows=1, dimension=1, optimizer=OptimizerType.SGD, stride=16)


def _partition(index: int, servers: int) -> bytes:
    """Returns the partition of server `index`, which owns dense piece `index`."""
    part = PartitionFile(index=index, buckets=[], pieces=[(index, index + 1)], tables=[], dense=_DENSE, parameters=1024)
    return part.model_dump_json().encode()


def _dense_row(piece: int, steps: int) -> bytes:
    records = _DENSE.layout.empty(1)
    row = _DENSE.layout.fields(records)
    row["key"], row["pushes"] = piece, steps
    return records.tobytes()


@pytest.fixture
def run(manifest: Path, tmp_path: Path) -> Run:
    overrides = [f"spec.training.batchSize={BATCH}"]
    return Run(tmp_path / "run", load_manifest(manifest, overrides))


def audit(run: Run, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["audit", str(run.root), *options])
    return result.exit_code, result.stdout, result.stderr


def test_an_exact_run_passes(run: Run) -> None:
    run.checkpoint(1, [EXACT, EXACT])
    code, printed, _ = audit(run, "--output", "json")
    assert code == 0
    report = json.loads(printed)
    assert (report["missing"], report["once"], report["repeated"]) == (0, RECORDS, 0)
    assert (report["checkpoint"], report["ps_count"]) == ("00000001", 2)


@pytest.mark.parametrize("runs", [[(0, 15, 1)], [(0, 15, 1), (15, 16, 2)]])
def test_a_missing_or_repeated_sample_fails_the_audit(run: Run, runs: Runs) -> None:
    run.checkpoint(1, [EXACT, runs])
    code, printed, _ = audit(run)
    assert code == 1
    assert "not exactly once" in printed


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([(0, 8, 1)], "unfinished: 512 of 1,000 samples are applied, each exactly once; --resume trains the rest"),
        ([(0, 8, 2)], "not exactly once: 488 missing, 512 repeated"),
        (EXACT, "every sample exactly once"),
    ],
)
def test_an_unfinished_run_is_called_so_unless_something_is_repeated(
    manifest: Path, tmp_path: Path, runs: Runs, verdict: str
) -> None:
    job = load_manifest(manifest, [f"spec.training.batchSize={BATCH}"])
    run = Run(tmp_path / "run", job, RunStatus.SUSPENDED)
    run.checkpoint(1, [runs])
    _, printed, _ = audit(run)
    assert verdict in " ".join(printed.split())


def test_rows_that_changed_more_often_than_their_server_recorded_fail_the_audit(run: Run) -> None:
    """The record of applied batches cannot show a repetition that it failed to prevent; the steps can."""
    run.checkpoint(1, [EXACT, EXACT], steps=32)
    code, printed, _ = audit(run, "--output", "json")
    assert code == 1
    assert json.loads(printed)["contradictions"] == [
        f"ps-{index} recorded 16 pushes, but dense piece {index} took 32 steps" for index in (0, 1)
    ]
    assert "not exactly once: ps-0 recorded 16 pushes" in " ".join(audit(run)[1].split())


def test_the_newest_complete_checkpoint_counts(run: Run) -> None:
    run.checkpoint(9, [[(0, 3, 1)]])
    run.checkpoint(10, [EXACT])
    (run.checkpoint(11, [[(0, 1, 5)]]) / "manifest.json").unlink()
    assert json.loads(audit(run, "--output", "json")[1])["checkpoint"] == "00000010"


def test_another_jobs_checkpoint_does_not_count(run: Run) -> None:
    run.checkpoint(1, [EXACT])
    run.checkpoint(2, [[(0, 1, 5)]], uid="another")
    assert json.loads(audit(run, "--output", "json")[1])["checkpoint"] == "00000001"


def test_an_altered_record_is_refused_by_name_and_the_checkpoint_before_is_used(run: Run) -> None:
    run.checkpoint(1, [EXACT])
    altered = run.checkpoint(2, [EXACT]) / "ps-0" / "applied.json"
    altered.write_text(altered.read_text().replace("16", "15"))
    code, printed, errors = audit(run, "--output", "json")
    assert code == 0
    assert json.loads(printed)["checkpoint"] == "00000001"
    assert str(altered) in errors


def test_an_altered_manifest_is_refused_by_name(run: Run) -> None:
    manifest = run.checkpoint(1, [EXACT]) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"number": 1', '"number": 3'))
    code, _, errors = audit(run)
    assert code == 2
    assert str(manifest) in errors
    assert "no complete checkpoint" in errors


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert result.exit_code == 2
    assert "run.json is missing" in result.stderr


def test_epochs_that_are_alike_are_one_row(manifest: Path, tmp_path: Path) -> None:
    job = load_manifest(manifest, ["spec.training.epochs=150"])
    run = Run(tmp_path / "run", job, RunStatus.SUSPENDED)
    run.checkpoint(1, [EXACT])
    shown = CliRunner().invoke(app, ["audit", str(run.root)]).stdout
    assert "2 to 150, each" in shown
    assert len(shown.splitlines()) < 15


def forgotten_by_ps_1(checkpoint: str) -> ForgottenShare:
    """Four batches that half of the rows have forgotten."""
    return ForgottenShare(
        servers=(1,),
        checkpoint=checkpoint,
        epochs=(EpochApplied(epoch=0, ranges=((4, 8),)),),
        samples=4 * BATCH,
        buckets=((512, 1024),),
        pieces=((0, 2),),
        pls=0.128,
    )


def test_what_a_partial_recovery_forgot_is_named_and_told_apart_from_what_is_lost(run: Run) -> None:
    run.checkpoint(9, [EXACT, EXACT], steps=12, forgotten=(forgotten_by_ps_1("00000004"),))
    code, printed, _ = audit(run)
    said = " ".join(printed.split())
    assert code == 0
    assert "forgotten on 50.00% of the rows, those of ps-1" in said
    assert "256 samples, batches 4 to 7 of epoch 1" in said
    assert "every sample applied once, and 256 of them forgotten on some rows: portion of lost samples 0.1280" in said
    report = json.loads(audit(run, "--output", "json")[1])
    assert (report["once"], report["forgotten"], report["pls"]) == (RECORDS, 256, 0.128)

    run.checkpoint(10, [EXACT, EXACT], steps=12)
    assert audit(run)[0] == 1, "steps are missing that nothing forgot"


def test_what_a_rebuilt_server_lacks_is_named(run: Run) -> None:
    run.checkpoint(9, [EXACT, EXACT], steps=12, forgotten=(forgotten_by_ps_1(""),))
    code, printed, _ = audit(run)
    said = " ".join(printed.split())
    assert code == 0
    assert "those of ps-1 when it was lost and was rebuilt from parity that lagged: 256 samples" in said
