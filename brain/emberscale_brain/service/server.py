"""The brain's gRPC server, on asyncio: a thousand masters may call at once without a thread each.

The holder of the brain's key may make any call; a job's master may make calls only about its own job.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from emberscale_api.certificates import Certificates
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import brain_pb2_grpc, tls
from emberscale_api.rpc.token import (
    CHANNEL_OPTIONS,
    AsyncServerInterceptor,
    CallerVersions,
    JobClaims,
    bearer_token,
    claims_of,
    tokens_match,
)
from emberscale_brain.history.changes import ProfileReported
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.answers import explanation_to, plan_to
from emberscale_brain.service.brain import Brain
from emberscale_brain.service.checks import Refusal
from emberscale_brain.service.requests import (
    MOST_PROFILES,
    MOST_START_UPS,
    MalformedRequestError,
    check_count,
    job_from,
    outcome_from,
    profile_from,
    start_up_from,
    submission_from,
)
from emberscale_brain.service.runtime import UnknownJobError
from emberscale_brain.service.settings import BrainSettings


class CallerCheck(AsyncServerInterceptor):
    """Refuses a token that is neither `key` nor signed with it, and calls of a job about other jobs.

    The check reads the fields `job_uid` and `owner` of the request. A call whose request has no `job_uid` is closed to
    jobs, so calls added later are closed by default.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._versions = CallerVersions()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Passes the call on if its token allows it; else answers with a refusal."""
        token = bearer_token(handler_call_details)
        claims = claims_of(self._key, token)
        if claims is None and not tokens_match(token, self._key):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token")
        problem = self._versions.problem(handler_call_details)
        if problem is not None:
            return _refusal(grpc.StatusCode.FAILED_PRECONDITION, problem)
        handler = await continuation(handler_call_details)
        return None if handler is None else _checked(handler, claims)


def _refusal(code: grpc.StatusCode, problem: str) -> Any:
    """Returns a handler that refuses a call without reading its message."""

    async def refuse(requests: object, context: Any) -> None:
        await context.abort(code, problem)

    return grpc.stream_unary_rpc_method_handler(refuse)


def _checked(handler: Any, claims: JobClaims | None) -> Any:
    """Returns a handler that refuses requests as malformed, or about unknown jobs or those of others."""

    async def answer(request: Any, context: Any) -> Any:
        if claims is not None and (problem := problem_of(request, claims)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        try:
            return await handler.unary_unary(request, context)
        except MalformedRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnknownJobError:
            shown = f"{request.job_uid[:_LONGEST_SHOWN]!r}"  # a longer text would not fit into the trailer
            await context.abort(grpc.StatusCode.NOT_FOUND, f"job {shown} is unknown: submit it first")

    return grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)


def problem_of(request: Any, claims: JobClaims) -> str | None:
    """Explains why a job may not make this call; None if it may."""
    fields = request.DESCRIPTOR.fields_by_name
    if "job_uid" not in fields:
        return "a job's token does not authorize this call, which concerns more than the job"
    if request.job_uid != claims.job_uid:
        return f"the token is that of job {claims.job_uid}, and the call is about another"
    if "owner" in fields and request.owner != claims.owner:
        return f"the token belongs to a job of {claims.owner}, and the request names another owner"
    return None


_DURABLE_SECONDS = 2.0
_LONGEST_SHOWN = 255
_MOST_REQUEST_BYTES = 4 << 20
"""More than the largest request of a master has, which is some hundred profiles of the job."""
_READERS, _COMPARERS = 4, 2

Context = Any  # grpc.aio.ServicerContext, generic in the stubs only


class BrainServicer(brain_pb2_grpc.BrainServicer):
    """One method for each call of `brain.proto`; `CallerCheck` answers for those that raise."""

    def __init__(self, brain: Brain, settings: BrainSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._brain = brain
        self._bounds = settings.bounds.bounds()
        self._clock = brain.clock
        self._loop = loop
        # separate pools: callers that wait for the database must not hold up submissions, which need no database
        self._readers = ThreadPoolExecutor(_READERS, "reader")
        self._comparers = ThreadPoolExecutor(_COMPARERS, "comparer")

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Context) -> pb.SubmitJobReply:
        """Adds a job and returns its plan; INVALID_ARGUMENT for a description that makes no sense."""
        submitted = submission_from(request, self._bounds, self._clock())
        plan, durable = await self._loop.run_in_executor(self._comparers, self._brain.submit, submitted)
        return pb.SubmitJobReply(plan=plan_to(plan), durable=await _known_soon(durable, context))

    async def ReportProfile(self, request: pb.ReportProfileRequest, context: Context) -> pb.ReportProfileReply:
        """Answers once it is known whether the accepted profiles are in the database, or after 2 s."""
        now = self._clock()
        job = job_from(request.job_uid)
        check_count("profiles", request.profiles, MOST_PROFILES)
        check_count("start_ups", request.start_ups, MOST_START_UPS)
        reports: list[ProfileReported] = []
        malformed: list[pb.RefusedProfile] = []
        for message in request.profiles:
            try:
                reports.append(profile_from(job, message))
            except MalformedRequestError as error:
                malformed.append(
                    pb.RefusedProfile(sequence=message.sequence, reason=Refusal.INCONSISTENT.value, message=str(error))
                )
        start_ups = [start_up_from(job, message, now) for message in request.start_ups]
        reported = self._brain.report(job, reports, start_ups)
        self._brain.count_refused(Refusal.INCONSISTENT, len(malformed))
        refused = [
            pb.RefusedProfile(sequence=sequence, reason=problem.reason.value, message=problem.message)
            for sequence, problem in reported.refused
        ]
        refused_start_ups = [
            pb.RefusedStartUp(place=place, reason=problem.reason.value, message=problem.message)
            for place, problem in reported.refused_start_ups
        ]
        return pb.ReportProfileReply(
            accepted=reported.accepted,
            refused=refused + malformed,
            durable=await _known_soon(reported.durable, context),
            refused_start_ups=refused_start_ups,
        )

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.BrainPlan:
        """Returns the plan in force from memory; NOT_FOUND for an unknown job."""
        return plan_to(self._brain.plan(JobId(request.job_uid)))

    async def ExplainPlan(self, request: pb.ExplainPlanRequest, context: Context) -> pb.PlanExplanation:
        """Explains the plan, also that of an ended job while the database keeps it."""
        job = job_from(request.job_uid)
        return explanation_to(await self._loop.run_in_executor(self._readers, self._brain.explain, job))

    async def ReportOutcome(self, request: pb.ReportOutcomeRequest, context: Context) -> pb.ReportOutcomeReply:
        """Ends a job; fields that the caller leaves out keep their last known values."""
        durable = self._brain.end(outcome_from(request, self._clock()))
        return pb.ReportOutcomeReply(durable=await _known_soon(durable, context))


async def _known_soon(durable: Future[bool], context: Context) -> bool:
    """Whether the changes are in the database; False if that takes too long to find out.

    The answer must reach the caller before its deadline, or the call fails although the brain took the changes.
    """
    left = context.time_remaining()
    seconds = _DURABLE_SECONDS if left is None else min(_DURABLE_SECONDS, left / 2)
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(durable)), seconds)
    except TimeoutError:
        return False


async def serve(
    brain: Brain, settings: BrainSettings, token: str, certificates: Certificates | None
) -> tuple[grpc.aio.Server, int]:
    """Starts a server and returns it with its port; no TLS without certificates. Raises OSError for an address in use.

    `token` authorizes every call, and signs the tokens of jobs.
    """
    options = {**dict(CHANNEL_OPTIONS), "grpc.max_receive_message_length": _MOST_REQUEST_BYTES}
    server = grpc.aio.server(interceptors=[CallerCheck(token)], options=tuple(options.items()))
    brain_pb2_grpc.add_BrainServicer_to_server(BrainServicer(brain, settings, asyncio.get_running_loop()), server)
    try:
        port = tls.bind(server, settings.listen, certificates)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {settings.listen}: {error}") from error
    if port == 0:
        raise OSError(f"cannot listen on {settings.listen}")
    await server.start()
    return server, port
