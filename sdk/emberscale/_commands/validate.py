"""`emberscale validate`: is a manifest right?"""

import typer

from emberscale._commands.options import ManifestFile, Overrides, bad_input_exits, paragraphs
from emberscale._run.preflight import check_columns, check_data, check_model, stores_without_file_system
from emberscale_api.errors import InvalidError
from emberscale_api.job import load_manifest

HELP = paragraphs("""\
Checks a manifest without starting anything.

Each problem is one line that names the field and says what is allowed there. Exit code [green]0[/] without problems,
[red]2[/] otherwise. Local data files must have the columns that the manifest names; a missing file is a note and no
error, because the manifest may be for another machine. A custom model ([cyan]spec.model.entrypoint[/]) is loaded and
takes a dry step.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale validate deploy/examples/criteo-dlrm.yaml

  emberscale validate job.yaml --set spec.worker.minReplicas=4 --set spec.worker.maxReplicas=2
"""


def validate(file: ManifestFile, overrides: Overrides = None) -> None:
    """Checks a manifest without starting anything."""
    with bad_input_exits():
        job = load_manifest(file, overrides or ())
    try:
        check_data(job)
    except InvalidError as absent:
        for line in str(absent).splitlines():
            typer.echo(f"note: {line}", err=True)
    else:
        with bad_input_exits():
            check_columns(job.spec.data)
    for remark in stores_without_file_system(job):
        typer.echo(f"note: {remark}", err=True)
    with bad_input_exits():
        for remark in check_model(job):
            typer.echo(f"note: {remark}", err=True)
    typer.echo(f"{file}: TrainingJob {job.metadata.name} is valid")
