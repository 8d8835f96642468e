"""`emberscale export`, on folders as a job leaves them."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from emberscale.cli import app
from emberscale.run_folder import open_run
from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest
from emberscale_api.job import parse_manifest, resolve_model
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, buckets_of, spread_evenly
from emberscale_trainer.checkpoint import Share, Work, WrittenFile, write_snapshot
from emberscale_trainer.models import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import DensePieces, TableStore

SERVERS = 2
KEYS = np.random.default_rng(0).integers(-(2**62), 2**62, 3000)
UNTRACEABLE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense, embeddings):
        total = sum(vectors.sum(dim=1) for vectors in embeddings.values())
        return total + self.bias if total.sum() > 0 else self.bias - total

def factory(features):
    return Model()
"""


class TrainedRun:
    """The folder of a run that has saved checkpoints of DCN-v2 over two columns."""

    def __init__(self, root: Path, **model: object) -> None:
        self.root = root
        data = root.with_name("train.parquet")
        data.touch()
        job = parse_manifest(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "trained"},
                "spec": {
                    "data": {
                        "format": "Parquet",
                        "train": [str(data)],
                        "columns": {"label": "y", "dense": ["a"], "categorical": ["user", "item/id"]},
                    },
                    "model": {"embeddings": {"dimension": 4}, **(model or {"architecture": "DCNv2"})},
                },
            }
        )
        with open_run(root, job, resume=False, overwrite=False) as held:
            held.save()
            self.uid, self.job = held.record.uid, held.job

    def checkpoint(self, cut: int) -> Path:
        """Saves rows of all keys for `user` and none for `item/id`, by two servers."""
        folder = self.root / "checkpoints" / f"{cut:08}"
        addresses = tuple(PsAddress(i, "i", "", "") for i in range(SERVERS))
        table = RoutingTable(1, 1, addresses, spread_evenly(BUCKETS, SERVERS), spread_evenly(DENSE_PIECES, SERVERS))
        files = []
        for index in range(SERVERS):
            files += [
                CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32)
                for file in self._write(folder, index, table, cut)
            ]
        manifest = CheckpointManifest(
            id=folder.name,
            number=cut,
            created=datetime.now(UTC),
            job_uid=self.uid,
            job=self.job,
            ps_count=SERVERS,
            generation=1,
            routing_version=1,
            epoch=0,
            batch_size=1,
            training_records=1,
            applied=(),
            evaluations=(),
            training_files=(),
            evaluation_files=(),
            training_seconds=1.0,
            files=tuple(files),
        )
        (folder / "manifest.json").write_text(manifest.to_json())
        return folder

    def _write(self, folder: Path, index: int, table: RoutingTable, gradient: float) -> list[WrittenFile]:
        spec = self.job.spec
        resolved = resolve_model(spec)
        dense = flat_copy(build_model(spec.model, resolved, seed=0)).numpy()
        store = TableStore(resolved.tables, DensePieces.of(dense, spec.optimizers.dense))
        share = Share(index, Ownership.of(table, index), AppliedBatches(), len(dense))
        mine = KEYS[share.owned.buckets[buckets_of(KEYS)]]
        store.push(np.array([len(mine), 0, 0], np.uint32), mine, np.full(4 * len(mine), gradient, np.float32))
        return write_snapshot(store.snapshot(), store.specs, share, str(folder), Work())


@pytest.fixture
def trained(tmp_path: Path) -> TrainedRun:
    return TrainedRun(tmp_path / "run")


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Result]:
    def invoke(run: object, *options: str) -> Result:
        return CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), *options])

    return invoke


Export = Callable[..., Result]


def test_rows_of_all_servers_are_there_in_the_order_of_their_keys(
    trained: TrainedRun, export: Export, tmp_path: Path
) -> None:
    trained.checkpoint(1)
    result = export(trained.root, "--output", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == len(KEYS)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert [(table["name"], table["rows"]) for table in about["tables"]] == [("user", len(KEYS)), ("item/id", 0)]
    table = load_file(tmp_path / "out" / about["tables"][0]["file"])
    assert np.array_equal(table["keys"], np.sort(KEYS))
    assert table["weights"].shape == (len(KEYS), 4)
    assert (tmp_path / "out" / "model.pt2").exists()


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_taken(
    trained: TrainedRun, export: Export
) -> None:
    trained.checkpoint(1)
    rows = trained.checkpoint(2) / "ps-1" / "table-0-0.rows"
    rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    result = export(trained.root, "--output", "json")
    assert json.loads(result.stdout)["checkpoint"] == "00000001"
    assert "ps-1/table-0-0.rows was altered" in result.stderr


def test_the_model_folder_does_when_the_checkpoints_are_gone(trained: TrainedRun, export: Export) -> None:
    trained.checkpoint(3).rename(trained.root / "model")
    assert json.loads(export(trained.root, "--output", "json").stdout)["checkpoint"] == "00000003"


def test_the_place_of_checkpoints_can_be_named_instead_of_a_run(trained: TrainedRun, export: Export) -> None:
    trained.checkpoint(1)
    checkpoints = shutil.move(trained.root / "checkpoints", trained.root.with_name("bucket"))
    result = export(f"file://{checkpoints}", "--output", "json")
    assert json.loads(result.stdout)["checkpoint"] == "00000001", result.stderr


def test_an_earlier_export_is_replaced_only_if_asked(trained: TrainedRun, export: Export) -> None:
    for cut, options, code in ((1, (), 0), (2, (), 2), (2, ("--overwrite",), 0)):
        trained.checkpoint(cut)
        result = export(trained.root, *options)
        assert result.exit_code == code, result.stderr
        assert ("--overwrite" in result.stderr) == (code == 2)


def test_a_model_that_branches_on_values_is_exported_without_a_program(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "branching.py").write_text(UNTRACEABLE)
    run = TrainedRun(tmp_path / "run", entrypoint="branching:factory")
    run.checkpoint(1)
    result = export(run.root)
    assert result.exit_code == 0
    assert "torch.export cannot trace the model" in result.stderr
    assert not (tmp_path / "out" / "model.pt2").exists()
    assert load_file(tmp_path / "out" / "dense.safetensors").keys() == {"bias"}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda run, out: None, "no complete checkpoint"),
        (lambda run, out: shutil.rmtree(run), "neither the folder of a run nor one of checkpoints"),
        (lambda run, out: out.write_text(""), "is not a folder"),
        (lambda run, out: (out.mkdir(), (out / "thesis.tex").touch()), "holds something that is no exported model"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    trained: TrainedRun, export: Export, tmp_path: Path, make: Callable[[Path, Path], None], complaint: str
) -> None:
    make(trained.root, tmp_path / "out")
    result = export(trained.root)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
