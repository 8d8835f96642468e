"""`emberscale audit`: was every sample applied exactly once?"""

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console
from emberscale._run.audit import AuditReport, Counts
from emberscale._run.checkpoints import SavedCheckpoints, audit_checkpoints
from emberscale._run.record import RunPaths, RunRecord, RunStatus, read_record
from emberscale_api.checkpoint import ForgottenShare
from emberscale_api.errors import InvalidError

HELP = paragraphs("""\
Proves that a run lost no sample and repeated none.

Every parameter server records how often it applied each batch, and saves that record with its rows. The audit reads
the last complete checkpoint of the run. For each epoch, it counts the samples that some server never applied
([red]missing[/]), that every server applied exactly once, and that some server applied more often ([red]repeated[/]).
As a second witness, dense parameters count their own steps; the audit names each server whose counts do not match.

After a partial recovery, samples are [yellow]forgotten[/]: they were applied once, and their effect is lost on the rows
of the lost server. So are the latest samples of a server that was rebuilt from parity with durability Async. The audit
names these rows' share, and its dense parameters must lack these steps and no others.

Exit code [green]0[/] only if nothing is missing or repeated and the counts agree. For a run that is not Complete,
samples that it has not trained yet are missing; without repeated samples, the audit calls it unfinished.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale audit runs/criteo-dlrm

  emberscale audit runs/criteo-dlrm --output json | jq .missing
"""


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
    output: OutputFormat = Output.TEXT,
) -> None:
    """Proves that a run lost no sample and repeated none."""
    with bad_input_exits():
        report, record = _audit(RunPaths(run_dir))
    if output is Output.JSON:
        typer.echo(json.dumps(report.as_document(), indent=2))
    else:
        _print(report, record.status)
    raise typer.Exit(0 if report.accounted else 1)


def _audit(paths: RunPaths) -> tuple[AuditReport, RunRecord]:
    record = read_record(paths)
    uri = record.checkpoint_uri(paths)
    folder = SavedCheckpoints(uri)
    report, refused = audit_checkpoints(folder, folder.find({record.uid, *record.earlier_uids}))
    for problem in refused:
        typer.echo(f"warning: {problem}", err=True)
    if report is None:
        raise InvalidError(f"{paths.root}: the run has no complete checkpoint in {uri}; let it finish, or continue it")
    return report, record


def _print(report: AuditReport, status: RunStatus) -> None:
    table = Table(title=f"Samples applied, checkpoint {report.checkpoint}, {report.ps_count} parameter servers")
    for column in ("epoch", *_columns(report)):
        table.add_column(column, justify="right")
    for counts, alike in groupby(sorted(report.epochs.items()), key=itemgetter(1)):
        epochs = [epoch + 1 for epoch, _ in alike]
        name = str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}, each"
        table.add_row(name, *_columns(report, counts))
    table.add_section()
    table.add_row("all", *_columns(report, report.total), style="bold")
    console = open_console()
    console.print(table)
    if (origin := report.origin) is not None:
        console.print(
            f"started from {origin.checkpoint} of job {origin.job}, {origin.samples:,} samples "
            f"(data.continuation {origin.continuation})"
        )
    for share in report.shares:
        console.print(_describe(share))
    console.print(_verdict(report, status))


def _columns(report: AuditReport, counts: Counts | None = None) -> list[str]:
    """The names of the columns, or the counts in them; what is forgotten only where something is."""
    wanted = ("missing", "once", *(("forgotten",) if report.shares else ()), "repeated")
    return [name if counts is None else f"{getattr(counts, name):,}" for name in wanted]


def _describe(share: ForgottenShare) -> str:
    """Describes what a recovery made some rows forget."""
    servers = ", ".join(f"ps-{index}" for index in share.servers)
    batches = ", ".join(
        f"batches {first:,} to {stop - 1:,} of epoch {part.epoch + 1}"
        for part in share.epochs
        for first, stop in part.ranges
    )
    saves = share.priority_saves
    how = f"went back to checkpoint {share.checkpoint}" if share.checkpoint else "was rebuilt from parity that lagged"
    less = f", and less of the rows in {saves} saves of priority rows" if saves else ""
    return (
        f"[yellow]forgotten[/] on {share.share:.2%} of the rows, those of {servers} when it was lost and {how}: "
        f"{share.samples:,} samples, {batches or 'no batch'}{less}"
    )


def _verdict(report: AuditReport, status: RunStatus) -> str:
    total = report.total
    if report.contradictions:
        return "".join(f"[red]not exactly once: {line}[/]\n" for line in report.contradictions).rstrip()
    if total.exact:
        return "[green]every sample exactly once[/]"
    if total.accounted:
        return (
            f"[yellow]every sample applied once, and {total.forgotten:,} of them forgotten on some rows: "
            f"portion of lost samples {report.pls:.4f}[/]"
        )
    if status is not RunStatus.COMPLETE and not total.repeated:
        return (
            f"[yellow]unfinished: {total.once:,} of {total.once + total.missing:,} samples are applied, each exactly "
            "once; --resume trains the rest[/]"
        )
    return f"[red]not exactly once: {total.missing:,} missing, {total.repeated:,} repeated[/]"
