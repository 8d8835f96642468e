"""The manifest of a checkpoint, as the master writes it."""

from datetime import UTC, datetime
from pathlib import Path

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest
from emberscale_api.job import parse_manifest
from emberscale_trainer.checkpoint import WrittenFile


def write_manifest(folder: Path, servers: int, files: list[WrittenFile]) -> str:
    """Writes the manifest of a checkpoint whose other files servers wrote; returns its URI."""
    manifest = CheckpointManifest(
        id="00000001",
        number=1,
        created=datetime.now(UTC),
        job_uid="u",
        job=parse_manifest(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "job"},
                "spec": {"data": {"train": ["train.tsv"]}},
            }
        ),
        ps_count=servers,
        generation=1,
        routing_version=1,
        epoch=0,
        batch_size=1,
        training_records=2,
        applied=(),
        evaluations=(),
        training_files=(),
        evaluation_files=(),
        training_seconds=1.0,
        files=tuple(CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in files),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return str(folder)
