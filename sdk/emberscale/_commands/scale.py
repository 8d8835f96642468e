"""`emberscale scale`: changes the number of processes of a running job."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberscale._commands.options import Namespace, bad_input_exits, paragraphs
from emberscale._run.scaling import resized, scale_run
from emberscale_api.errors import InvalidError
from emberscale_api.job import RoleSpec, TrainingJobSpec

if TYPE_CHECKING:
    from emberscale._client import TrainingJobClient

HELP = paragraphs("""\
Changes the numbers of workers and parameter servers of a running job, while training continues.

JOB is the name or the folder of a run on this machine. If there is no such run, or with [cyan]--namespace[/], JOB is a
TrainingJob on the cluster that KUBECONFIG names.

Workers join and leave between batches. New parameter servers start first, then rows move to their new owners, then
servers without rows end. If new servers do not start within [cyan]spec.scaling.timeout[/], the job gives the change up
and keeps its number of servers. [cyan]emberscale run[/] prints each step with its duration; a TrainingJob has Events.

The numbers permanently replace those in the manifest, and its bounds. A resumed run starts with them, unless the
numbers in its manifest have changed.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale scale criteo-dlrm worker=4 ps=3

  emberscale scale runs/criteo-dlrm ps=1

  emberscale scale criteo-dlrm worker=8 --namespace ads
"""
_ROLES = ("worker", "ps")
_MOST = 1024

JobOrRun = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job, or folder of a run.")]


def scale(
    job: JobOrRun,
    numbers: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=NUMBER...", help="Such as worker=4 ps=3; other roles keep their number."),
    ],
    namespace: Namespace = None,
) -> None:
    """Gives a running job other numbers of processes."""
    with bad_input_exits():
        wanted = read_numbers(numbers)
        folder = None if namespace is not None else folder_of(job)
        if folder is not None:
            before, after = scale_run(folder, lambda spec: resized_within_bounds(spec, wanted))
        else:
            with job_on_cluster(job, namespace) as client:
                before, after = client.scale(job, lambda spec: resized_within_bounds(spec, wanted))
        typer.echo(f"{job}: {describe(before, after)}")


def read_numbers(words: Sequence[str]) -> dict[str, int]:
    """The number of each role that is named. Raises InvalidError."""
    numbers: dict[str, int] = {}
    for word in words:
        role, separator, text = word.partition("=")
        if not separator:
            raise InvalidError(f"{word}: write ROLE=NUMBER, such as worker=4")
        if role not in _ROLES:
            only = "; there is exactly one master" if role == "master" else ""
            raise InvalidError(f"{word}: only {' and '.join(_ROLES)} can be scaled{only}")
        if role in numbers:
            raise InvalidError(f"{word}: {role} is given twice")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST:
            raise InvalidError(f"{word}: the number must be a whole number from 1 to {_MOST}")
        numbers[role] = int(text)
    return numbers


def resized_within_bounds(spec: TrainingJobSpec, numbers: Mapping[str, int]) -> TrainingJobSpec:
    """The spec with these numbers. Raises InvalidError for one out of its bounds, or that no manifest may have."""
    for role, number in numbers.items():
        bounds: RoleSpec = getattr(spec, role)
        least, most = bounds.min_replicas, bounds.max_replicas
        if least is not None and number < least:
            raise InvalidError(f"{role}={number}: spec.{role}.minReplicas is {least}; give {least} or more")
        if most is not None and number > most:
            raise InvalidError(f"{role}={number}: spec.{role}.maxReplicas is {most}; give {most} or fewer")
    return resized(spec, numbers)


def describe(before: TrainingJobSpec, after: TrainingJobSpec) -> str:
    """Describes the change, and its effect."""
    changes = []
    for name, old, new in (("workers", before.worker, after.worker), ("PS", before.ps, after.ps)):
        if old.replicas != new.replicas:
            changes.append(f"{name} {_number(old)} -> {new.replicas}")
    if not changes:
        return "the numbers are unchanged"
    return f"{', '.join(changes)}; training continues meanwhile"


def _number(role: RoleSpec) -> str:
    if role.replicas is not None:
        return str(role.replicas)
    return f"{role.min_replicas or 1}..{role.max_replicas or ''}"


def folder_of(job: str) -> Path | None:
    """Returns the folder of a run on this machine; None if there is none."""
    for folder in (Path(job), Path("runs", job)):
        if (folder / "run.json").exists() or (folder / "next" / "run.json").exists():
            return folder
    if "/" in job:
        raise InvalidError(f"{job}: holds no run; give the folder of a run, or the name of a job")
    return None


def no_run_here(name: str, namespace: str | None) -> str:
    """Returns the beginning of an error of the cluster: that there is no such run, if one was looked for."""
    return "" if namespace is not None else f"runs/{name} holds no run (one elsewhere is named by its folder), and "


@contextmanager
def job_on_cluster(name: str, namespace: str | None) -> Iterator["TrainingJobClient"]:
    """A client for a job that is no run here; what the cluster refuses is an InvalidError with the name of the job."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale._client import ClusterError, JobNotFoundError, TrainingJobClient

    here = f"{name}: {no_run_here(name, namespace)}"
    try:
        yield TrainingJobClient(namespace)
    except JobNotFoundError as error:
        raise InvalidError(f"{here}the cluster has no such job: {error}") from error
    except ClusterError as error:
        raise InvalidError(f"{here}{error}") from error
