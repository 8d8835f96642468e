"""`emberscale export`: writes a trained model for serving."""

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.progress import DownloadColumn, TimeElapsedColumn, TimeRemainingColumn

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import progress_bar
from emberscale._run.checkpoints import SavedCheckpoints
from emberscale._run.record import RunPaths, hint_at_run, located, read_record
from emberscale._serving import ABOUT, ensure_replaceable
from emberscale_api.checkpoint import MANIFEST_NAME, CheckpointManifest, DamagedCheckpointError
from emberscale_api.errors import InvalidError
from emberscale_api.readable import bytes_text

if TYPE_CHECKING:
    from emberscale._serving.export import ExportedModel

HELP = paragraphs("""\
Writes a trained model as plain torch tensors, for serving without Emberscale.

RUN is the folder of a run or, for a job on a cluster, the URI of its checkpoints (spec.checkpoint.uri). The command
exports the newest checkpoint and checks each of its files; if one is damaged, it exports the previous checkpoint. To
export another one, such as the newest of the best epoch, name its folder: [cyan]checkpoints list[/] shows the epochs.

OUT holds model.pt2, a torch.export program from features and ids to logits; for each table a safetensors file with
sorted keys and their weights; dense.safetensors with all other parameters; and model.json, which describes them.
docs/serving.md has a program that predicts with them. Tables may be larger than memory.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale export runs/criteo-dlrm served/criteo-dlrm

  emberscale export s3://bucket/checkpoints/criteo-dlrm served/criteo-dlrm --overwrite

  emberscale export runs/criteo-dlrm/checkpoints/00000003 served/best
"""


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, URI of checkpoints, or folder of one checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replaces an earlier export in OUT.")] = False,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Writes a trained model as plain torch tensors, to be served without Emberscale."""
    with bad_input_exits():
        _check_out(out, overwrite)
        exported = _export(run, out)
    if exported.refusal is not None:
        typer.echo(
            f"warning: {out}: there is no model.pt2, since torch.export cannot trace the model: {exported.refusal}; "
            "load dense.safetensors into a module of your own",
            err=True,
        )
    if output is Output.JSON:
        document = {"path": str(out), "checkpoint": exported.checkpoint, "rows": exported.rows, "bytes": exported.bytes}
        typer.echo(json.dumps({**document, "program": exported.refusal is None}, indent=2))
    else:
        typer.echo(
            f"{out}: checkpoint {exported.checkpoint}, {exported.rows:,} rows, {bytes_text(exported.bytes)}; "
            "docs/serving.md shows how to predict with it"
        )


def _check_out(out: Path, overwrite: bool) -> None:
    ensure_replaceable(out)
    if (out / ABOUT).exists() and not overwrite:
        raise InvalidError(f"OUT: {out} holds an exported model; replace it with --overwrite")


def _export(run: str, out: Path) -> "ExportedModel":
    candidates = _candidates(run)
    with progress_bar("loading PyTorch", TimeElapsedColumn()):
        # takes seconds, which only this moment should cost
        from emberscale._serving.export import export_checkpoint, rows_bytes
    for uri, manifest in candidates:
        with _Steps(f"checkpoint {manifest.id}", rows_bytes(manifest)) as steps:
            try:
                return export_checkpoint(uri, out, steps.advance, steps.begin)
            except DamagedCheckpointError as error:
                typer.echo(f"warning: {error}", err=True)
    raise InvalidError(f"RUN: {run}: has no complete checkpoint without damage; let the run finish, or continue it")


class _Steps:
    """Shows the bytes of rows that are read, and then how long the next step, whose end is unknown, has taken."""

    def __init__(self, name: str, rows_bytes: int) -> None:
        self._name = name
        self._rows_bytes = rows_bytes
        self._shown = ExitStack()
        self.begin("reading rows", reads=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def begin(self, step: str, *, reads: bool = False) -> None:
        """Shows another step instead of the last one."""
        self._shown.close()
        figures = (DownloadColumn(), TimeRemainingColumn()) if reads else (TimeElapsedColumn(),)
        total = self._rows_bytes if reads else None
        self._update = self._shown.enter_context(progress_bar(f"{self._name}: {step}", *figures, total=total))

    def advance(self, size: int) -> None:
        """Shows that so many more bytes of rows have been read."""
        self._update(advance=size)


def _candidates(run: str) -> list[tuple[str, CheckpointManifest]]:
    """The folders of checkpoints to try, the newest first; the copy in `model/` comes after its original."""
    paths = RunPaths(Path(run))
    if not paths.record.exists():
        uri, chosen = located(run)
        folder = SavedCheckpoints(uri)
        if chosen:
            return _named(folder, chosen, run)
        found = _found(folder, None)
        if not found:
            raise InvalidError(f"RUN: {run} is neither the folder of a run nor one of checkpoints{hint_at_run(run)}")
        return found
    record = read_record(paths)
    found = _found(SavedCheckpoints(record.checkpoint_uri(paths)), {record.uid, *record.earlier_uids})
    copy = paths.model / MANIFEST_NAME
    if copy.exists():
        with suppress(DamagedCheckpointError):
            found.append((str(paths.model), CheckpointManifest.from_json(copy.read_bytes(), str(copy))))
    return sorted(found, key=lambda candidate: candidate[1].number, reverse=True)


def _named(folder: SavedCheckpoints, identifier: str, run: str) -> list[tuple[str, CheckpointManifest]]:
    """The folder of this checkpoint alone, for which no other will do. Raises InvalidError."""
    entry = next((entry for entry in folder.entries() if entry.id == identifier), None)
    if entry is None or entry.manifest is None or entry.problem:
        raise InvalidError(f"RUN: {run}: {'is no checkpoint' if entry is None else entry.problem}")
    return [(folder.uri_of(entry.manifest), entry.manifest)]


def _found(folder: SavedCheckpoints, uids: set[str] | None) -> list[tuple[str, CheckpointManifest]]:
    found = folder.find(uids)
    for problem in found.damaged:
        typer.echo(f"warning: {problem}", err=True)
    return [(folder.uri_of(manifest), manifest) for manifest in found.complete]
