"""Tells the brain which jobs are gone, so that it gives their cores and memory to others.

A master that is stopped does not know whether its job was deleted, or another master follows. Only the operator knows.
Nor does a master know that its job has failed because too many pods died.
"""

import asyncio
from contextlib import suppress

import grpc.aio
import structlog

from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import tls
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.token import CHANNEL_OPTIONS, call_metadata
from emberscale_operator.kubernetes.pod_state import GRACE_SECONDS

_CALL_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_MASTERS_END_SECONDS = 2 * GRACE_SECONDS
"""The time after a job's deletion in which its last master may still run, and submit the job to the brain again."""
_SILENCE_SECONDS = 1800.0
"""The time after which the brain ends the claim of a silent job by itself, by default."""
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAUTHENTICATED)
_log = structlog.get_logger()


class BrainClaims:
    """What the brain counts for jobs that are gone; `key` opens every call, `authority` (PEM) is empty without TLS.

    Nothing waits for the brain or fails without it.
    """

    def __init__(self, address: str, key: str, authority: str = "", look: float = _LOOK_SECONDS) -> None:
        self._channel = tls.connect_async(address, authority.encode() or None, CHANNEL_OPTIONS)
        self._stub = BrainStub(self._channel)
        self._metadata = call_metadata(key)
        self._look = look
        self._gone: dict[str, float] = {}
        self._news = asyncio.Event()
        self._problem = ""

    def release(self, job_uid: str) -> None:
        """Requests the end of the claim of a job that is gone."""
        self._gone[job_uid] = asyncio.get_running_loop().time() + _MASTERS_END_SECONDS
        self._news.set()

    async def keep(self) -> None:
        """Ends the claims of jobs that are gone, for ever; again for a job that its last master submits meanwhile."""
        while True:
            self._news.clear()
            try:
                await self._end_claims()
                self._problem = ""
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
                if problem != self._problem:
                    _log.warning("brain_claims_not_ended", jobs=len(self._gone), problem=problem)
                self._problem = problem
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look if self._gone else None):
                    await self._news.wait()

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close(None)

    async def _end_claims(self) -> None:
        for job_uid, until in tuple(self._gone.items()):
            # the phase that says least: the job has neither succeeded nor failed
            request = pb.ReportOutcomeRequest(job_uid=job_uid, phase=JobPhase.SUSPENDED.value)
            try:
                await self._stub.ReportOutcome(request, timeout=_CALL_SECONDS, metadata=self._metadata)
                _log.info("brain_claim_ended", job_uid=job_uid)
            except grpc.aio.AioRpcError as error:
                if error.code() in _AWAY:
                    self._forget(job_uid, until + _SILENCE_SECONDS)
                    raise
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    _log.warning("brain_claim_not_ended", job_uid=job_uid, problem=error.details())
            self._forget(job_uid, until)

    def _forget(self, job_uid: str, until: float) -> None:
        """Forgets a job after that time, unless it was released again meanwhile."""
        if max(until, self._gone.get(job_uid, 0.0)) <= asyncio.get_running_loop().time():
            self._gone.pop(job_uid, None)
