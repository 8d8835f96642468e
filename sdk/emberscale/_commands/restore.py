"""`emberscale checkpoints restore`: starts a job from a checkpoint of another job."""

import json
from typing import Annotated

import typer
import yaml

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
from emberscale._commands.run import end
from emberscale._run.brain_choice import BrainOption, choose_brain
from emberscale._run.checkpoints import check_initial
from emberscale._run.interruption import Interruption
from emberscale._run.record import located
from emberscale._training import default_folder, run_job
from emberscale_api.errors import InvalidError
from emberscale_api.job import DataContinuation, apply_overrides, load_manifest

HELP = paragraphs("""\
Starts a job on this machine with the model and the optimizer state of another job's checkpoint. It is
[cyan]emberscale run[/] of the manifest with [cyan]spec.checkpoint.initialFrom[/] and [cyan]spec.data.continuation[/]
set; [cyan]--print[/] prints that manifest instead, for a cluster.

[bold]Fresh[/] trains all data of the manifest. [bold]Append[/] trains the files that the checkpoint has not trained.
[bold]Resume[/] trains the rest of the same data. To continue the new run after an interruption, give the printed
manifest to [cyan]emberscale run --resume[/].

PLACE is the folder of a run, the URI of a job's checkpoints, or the folder of one checkpoint there. The model, the
columns and the types of the optimizers must be those of the checkpoint; with [bold]Resume[/], so must the data and its
batches. Everything else may differ, such as the numbers of processes and the learning rates.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale checkpoints restore runs/january february.yaml --continuation Append

  emberscale checkpoints restore s3://bucket/checkpoints/criteo-dlrm fine-tuning.yaml --id 00000007

  emberscale checkpoints restore s3://bucket/checkpoints/january february.yaml --print | kubectl apply -f -
"""


class _QuotingDumper(yaml.SafeDumper):
    """Quotes text of digits: YAML 1.1 takes 00000008 for text, and kubectl for a number."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text.isdigit() else None)


_QuotingDumper.add_representer(str, _text)


def restore(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="Folder of a run, URI of checkpoints, or folder of one checkpoint.")
    ],
    file: ManifestFile,
    identifier: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Id of the checkpoint. [dim]default: the newest that can be restored[/]"
        ),
    ] = None,
    continuation: Annotated[
        DataContinuation | None, typer.Option(help="Data to train. [dim]default: as in the manifest, else Fresh[/]")
    ] = None,
    overrides: Overrides = None,
    workdir: WorkFolder = None,
    overwrite: Overwrite = False,
    printed: Annotated[
        bool, typer.Option("--print", help="Checks the checkpoint and prints the manifest, but starts nothing.")
    ] = False,
    brain: BrainOption = "auto",
    output: OutputFormat = Output.TEXT,
) -> None:
    """Starts a job from a checkpoint of another job."""
    with Interruption() as interruption, bad_input_exits():
        changes = [*(overrides or ()), *_fields(place, identifier, continuation)]
        job = load_manifest(file, changes)
        if printed:
            check_initial(job)
            document = apply_overrides(yaml.safe_load(file.read_text(encoding="utf-8")), changes)
            typer.echo(yaml.dump(document, Dumper=_QuotingDumper, sort_keys=False), nl=False)
            return
        training = run_job(
            job,
            workdir or default_folder(job),
            interruption,
            overwrite=overwrite,
            brain=choose_brain(job, brain, (), None),
        )
        end(training, interruption, output)


def _fields(place: str, identifier: str | None, continuation: DataContinuation | None) -> list[str]:
    """The fields of the manifest that say where the job starts, as overrides."""
    uri, chosen = located(place)
    if chosen and identifier not in (None, chosen):
        raise InvalidError(f"--id: {identifier}: PLACE is checkpoint {chosen}; leave --id out, or name its folder")
    initial = {"uri": uri} | ({"id": identifier or chosen} if identifier or chosen else {})
    continues = [] if continuation is None else [f"spec.data.continuation={continuation}"]
    return [f"spec.checkpoint.initialFrom={json.dumps(initial)}", *continues]
