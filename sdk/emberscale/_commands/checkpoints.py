"""`emberscale checkpoints`: lists, inspects, verifies, compares and prunes checkpoints."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import DownloadColumn, TimeRemainingColumn
from rich.table import Table

from emberscale._commands import restore
from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console, progress_bar
from emberscale._run.checkpoints import REMOVED, SavedCheckpoint, SavedCheckpoints, TableRows
from emberscale._run.record import hint_at_run, located
from emberscale_api.checkpoint import CheckpointManifest, DamagedCheckpointError
from emberscale_api.errors import InvalidError
from emberscale_api.job.continuity import differences
from emberscale_api.readable import bytes_text, duration_text

HELP = paragraphs("""\
Lists checkpoints, shows the content of one, verifies every byte, compares two, removes old ones, and starts jobs from
them. A checkpoint may build on earlier ones (spec.checkpoint.incremental); it is complete only if they are.

PLACE is the folder of a run, the URI of a job's checkpoints (spec.checkpoint.uri), or the folder of one checkpoint
there. If a command needs one checkpoint and PLACE holds several, it takes the newest that can be restored.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale checkpoints list runs/criteo-dlrm s3://bucket/checkpoints/criteo-dlrm

  emberscale checkpoints show runs/criteo-dlrm

  emberscale checkpoints verify runs/criteo-dlrm

  emberscale checkpoints diff runs/criteo-dlrm/checkpoints/00000004 runs/criteo-dlrm

  emberscale checkpoints prune s3://bucket/checkpoints/criteo-dlrm --keep 1 --yes
"""
LIST_HELP = paragraphs("""\
Lists checkpoints, the newest first, and says which are damaged and which can be restored instead.

A checkpoint that builds on another one is below it. The AUC is that of the last evaluation before it. The size is that
of its folder, with its manifest; to restore is what a restore reads, also of the checkpoints below which it stands. The
command reads manifests and sizes of files; [cyan]verify[/] also reads their content.
""")
VERIFY_HELP = paragraphs("""\
Reads every byte of every checkpoint, and compares each file with its checksum.

Exit code [red]1[/] if a checkpoint that was completed cannot be restored. A checkpoint without a manifest was never
completed and does not count, nor does one that a job removes meanwhile.
""")
PRUNE_HELP = paragraphs("""\
Keeps the newest checkpoints that can be restored, as many as [cyan]--keep[/] says, and removes older ones.

