"""Authorises callers: the holder of the brain's key may make any call, a job's master only calls about its own job."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from emberscale_api.rpc.token import (
    AsyncServerInterceptor,
    CallerVersions,
    JobClaims,
    bearer_token,
    claims_of,
    tokens_match,
)


class CallerCheck(AsyncServerInterceptor):
    """Refuses calls whose token is neither `key` nor signed with it, and calls of a job about anything but itself.

    The check reads the fields `job_uid` and `owner` of the request. A call whose request has no `job_uid` is closed to
    jobs, so calls added later are closed by default.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._versions = CallerVersions()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Passes the call on as far as the token reaches, and answers it with a refusal otherwise."""
        token = bearer_token(handler_call_details)
        claims = claims_of(self._key, token)
        if claims is None and not tokens_match(token, self._key):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token")
        problem = self._versions.problem(handler_call_details)
        if problem is not None:
            return _refusal(grpc.StatusCode.FAILED_PRECONDITION, problem)
        handler = await continuation(handler_call_details)
        return handler if claims is None or handler is None else _scoped(handler, claims)


def _refusal(code: grpc.StatusCode, problem: str) -> Any:
    async def refuse(request: object, context: Any) -> None:
        await context.abort(code, problem)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _scoped(handler: Any, claims: JobClaims) -> Any:
    """The handler behind the check of each request."""

    async def check(request: Any, context: Any) -> None:
        if (problem := problem_of(request, claims)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)

    async def answer(request: Any, context: Any) -> Any:
        await check(request, context)
        return await handler.unary_unary(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(request, context)
        async for message in handler.unary_stream(request, context):
            yield message

    codecs = (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, *codecs)
    return grpc.unary_unary_rpc_method_handler(answer, *codecs)


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
