"""Exports a checkpoint to a folder that torch alone can serve.

<out>/model.json                the model's columns, its tables, and its quality on held-out data
<out>/model.pt2                 a torch.export program, from features and ids to logits
<out>/dense.safetensors         the dense parameters, as the module's state dict
<out>/table-<n>.safetensors     keys int64 [rows], ascending, and weights float32 [rows, dimension]
"""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from emberscale._serving import ABOUT, ensure_replaceable
from emberscale._serving.program import InitialWeights, ServingModel, exported_program
from emberscale._serving.table_file import RowSorter, TableFile
from emberscale_api.checkpoint import CheckpointManifest
from emberscale_api.errors import InvalidError
from emberscale_api.job import ResolvedModel, TableSpec, resolve_model
from emberscale_trainer.checkpoint import CheckpointFiles, StorageUnreachableError, Work, read_dense, read_records
from emberscale_trainer.checkpoint.files import PartitionFile
from emberscale_trainer.data.records import MISSING_ID
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.entrypoint import OwnModel
from emberscale_trainer.models.flat import flat_copy, load_flat
from emberscale_trainer.table import DensePieces, RowLayout, with_sketches

PROGRAM, DENSE = "model.pt2", "dense.safetensors"
_BYTES_IN_MEMORY = 256 << 20
"""Bytes of rows that are sorted at once; reading and writing take about as much again."""

_PATIENCE_SECONDS = 30.0
"""The time for which a storage that does not answer is retried."""

Advance = Callable[[int], None]
"""Called with the number of further bytes of rows that have been read."""

Begins = Callable[[str], None]
"""Called once all rows have been read, with the step that begins then."""


class ExportError(InvalidError):
    """The checkpoint cannot be read, or the folder cannot be written."""


@dataclass(frozen=True)
class ExportedModel:
    """The files of an export. `refusal` is why torch.export refused the model, in which case there is no program."""

    checkpoint: str
    rows: int
    bytes: int
    refusal: str | None


def rows_bytes(manifest: CheckpointManifest) -> int:
    """Returns the bytes of rows that an export of the checkpoint reads."""
    return sum(file.bytes for file in manifest.files if "/table-" in file.path)


def export_checkpoint(
    uri: str | Path,
    out: str | Path,
    advance: Advance = lambda _: None,
    begins: Begins = lambda _: None,
) -> ExportedModel:
    """Writes the model of a checkpoint, the folder `uri`, to the folder `out`, replacing an earlier export there.

    `advance` is called with the number of further bytes read, `begins` before the model is traced, which takes seconds
    of processor time for any number of rows. At most about 256 MiB of rows are in memory at once. Every
    file is checked against the manifest. Raises DamagedCheckpointError, EntrypointError for a user's own model that
    cannot be made, ExportError, and InvalidError if `out` holds other files; `out` is then unchanged.
    """
    uri, out = str(uri), Path(out)
    ensure_replaceable(out)
    beside = out.with_name(f".{out.name}.new")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        exported = _export(CheckpointFiles(uri, Work(_PATIENCE_SECONDS, missing_seconds=0)), beside, advance, begins)
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    except StorageUnreachableError as error:
        raise ExportError(f"cannot be read: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return exported


def _export(files: CheckpointFiles, folder: Path, advance: Advance, begins: Begins) -> ExportedModel:
    spec = files.manifest.job.spec
    resolved = resolve_model(spec)
    model = build_model(spec.model, resolved, spec.training.seed)
    initial = flat_copy(model).numpy()
    dense = DensePieces.of(initial, spec.optimizers.dense).table(len(resolved.tables))
    parts = files.partitions((*with_sketches(resolved.tables), dense), len(initial))
    load_flat(model, torch.from_numpy(read_dense(files, parts, initial)))
    _write_dense(model.inner if isinstance(model, OwnModel) else model, folder / DENSE)
    rows = [_write_table(files, parts, table, folder, advance) for table in resolved.tables]
    begins("tracing the model")  # once all files of the checkpoint have proved to be sound
    refusal = _write_program(model, resolved, folder / PROGRAM)
    about = _about(files.manifest, resolved, rows, refusal is None)
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    written = sum(file.stat().st_size for file in folder.iterdir())
    return ExportedModel(files.manifest.id, sum(rows), written, refusal)


def _write_dense(model: nn.Module, path: Path) -> None:
    path.touch()  # with the usual mode; the library would make a file that only its owner can read
    mode = path.stat().st_mode
    save_model(model, str(path))
    path.chmod(mode)


def _write_program(model: nn.Module, resolved: ResolvedModel, path: Path) -> str | None:
    serving = ServingModel(model, resolved)
    try:
        program = exported_program(serving, resolved)
    except Exception as error:  # noqa: BLE001 - torch.export raises what the person's model makes it raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    program.example_inputs = None  # torch would write them, too, pickled
    # by way of memory: torch ends the process where it cannot write to the disk
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    return None


def _write_table(
    files: CheckpointFiles,
    parts: Sequence[PartitionFile],
    table: TableSpec,
    folder: Path,
    advance: Advance,
) -> int:
    layout = RowLayout.of(table)
    runs = folder / "runs"
    runs.mkdir()
    sorter = RowSorter(runs, max(1, _BYTES_IN_MEMORY // (8 + 4 * table.dimension)))

    def take(records: Any) -> None:
        fields = layout.fields(records)
        sorter.add(fields["key"].copy(), fields["weights"].copy())
        advance(records.nbytes)

    for part in parts:
        for records in read_records(files, part, part.tables[table.number]):
            take(records)
    rows = sum(part.tables[table.number].rows for part in parts)
    with TableFile(folder / table_file_name(table), max(1, rows), table.dimension) as file:
        for piece in sorter.sorted():
            file.append(piece)
        if not rows:  # the program wants one: that of id 0, as it would begin
            zero = torch.zeros(1, dtype=torch.int64)
            file.append((zero.numpy(), InitialWeights([table])(zero[:, None])[:, 0].numpy()))
    shutil.rmtree(runs)
    return rows


def table_file_name(table: TableSpec) -> str:
    """Names the file by number, since a column's name may not be valid for a file."""
    return f"table-{table.number}.safetensors"


def _about(
    manifest: CheckpointManifest, resolved: ResolvedModel, rows: Sequence[int], has_program: bool
) -> dict[str, Any]:
    spec, columns = manifest.job.spec, resolved.columns
    return {
        "format": 1,
        "name": manifest.job.metadata.name,
        "checkpoint": manifest.id,
        "model": spec.model.model_dump(mode="json", by_alias=True, exclude_none=True),
        "program": PROGRAM if has_program else None,
        "data_format": str(spec.data.format),
        "label": columns.label,
        "dense": list(columns.dense),
        "dense_transforms": [str(transform) for transform in columns.transforms],
        "categorical": list(columns.categorical),
        "lists": [
            {"name": column.name, "max_length": column.max_length, "kept": "first", "overflow": str(column.overflow)}
            for column in columns.lists
        ],
        "missing_id": MISSING_ID,
        "csv": spec.data.csv.model_dump(mode="json"),
        "tables": [
            {
                "name": table.name,
                "column": columns.id_columns[table.column],
                "file": table_file_name(table),
                "rows": count,
                "dimension": table.dimension,
                "pooling": table.pooling,
                "initializer": table.initializer.model_dump(mode="json"),
                "seed": table.seed,
            }
            for table, count in zip(resolved.tables, rows, strict=True)
        ],
        "evaluation": manifest.evaluations[-1].model_dump(mode="json") if manifest.evaluations else None,
    }
