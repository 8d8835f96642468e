"""`emberscale audit`: was every sample applied exactly once?"""

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._run.audit import AuditReport
from emberscale._run.checkpoints import SavedCheckpoints, audit_checkpoints
from emberscale._run.record import RunPaths, RunRecord, RunStatus, read_record
from emberscale_api.errors import InvalidError

HELP = paragraphs("""\
Proves that a run lost no sample and repeated none.

Every parameter server records how often it applied each batch, and saves that with its rows. From the last complete
checkpoint of the run this counts the samples of each epoch that some server never applied ([red]missing[/]), that
every server applied exactly once, and that some server applied more often ([red]repeated[/]). The dense parameters
count their steps by themselves, where they change; a server whose count is not that of its record is named.

Exit code [green]0[/] only if nothing is missing or repeated and the counts agree. What an unfinished run has not
trained yet is missing, and it is called unfinished if nothing is repeated.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale audit runs/criteo-dlrm

  emberscale audit runs/criteo-dlrm --output json | jq .missing
"""


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    output: OutputFormat = Output.TEXT,
) -> None:
    """Proves that a run lost no sample and repeated none."""
    with bad_input_exits():
        report, record = _audit(RunPaths(run_dir))
    if output is Output.JSON:
        typer.echo(json.dumps(report.as_document(), indent=2))
    else:
        _print(report, record.status)
    raise typer.Exit(0 if report.exact else 1)


def _audit(paths: RunPaths) -> tuple[AuditReport, RunRecord]:
    record = read_record(paths)
    uri = record.job(paths).spec.checkpoint.uri
    if uri is None:
        raise InvalidError(f"{paths.record}: names no checkpoint URI")
    folder = SavedCheckpoints(uri)
    report, refused = audit_checkpoints(folder, folder.find({record.uid, *record.earlier_uids}))
    for problem in refused:
        typer.echo(f"warning: {problem}", err=True)
    if report is None:
        raise InvalidError(f"{paths.root}: the run has no complete checkpoint in {uri}; let it finish, or continue it")
    return report, record


def _print(report: AuditReport, status: RunStatus) -> None:
    table = Table(title=f"Samples applied, checkpoint {report.checkpoint}, {report.ps_count} parameter servers")
    for column in ("epoch", "missing", "once", "repeated"):
        table.add_column(column, justify="right")
    for counts, alike in groupby(sorted(report.epochs.items()), key=itemgetter(1)):
        epochs = [epoch + 1 for epoch, _ in alike]
        name = str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}, each"
        table.add_row(name, f"{counts.missing:,}", f"{counts.once:,}", f"{counts.repeated:,}")
    total = report.total
    table.add_section()
    table.add_row("all", f"{total.missing:,}", f"{total.once:,}", f"{total.repeated:,}", style="bold")
    console = Console()
    console.print(table)
    console.print(_verdict(report, status))


def _verdict(report: AuditReport, status: RunStatus) -> str:
    total = report.total
    if report.contradictions:
        return "".join(f"[red]not exactly once: {line}[/]\n" for line in report.contradictions).rstrip()
    if total.exact:
        return "[green]every sample exactly once[/]"
    if status is not RunStatus.COMPLETE and not total.repeated:
        return (
            f"[yellow]unfinished: {total.once:,} of {total.once + total.missing:,} samples are applied, each exactly "
            "once; --resume trains the rest[/]"
        )
    return f"[red]not exactly once: {total.missing:,} missing, {total.repeated:,} repeated[/]"
