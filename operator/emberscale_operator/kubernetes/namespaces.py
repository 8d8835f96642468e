"""The watched namespaces that the operator may list: one that it may not list blocks the watches of all others."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import structlog

from emberscale_operator.kubernetes.census import POD, TRAINING_JOB
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, path_of

_LOOK_SECONDS = 10.0
_log = structlog.get_logger()


async def _closed(client: ApiClient, namespaces: Iterable[str]) -> dict[str, str]:
    """Returns the namespaces whose jobs or pods cannot be listed, with the reasons."""
    closed = {}
    for namespace in namespaces:
        try:
            for kind in (TRAINING_JOB, POD):
                await client.get(path_of(kind.api_version, kind.plural, namespace), limit="1")
        except ApiError as error:
            closed[namespace] = str(error)
    return closed


async def readable_namespaces(client: ApiClient, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Returns the namespaces whose jobs and pods can be listed. Raises ApiUnavailableError if none can.

    kopf calls no handler before it has listed all of them, and ends if one stays forbidden. Once a namespace that was
    left out can be listed again and has jobs, the census takes its watch for dead: the operator then starts anew.
    """
    closed = await _closed(client, namespaces)
    for namespace, problem in closed.items():
        _log.warning("namespace_left_out", namespace=namespace, problem=problem, consequence="its jobs are not managed")
    if namespaces and len(closed) == len(namespaces):
        raise ApiUnavailableError(closed[namespaces[-1]])
    return tuple(namespace for namespace in namespaces if namespace not in closed)


async def await_closing(client: ApiClient, readable: Awaitable[Sequence[str]], pause: float = _LOOK_SECONDS) -> None:
    """Returns once two looks in a row, `pause` seconds apart, find that a `readable` namespace cannot be listed.

    kopf would end within a minute, and its watches of all other namespaces hang: the operator starts anew before that.
    Never returns if the operator watches all namespaces.
    """
    namespaces = await readable
    before: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(pause)
        try:
            closed = await _closed(client, namespaces)
        except ApiUnavailableError:
            continue
        for namespace in before & closed.keys():
            problem, consequence = closed[namespace], "the operator starts anew without it"
            _log.warning("namespace_closed", namespace=namespace, problem=problem, consequence=consequence)
            return
        before = frozenset(closed)
