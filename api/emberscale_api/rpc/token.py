"""Every call carries the job's token, and a call without it is refused."""

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from emberscale_api.rpc import tls

if TYPE_CHECKING:
    ServerInterceptor = grpc.ServerInterceptor[Any, Any]
    AsyncServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    UnaryInterceptor = grpc.UnaryUnaryClientInterceptor[Any, Any]
    StreamInterceptor = grpc.UnaryStreamClientInterceptor[Any, Any]
else:  # generic in the stubs only
    ServerInterceptor = grpc.ServerInterceptor
    AsyncServerInterceptor = grpc.aio.ServerInterceptor
    UnaryInterceptor = grpc.UnaryUnaryClientInterceptor
    StreamInterceptor = grpc.UnaryStreamClientInterceptor

_METADATA_KEY = "authorization"
_SCHEME = "Bearer "
MAX_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def tokens_match(given: str | bytes, expected: str | bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(_as_bytes(given), _as_bytes(expected))


def _as_bytes(token: str | bytes) -> bytes:
    return token.encode("utf-8") if isinstance(token, str) else token


class TokenCheck(ServerInterceptor):
    """Refuses, with UNAUTHENTICATED, every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._expected = token

        def refuse(request: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token of this job")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Passes a call with the token on, and answers any other itself."""
        if tokens_match(bearer_token(handler_call_details), self._expected):
            return continuation(handler_call_details)
        return self._refusal


def bearer_token(handler_call_details: Any) -> str:
    """The token that a call carries; empty where it carries none."""
    value = dict(handler_call_details.invocation_metadata).get(_METADATA_KEY, "")
    text = value if isinstance(value, str) else ""
    return text.removeprefix(_SCHEME) if text.startswith(_SCHEME) else ""


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _TokenGiver(UnaryInterceptor, StreamInterceptor):
    def __init__(self, token: str) -> None:
        self._entry = (_METADATA_KEY, f"{_SCHEME}{token}")

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._entry],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)


def open_channel(address: str, token: str, authority: bytes | None = None) -> grpc.Channel:
    """A channel whose every call carries the token, to a server that this authority speaks for; a plain one without."""
    return grpc.intercept_channel(tls.connect(address, authority, CHANNEL_OPTIONS), _TokenGiver(token))