Checkpoints that a kept one builds on stay, too. The command first reads every byte of the checkpoints that it keeps; a
damaged one does not count. Newer checkpoints stay with all that they build on: a job may be writing them.
""")
_NAMED = 3
"""Checkpoints that are named one by one."""
_LIST_COLUMNS = 80
"""The width of a list: a narrower terminal wraps its lines, which can be read."""

checkpoints_app = typer.Typer(no_args_is_help=True, help=HELP, epilog=EXAMPLES, rich_markup_mode="rich")
_METAVAR = "PLACE"
_Place = Annotated[
    str, typer.Argument(metavar=_METAVAR, help="Folder of a run, URI of checkpoints, or folder of one checkpoint.")
]
_Places = Annotated[
    list[str],
    typer.Argument(
        metavar=f"{_METAVAR}...", help="Folders of runs, URIs of checkpoints, or folders of single checkpoints."
    ),
]


class _Storage:
    """The checkpoints that a PLACE names."""

    def __init__(self, place: str) -> None:
        self.place = place
        uri, chosen = located(place)
        self.folder = SavedCheckpoints(uri)
        self._beside = self.folder.entries()
        self.entries = [entry for entry in self._beside if chosen in ("", entry.id)]
        if not self.entries:
            has = f"has {', '.join(entry.id for entry in self._beside)}" if self._beside else "holds no checkpoints"
            if "://" not in uri and not Path(uri).exists():
                has = f"does not exist{hint_at_run(uri)}"
            raise InvalidError(f"{_METAVAR}: {place}: is no checkpoint; {uri} {has}" if chosen else f"{place}: {has}")

    @property
    def is_part(self) -> bool:
        """Whether there were other checkpoints beside those that the PLACE names."""
        return len(self.entries) < len(self._beside)

    def newest(self) -> tuple[SavedCheckpoint, CheckpointManifest, list[TableRows]]:
        """The newest checkpoint that can be restored, and its tables. Raises InvalidError."""
        for entry in self.entries:
            if entry.manifest is not None and not entry.problem:
                try:
                    return entry, entry.manifest, self.folder.tables(entry.manifest)
                except DamagedCheckpointError as error:
                    raise InvalidError(f"{error}{self.instead_of(replace(entry, problem=str(error)))}") from error
        if len(self.entries) == 1:
            only = self.entries[0]
            raise InvalidError(f"{_METAVAR}: {self.place}: {only.problem}{self.instead_of(only)}")
        problems = "".join(f"\n{entry.id}: {entry.problem}" for entry in self.entries)
        raise InvalidError(f"{_METAVAR}: {self.place}: nothing can be restored{problems}")

    def instead_of(self, damaged: SavedCheckpoint) -> str:
        """Says which checkpoint to take instead of a damaged one; empty if it is not, or was never completed."""
        if not damaged.problem or damaged.incomplete:
            return ""
        sound = [entry.id for entry in self._beside if entry.manifest is not None and not entry.problem]
        older = [identifier for identifier in sound if int(identifier) < int(damaged.id)]
        return f"; {(older or sound)[0]} can be restored instead" if sound else "; no other can be restored"


@checkpoints_app.command("list", help=LIST_HELP)
def list_checkpoints(places: _Places, output: OutputFormat = Output.TEXT) -> None:
    """Lists checkpoints, the newest first."""
    with bad_input_exits():
        found = [_Storage(place) for place in places]
    if output is Output.JSON:
        documents = [{"place": one.place, "checkpoints": [_document(entry) for entry in one.entries]} for one in found]
        typer.echo(json.dumps(documents, indent=2))
        return
    console = open_console()
    console.width = max(console.width, _LIST_COLUMNS)
    for one in found:
        # narrow: without a frame, and with what is wrong below
        table = Table(title=one.place, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for column in ("checkpoint", "created", "epoch", "samples", "AUC", "servers", "weights", "size", "to restore"):
            left, wraps = column in ("checkpoint", "created"), column in ("created", "to restore")
            table.add_column(column, justify="left" if left else "right", no_wrap=not wraps, overflow="fold")
        for mark, entry in _tree(one.entries):
            table.add_row(f"{mark}{entry.id}", *_row(entry))
        console.print(table)
        for _, entry in _tree(one.entries):
            if entry.problem:
                problem = f"{entry.id}: {entry.problem}{one.instead_of(entry)}"
                console.print(problem, style="red", soft_wrap=True, highlight=False, markup=False)


@checkpoints_app.command()
def show(place: _Place, output: OutputFormat = Output.TEXT) -> None:
    """Shows the job, the samples, the tables and the evaluations of a checkpoint."""
    with bad_input_exits():
        storage = _Storage(place)
        entry, manifest, tables = storage.newest()
    if output is Output.JSON:
        typer.echo(json.dumps({**_document(entry), "tables": [vars(table) for table in tables]}, indent=2))
        return
    console = open_console()
    facts = Table(title=storage.folder.uri_of(manifest), title_justify="left", show_header=False)
    for name, value in (
        ("job", f"{manifest.job.metadata.name} ({manifest.job_uid})"),
        ("created", _time_of(manifest)),
        ("samples", f"{manifest.applied_samples:,}, in epoch {manifest.epoch + 1}"),
        ("started from", "nothing" if manifest.origin is None else manifest.origin.checkpoint),
        ("training", duration_text(manifest.training_seconds)),
        ("servers", str(manifest.ps_count)),
        ("weights", _weights(manifest.weight_bits)),
        ("builds on", _span(manifest.builds_on)),
        ("size", f"{bytes_text(entry.bytes)}, its own files and the manifest"),
        ("a restore reads", bytes_text(manifest.total_bytes)),
    ):
        facts.add_row(name, value)
    console.print(facts)
    console.print(_tables(tables))
    if manifest.evaluations:
        results = Table("after epoch", "samples", "AUC", "log loss", title="Evaluations", title_justify="left")
        for result in manifest.evaluations:
            results.add_row(str(result.epoch), f"{result.samples:,}", _digits(result.auc), _digits(result.logloss))
        console.print(results)


@checkpoints_app.command(help=VERIFY_HELP)
def verify(places: _Places, output: OutputFormat = Output.TEXT) -> None:
    """Reads every byte of every checkpoint, and compares each file with its checksum."""
    with bad_input_exits():
        found = [_Storage(place) for place in places]
        total = sum(one.folder.bytes_to_verify(one.entries) for one in found)
        verdicts: list[tuple[_Storage, SavedCheckpoint, list[str]]] = []
        with progress_bar("", DownloadColumn(), TimeRemainingColumn(), total=total) as update:
            for one in found:
                for entry in one.entries:
                    update(description=f"checkpoint {entry.id}")
                    problems = [entry.problem] if entry.problem else []
                    if entry.manifest is not None and not problems:
                        problems = one.folder.verify(entry.manifest, lambda size: update(advance=size))
                        if problems and not one.folder.holds(entry.id):  # a job removes what it no longer keeps
                            entry, problems = replace(entry, problem=REMOVED), [REMOVED]
                    verdicts.append((one, entry, problems))
    if output is Output.JSON:
        lines = [
            {"place": one.place, "id": entry.id, "incomplete": entry.incomplete, "problems": problems}
            for one, entry, problems in verdicts
        ]
        typer.echo(json.dumps(lines, indent=2))
    else:
        for one, entry, problems in verdicts:
            bits, size = (0, 0) if entry.manifest is None else (entry.manifest.weight_bits, entry.manifest.total_bytes)
            quantised = f", weights of {bits} bits" if bits else ""
            words = "; ".join(problems) or f"sound, {bytes_text(size)}{quantised}"
            whole = [found.id for place, found, wrong in verdicts if place is one and not wrong]
            hint = f"; {whole[0]} is sound" if problems and whole and not entry.incomplete else ""
            typer.echo(f"{one.place}: {entry.id}: {words}{hint}")
    raise typer.Exit(int(any(problems and not entry.incomplete for _, entry, problems in verdicts)))


@checkpoints_app.command()
def diff(first: _Place, second: _Place, output: OutputFormat = Output.TEXT) -> None:
    """Compares the manifests, the progress and the rows per table of two checkpoints."""
    with bad_input_exits():
        storages = [_Storage(place) for place in (first, second)]
        found = [storage.newest() for storage in storages]
    chosen = [manifest for _, manifest, _ in found]
    rows = [{table.name: table.rows for table in tables} for _, _, tables in found]
    fields = {one.path: [one.before, one.now] for one in differences(chosen[0].job, chosen[1].job)}
    figures: dict[str, list[Any]] = {
        "samples": [manifest.applied_samples for manifest in chosen],
        "servers": [manifest.ps_count for manifest in chosen],
        "weights": [_weights(manifest.weight_bits) for manifest in chosen],
        "training seconds": [round(manifest.training_seconds, 1) for manifest in chosen],
        **{f"rows of {name}": [held.get(name) for held in rows] for name in dict.fromkeys([*rows[0], *rows[1]])},
    }
    if output is Output.JSON:
        ids = [manifest.id for manifest in chosen]
        typer.echo(json.dumps({"checkpoints": ids, "manifest": fields, "figures": figures}, indent=2))
        return
    table = Table("", *(storage.folder.uri_of(one) for storage, one in zip(storages, chosen, strict=True)))
    for name, values in (fields | figures).items():
        table.add_row(name, *("-" if value is None else str(value) for value in values))
    open_console().print(table)


@checkpoints_app.command(help=PRUNE_HELP)
def prune(
    place: _Place,
    keep: Annotated[int, typer.Option(min=1, help="Number of restorable checkpoints to keep, the newest.")] = 2,
    yes: Annotated[
        bool, typer.Option("--yes", help="Removes the checkpoints; without it, they are only listed.")
    ] = False,
) -> None:
    """Keeps the newest checkpoints that can be restored, and removes older ones."""
    with bad_input_exits():
        storage = _Storage(place)
        if storage.is_part:
            raise InvalidError(f"{_METAVAR}: {place}: is a single checkpoint; name the folder or the run that holds it")
        kept: list[SavedCheckpoint] = []
        for entry in storage.entries:
            if len(kept) < keep and entry.manifest is not None and not entry.problem:
                problems = storage.folder.verify(entry.manifest, lambda size: None)
                for problem in problems:
                    typer.echo(f"warning: {problem}", err=True)
                kept += [] if problems else [entry]
        if not kept:
            raise InvalidError(f"{_METAVAR}: {place}: nothing can be restored, so nothing is removed")
        newer = [entry for entry in storage.entries if int(entry.id) > int(kept[0].id)]  # a job may build on the same
        needed = {identifier for entry in (*kept, *newer) for identifier in (entry.id, *entry.builds_on)}
        old = [entry for entry in storage.entries if int(entry.id) < int(kept[0].id) and entry.id not in needed]
        for entry in old:
            if yes:
                storage.folder.remove(entry.id)
            typer.echo(f"{entry.id}: {'removed' if yes else 'would be removed'}, {bytes_text(entry.bytes)}")
    stays = ", ".join(entry.id for entry in kept)
    built_on = sorted(needed - {entry.id for entry in (*kept, *newer)}, key=int)
    does, builds = ("does" if len(built_on) == 1 else "do"), ("it builds" if len(kept) == 1 else "they build")
    hint = f"; so {does} {_span(built_on)}, on which {builds}" if built_on else ""
    hint += "" if yes or not old else "; --yes removes the listed ones"
    typer.echo(f"{stays}: verified, {'stays' if len(kept) == 1 else 'stay'}{hint}")


checkpoints_app.command("restore", help=restore.HELP, epilog=restore.EXAMPLES)(restore.restore)


def _tree(entries: Sequence[SavedCheckpoint]) -> Iterator[tuple[str, SavedCheckpoint]]:
    """The entries in their order, the newest first, but those that build on others after these, each with its mark."""
    there = {entry.id for entry in entries}
    built: dict[str, list[SavedCheckpoint]] = {}
    for entry in entries:
        base = next((identifier for identifier in entry.builds_on if identifier in there), "")
        built.setdefault(base, []).insert(0, entry)
    for root in reversed(built.pop("", [])):
        yield "", root
        branches = built.get(root.id, [])
        for number, entry in enumerate(branches, start=1):
            yield "└ " if number == len(branches) else "├ ", entry


def _span(identifiers: Sequence[str]) -> str:
    """Names some checkpoints, but not all of many."""
    if len(identifiers) > _NAMED:
        return f"{identifiers[0]} to {identifiers[-1]}, {len(identifiers)} of them"
    return ", ".join(identifiers) or "none"


def _row(entry: SavedCheckpoint) -> tuple[str, ...]:
    size, manifest = bytes_text(entry.bytes), entry.manifest
    if manifest is None:
        return "-", "-", "-", "-", "-", "-", size, "-"
    auc = _digits(manifest.evaluations[-1].auc) if manifest.evaluations else "-"
    samples, reads = f"{manifest.applied_samples:,}", bytes_text(manifest.total_bytes)
    epoch, servers, weights = str(manifest.epoch + 1), str(manifest.ps_count), _weights(manifest.weight_bits)
    return _time_of(manifest), epoch, samples, auc, servers, weights, size, reads


def _document(entry: SavedCheckpoint) -> dict[str, Any]:
    document: dict[str, Any] = {"id": entry.id, "problem": entry.problem, "bytes": entry.bytes}
    if entry.manifest is None:
        return document
    manifest = entry.manifest
    return {
        **document,
        "builds_on": [*manifest.builds_on],
        "restore_bytes": manifest.total_bytes,
        "job": manifest.job.metadata.name,
        "created": manifest.created.isoformat(),
        "epoch": manifest.epoch + 1,
        "samples": manifest.applied_samples,
        "servers": manifest.ps_count,
        "weight_bits": manifest.weight_bits,
        "evaluations": [result.model_dump(mode="json") for result in manifest.evaluations],
    }


def _tables(tables: list[TableRows]) -> Table:
    shown = Table("table", "rows", "dimension", "optimizer", "weights", "size", title="Tables", title_justify="left")
    for table in tables:
        size = bytes_text(table.bytes)
        if table.weight_bits:
            size += f" instead of {bytes_text(table.exact_bytes)}"
        weights = _weights(table.weight_bits)
        shown.add_row(table.name, f"{table.rows:,}", str(table.dimension), table.optimizer, weights, size)
    return shown


def _weights(bits: int) -> str:
    return f"{bits} bits" if bits else "float32"


def _time_of(manifest: CheckpointManifest) -> str:
    return f"{manifest.created.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
