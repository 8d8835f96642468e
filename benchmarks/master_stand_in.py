"""Even routing tables and manifests of checkpoints, for benchmarks and tests without a master."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, format_of
from emberscale_api.job import TableSpec, parse_manifest
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_trainer.checkpoint import Share, Work
from emberscale_trainer.checkpoint.writer import write_part
from emberscale_trainer.partition import Ownership
from emberscale_trainer.table import Snapshot
from whole_run import manifest


def spread_evenly(count: int, servers: int) -> tuple[int, ...]:
    """Returns the owners of `count` buckets or pieces: contiguous shares whose sizes differ by at most one."""
    return tuple(number * servers // count for number in range(count))


def even_table(servers: int) -> RoutingTable:
    """Returns the first routing table of `servers` servers, without addresses."""
    addresses = tuple(PsAddress(index, "i", "", "") for index in range(servers))
    return RoutingTable(1, 1, addresses, spread_evenly(BUCKETS, servers), spread_evenly(DENSE_PIECES, servers))


def owned(servers: int, index: int) -> Ownership:
    """Returns what one of `servers` servers owns in the first routing table."""
    return Ownership.of(even_table(servers), index)


def write_snapshot(
    snapshot: Snapshot, specs: Sequence[TableSpec], share: Share, uri: str, work: Work, weight_bits: int = 0
) -> list[CheckpointFile]:
    """Writes all rows of one server, for a checkpoint that no other builds on, and commits the snapshot."""
    written, _ = write_part(snapshot, specs, share, uri, work, weight_bits)
    snapshot.commit()
    return written


def checkpoint_manifest(files: Iterable[CheckpointFile] = (), **changes: Any) -> CheckpointManifest:
    """Returns the manifest of a checkpoint with these files, by default of one server; `changes` are other fields."""
    fields: dict[str, Any] = {
        "id": "00000001",
        "number": 1,
        "created": datetime.now(UTC),
        "job_uid": "u",
        "ps_count": 1,
        "generation": 1,
        "routing_version": 1,
        "epoch": 0,
        "batch_size": 1,
        "training_records": 2,
        "applied": (),
        "evaluations": (),
        "training_files": (),
        "evaluation_files": (),
        "training_seconds": 1.0,
        "files": tuple(files),
        **changes,
    }
    fields.setdefault(
        "format_version",
        format_of(
            (file.path for file in fields["files"]), incremental=any(file.checkpoint for file in fields["files"])
        ),
    )
    if "job" not in fields:
        fields["job"] = parse_manifest(manifest("job", {"data": {"train": ["train.tsv"]}}))
    return CheckpointManifest(**fields)


def write_manifest(folder: Path, files: Iterable[CheckpointFile] = (), **changes: Any) -> str:
    """Completes the checkpoint in a folder with a manifest (see `checkpoint_manifest`); returns its URI."""
    (folder / "manifest.json").write_text(checkpoint_manifest(files, **changes).to_json())
    return str(folder)
