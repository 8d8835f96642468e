"""`emberscale drain`: moves all rows off a parameter server, and replaces it."""

from typing import Annotated

import typer

from emberscale._commands.options import Namespace, bad_input_exits, paragraphs
from emberscale._commands.scale import JobOrRun, folder_of, job_on_cluster
from emberscale_api.errors import InvalidError
from emberscale_api.job.status import TrainingJobStatus

HELP = paragraphs("""\
Moves all rows off one parameter server of a running job and replaces the server, while training continues.

JOB is the name or the folder of a run on this machine. If there is no such run, or with [cyan]--namespace[/], JOB is a
TrainingJob on the cluster that KUBECONFIG names. SERVER is the name of a parameter server, such as [cyan]ps-1[/].

The server's rows move to the other servers; if there is no other, a temporary one starts and holds them. Then the
server ends, a new process starts in its place, and its share of the rows moves back. Nothing rolls back, and no sample
counts twice. [cyan]emberscale run[/] prints each step with its duration; a TrainingJob has Events
([cyan]PlannedDrain[/], [cyan]DrainedServer[/], [cyan]ReplacedServer[/]).

On a cluster this is an eviction, as by [cyan]kubectl drain[/]. If the rows have not moved within the pod's grace
period ([cyan]emberscale explain[/] shows it), the pod is killed and the job rolls back to its last checkpoint. The new
pod may land on the same node; to empty a node, cordon it first.

Rows move only while the job trains or evaluates; the command waits up to ten minutes for a TrainingJob to get there. It
refuses to drain if no server can take the rows: while the other servers leave or start, and on a cluster while another
server is away.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale drain criteo-dlrm ps-1

  emberscale drain criteo-dlrm ps-0 --namespace ads
"""


def drain(
    job: JobOrRun,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="The parameter server to empty, such as ps-1.")],
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
    """Prints on stderr what a drain waits for, whenever that changes."""

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
