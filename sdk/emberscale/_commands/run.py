"""`emberscale run`: trains a manifest on this machine."""

from typing import Annotated, NoReturn

import typer

from emberscale._commands.options import (
    ManifestFile,
    Output,
    OutputFormat,
    Overrides,
    Overwrite,
    WorkFolder,
    bad_input_exits,
    paragraphs,
)
from emberscale._console import open_console
from emberscale._reports.summary_table import summary_table
from emberscale._run.brain_choice import BrainCaFile, BrainOption, BrainSettings, BrainTokenFile, choose_brain
from emberscale._run.interruption import Interruption
from emberscale._run.record import RunStatus
from emberscale._run.resumption import kept_by_a_run
from emberscale._run.summary import finite_json
from emberscale._training import Training, default_folder, run_job
from emberscale_api.errors import InvalidError
from emberscale_api.job import load_manifest

HELP = paragraphs(f"""\
Trains a manifest on this machine: one process for every pod that a cluster would run.

Progress goes to stderr and the summary to stdout. The run's folder holds the summary, the metrics and their picture,
the logs and the model. Exit code [green]0[/] only for Complete, [red]1[/] for Failed, [red]2[/] for bad input (nothing
was started), [yellow]130[/] after Ctrl-C.

[bold]Ctrl-C[/] takes a checkpoint and stops every process; a second Ctrl-C stops them at once. In both cases,
[cyan]--resume[/] continues from the last checkpoint.

If the manifest leaves numbers of processes open, a brain beside the job plans them; it learns from earlier jobs, which
it keeps in this user's data folder. [cyan]--brain off[/] starts as few processes as the manifest allows.

If the folder holds a Complete run, a new run is written to [cyan]next[/] in it and replaces the old one once it is
Complete too. A new run replaces a Failed one at once, and a run that can be resumed only with [cyan]--overwrite[/]. It
never replaces anything else in the folder.

[cyan]--resume[/] continues a run that is not Complete. These fields must stay the same: {kept_by_a_run()}.
All others may change, such as processes, resources, epochs, learning rates and limits. For a run that is Complete, it
prints the summary again if nothing has changed.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale run deploy/examples/criteo-dlrm.yaml

  emberscale run job.yaml --set spec.worker.replicas=4 --set spec.training.epochs=2

  emberscale run job.yaml --resume

  emberscale run job.yaml --output json | jq .auc
"""


def run(
    file: ManifestFile,
    overrides: Overrides = None,
    workdir: WorkFolder = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resumes the run in the folder; see above which fields must stay the same.")
    ] = False,
    overwrite: Overwrite = False,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Uses this Redis instead of starting one.")] = None,
    master_port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Port on which the master listens; 0 takes any free port."),
    ] = 0,
    brain: BrainOption = "auto",
    brain_settings: BrainSettings = None,
    brain_token_file: BrainTokenFile = None,
    brain_ca_file: BrainCaFile = None,
    no_picture: Annotated[
        bool, typer.Option("--no-picture", help="Leaves out the picture of the metrics, which takes some seconds.")
    ] = False,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Trains a manifest on this machine."""
    with Interruption() as interruption, bad_input_exits():
        if resume and overwrite:
            raise InvalidError("--resume and --overwrite contradict each other: give one of them")
        job = load_manifest(file, overrides or ())
        root = workdir or default_folder(job)
        training = run_job(
            job,
            root,
            interruption,
            resume=resume,
            overwrite=overwrite,
            redis=redis,
            master_port=master_port,
            brain=choose_brain(job, brain, brain_settings or (), brain_token_file, brain_ca_file),
            picture=not no_picture,
        )
        end(training, interruption, output)


def end(training: Training, interruption: Interruption, output: Output) -> NoReturn:
    """Prints the summary of a run on stdout, and ends the command: with exit code 0 only for a run that is Complete."""
    summary = training.summary
    if output is Output.JSON:
        typer.echo(finite_json(summary.as_document()))
    else:
        open_console(markup=False).print(summary_table(summary, training.folder))
    if interruption.signal is not None and summary.phase not in (RunStatus.COMPLETE, RunStatus.FAILED):
        raise typer.Exit(128 + interruption.signal)
    raise typer.Exit(0 if summary.phase == RunStatus.COMPLETE else 1)
