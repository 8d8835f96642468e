"""`emberscale run`: trains a manifest on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from emberscale.commands.options import ManifestFile, Output, OutputFormat, Overrides, bad_input_exits
from emberscale.preflight import check_data
from emberscale.run_folder import Run, RunStatus, open_run, write_atomically
from emberscale.summary import Summary, summarize
from emberscale_api.job import load_manifest
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import LocalJob

_STATUS = {
    pb.COMPLETE: RunStatus.COMPLETE,
    pb.FAILED: RunStatus.FAILED,
    pb.SUSPENDED: RunStatus.SUSPENDED,
}


def run(
    file: ManifestFile,
    overrides: Overrides = None,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder. [dim]default: runs/<job name>[/]", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Goes on with the run in the folder.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Starts anew even if the folder holds a run that could be resumed.")
    ] = False,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Uses this Redis instead of one of the job's own.", show_default=False),
    ] = None,
    master_port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Where the master listens; 0 takes any free port.")
    ] = 0,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Trains a manifest on this machine."""
    with bad_input_exits():
        job = load_manifest(file, overrides or ())
        check_data(job)
        root = workdir or Path("runs", job.metadata.name)
        with open_run(root, job, resume, overwrite) as held:
            summary = _train(held, redis, master_port)
    if output is Output.JSON:
        typer.echo(json.dumps(summary.as_document(), indent=2))


def _train(held: Run, redis: str | None, master_port: int) -> Summary:
    held.processes.make()
    with LocalJob(held.job, held.record.uid, held.processes, redis, master_port) as local:
        held.save()
        outcome = local.run(lambda snapshot: None)
    held.save(status=_STATUS.get(outcome.phase, RunStatus.INTERRUPTED))
    summary = summarize(held.record.name, outcome, outcome.seconds)
    write_atomically(held.paths.summary, json.dumps(summary.as_document(), indent=2) + "\n")
    return summary
