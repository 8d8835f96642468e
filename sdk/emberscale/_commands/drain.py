"""`emberscale drain`: a parameter server gives its rows away, and another takes its place."""

from typing import Annotated

import typer

from emberscale._commands.cluster import Namespace
from emberscale._commands.options import bad_input_exits, paragraphs
from emberscale._commands.scale import JobOrRun, folder_of, job_on_cluster
from emberscale_api.errors import InvalidError
from emberscale_api.job.status import TrainingJobStatus

HELP = paragraphs("""\
Empties one parameter server of a running job, while training continues, and has it replaced.

JOB is a run on this machine, by its name or its folder; where there is none, or with [cyan]--namespace[/], a
TrainingJob on the cluster that KUBECONFIG names. SERVER is such as [cyan]ps-1[/]; [cyan]emberscale status[/] lists
those of a TrainingJob.

The server's rows move to the other servers; for the only one, another is started that holds them meanwhile. Then it
ends, another process starts in its place, and gets its share of the rows back. Nothing rolls back, and no sample counts
twice. Each step is told with its duration: by [cyan]emberscale run[/], or as Events of the TrainingJob
([cyan]PlannedDrain[/], [cyan]DrainedServer[/], [cyan]ReplacedServer[/]).

On a cluster this is an eviction, as by [cyan]kubectl drain[/]: the pod is killed where its rows have not moved within
its grace period ([cyan]emberscale explain[/] shows it), and the job then goes back to its last checkpoint. The next
pod may come to the same node; cordon that first if it is to be emptied.

Rows move while the job trains or evaluates. The command waits up to ten minutes for a TrainingJob that has yet to
train. Refused where nobody can take the rows over: while the others leave or have yet to start, and on a cluster while
another one is away.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale drain criteo-dlrm ps-1

  emberscale drain criteo-dlrm ps-0 --namespace ads
"""


def drain(
    job: JobOrRun,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="Such as ps-1.")],
    namespace: Namespace = None,
) -> None:
    """Empties a parameter server and has it replaced."""
    with bad_input_exits():
        index = read_server(server)
        folder = None if namespace is not None else folder_of(job)
        if folder is not None:
            from emberscale._run.draining import drain_run

            drain_run(folder, index)
            told = ""
        else:
            with job_on_cluster(job, namespace) as client:
                told = f" (pod {client.drain(job, index, observer=_Waiting(job, server))})"
        typer.echo(f"{job}: {server}{told} gives its rows away and is replaced; training continues meanwhile")


class _Waiting:
    """Tells on stderr what a drain waits for, whenever that changes."""

    def __init__(self, job: str, server: str) -> None:
        self._job, self._server = job, server
        self._told = ""

    def __call__(self, status: TrainingJobStatus) -> None:
        text = f"{self._server} is drained once {self._job} trains; it is {status.phase}: {status.message}"
        if text != self._told:
            self._told = text
            typer.echo(text, err=True)


def read_server(text: str) -> int:
    """The index of a parameter server. Raises InvalidError."""
    role, _, number = text.partition("-")
    if role in ("worker", "master"):
        raise InvalidError(f"{text}: only parameter servers hold rows; name one, such as ps-1")
    if role != "ps" or not number.isascii() or not number.isdigit() or str(int(number)) != number:
        raise InvalidError(f"{text}: write the name of a parameter server, such as ps-1")
    return int(number)
