"""The folder of a run with checkpoints in it, made without training."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from emberscale._run.folder import open_run
from emberscale_api.job import parse_manifest, resolve_model
from emberscale_api.routing import buckets_of
from emberscale_trainer.checkpoint import Share, Work, WrittenFile, write_snapshot
from emberscale_trainer.models import build_model
from emberscale_trainer.models.architectures import flat_copy
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_manifest

SERVERS = 2
KEYS = np.random.default_rng(0).integers(-(2**62), 2**62, 3000)
TWO_COLUMNS: Mapping[str, object] = {
    "format": "Parquet",
    "train": ["train.parquet"],
    "columns": {"label": "y", "dense": ["a"], "categorical": ["user", "item/id"]},
}


class TrainedRun:
    """The folder of a run that has saved checkpoints: by default of DCN-v2 over two columns."""

    def __init__(self, root: Path, data: Mapping[str, object] = TWO_COLUMNS, **model: object) -> None:
        self.root = root
        job = parse_manifest(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "trained"},
                "spec": {
                    "data": dict(data),
                    "model": {"embeddings": {"dimension": 4}, **(model or {"architecture": "DCNv2"})},
                },
            }
        )
        with open_run(root, job, resume=False, overwrite=False) as held:
            held.save()
            self.uid, self.job = held.record.uid, held.job

    def checkpoint(self, cut: int) -> Path:
        """Saves rows of all keys for the first table and none for the others, by two servers."""
        folder = self.root / "checkpoints" / f"{cut:08}"
        files = [file for index in range(SERVERS) for file in self._write(folder, index, cut)]
        write_manifest(folder, files, id=folder.name, number=cut, job_uid=self.uid, job=self.job, ps_count=SERVERS)
        return folder

    def _write(self, folder: Path, index: int, gradient: float) -> list[WrittenFile]:
        spec = self.job.spec
        resolved = resolve_model(spec)
        dense = flat_copy(build_model(spec.model, resolved, seed=0)).numpy()
        store = TableStore(resolved.tables, DensePieces.of(dense, spec.optimizers.dense))
        share = Share(index, owned(SERVERS, index), AppliedBatches(), len(dense))
        mine = KEYS[share.owned.buckets[buckets_of(KEYS)]]
        store.push(
            np.array([len(mine), *[0] * len(resolved.tables)], np.uint32),
            mine,
            np.full(4 * len(mine), gradient, np.float32),
        )
        snapshot = store.snapshot(Reader.CHECKPOINT, nullcontext())
        return write_snapshot(snapshot, store.specs, share, str(folder), Work())
