"""The folder of a run with checkpoints, made without training."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberscale._run.folder import open_run
from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import parse_manifest, resolve_model
from emberscale_trainer.checkpoint import ChainWriter, Share, Work, owned_rows
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_manifest, write_snapshot

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

    def checkpoint(self, cut: int, weight_bits: int = 0) -> Path:
        """Saves rows of all keys for the first table and none for the others, from two servers."""
        folder = self._folder(cut)
        files = [file for index in range(SERVERS) for file in self._write(folder, index, cut, weight_bits)]
        return self._complete(cut, files)

    def chain(self, cuts: int, changed: int = 100, *, one_shot: bool = False) -> list[Path]:
        """Saves all rows, and then increments of `changed` keys, a tenth of them retired.

        Each increment builds on the previous checkpoint, or with `one_shot` on the first.
        """
        servers = [self._server(index, 1.0) for index in range(SERVERS)]
        writers = [ChainWriter() for _ in servers]
        since, folders = "", []
        for cut in range(1, cuts + 1):
            files = []
            for (store, share), writer in zip(servers, writers, strict=True):
                if cut > 1:
                    mine = KEYS[:changed][share.owned.buckets[buckets_of(KEYS[:changed])]]
                    self._push(store, mine, 1.0)
                    store.retire(0, mine[: len(mine) // 10])
                draft = writer.begin(store, nullcontext(), share.owned, tracked=True, since=since)
                part = replace(share, rows=owned_rows(store, share.owned))
                files += writer.write(draft, store.specs, part, str(self._folder(cut)), Work())
            folders.append(self._complete(cut, files))
            since = folders[0 if one_shot else -1].name
        return folders

    def _folder(self, cut: int) -> Path:
        return self.root / "checkpoints" / f"{cut:08}"

    def _complete(self, cut: int, files: list[CheckpointFile]) -> Path:
        folder = self._folder(cut)
        write_manifest(folder, files, id=folder.name, number=cut, job_uid=self.uid, job=self.job, ps_count=SERVERS)
        return folder

    def _write(self, folder: Path, index: int, gradient: float, weight_bits: int) -> list[CheckpointFile]:
        store, share = self._server(index, gradient)
        snapshot = store.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        return write_snapshot(snapshot, store.specs, share, str(folder), Work(), weight_bits)

    def _server(self, index: int, gradient: float) -> tuple[TableStore, Share]:
        spec = self.job.spec
        resolved = resolve_model(spec)
        dense = flat_copy(build_model(spec.model, resolved, seed=0)).numpy()
        store = TableStore(resolved.tables, DensePieces.of(dense, spec.optimizers.dense))
        share = Share(index, owned(SERVERS, index), AppliedBatches(), len(dense))
        self._push(store, KEYS[share.owned.buckets[buckets_of(KEYS)]], gradient)
        return store, share

    def _push(self, store: TableStore, keys: NDArray[np.int64], gradient: float) -> None:
        counts = np.array([len(keys), *[0] * (len(store.specs) - 1)], np.uint32)
        store.push(counts, keys, np.full(4 * len(keys), gradient, np.float32))
