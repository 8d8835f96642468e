"""Every call carries a token and its sender's version; a call without the token is refused.

A job's master shows a token to the brain, which names the job and is signed with the brain's key.

The operator and the brain share the key; its holder may act for all jobs. A job's token opens only the calls about
this job. No register of tokens is needed, since a token is useless once its job is gone.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
import structlog

from emberscale_api.compatibility import VERSION, spoken_version, version_problem
from emberscale_api.rpc import tls

if TYPE_CHECKING:
    ServerInterceptor = grpc.ServerInterceptor[Any, Any]
    AsyncServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    UnaryInterceptor = grpc.UnaryUnaryClientInterceptor[Any, Any]
    StreamInterceptor = grpc.UnaryStreamClientInterceptor[Any, Any]
else:  # generic only in the stubs
    ServerInterceptor = grpc.ServerInterceptor
    AsyncServerInterceptor = grpc.aio.ServerInterceptor
    UnaryInterceptor = grpc.UnaryUnaryClientInterceptor
    StreamInterceptor = grpc.UnaryStreamClientInterceptor


_PREFIX = "job."


@dataclass(frozen=True)
class JobClaims:
    """The job for which the holder of a token acts. `owner` is the namespace whose quota pays for it."""

    job_uid: str
    owner: str


def job_token(key: str, claims: JobClaims) -> str:
    """Returns the token of a job, in ASCII: `job.<claims in base64url>.<HMAC-SHA256 in hex>`."""
    document = json.dumps({"job_uid": claims.job_uid, "owner": claims.owner}, separators=(",", ":"))
    body = base64.urlsafe_b64encode(document.encode()).decode("ascii")
    return f"{_PREFIX}{body}.{_signature(key, body)}"


def claims_of(key: str, token: str) -> JobClaims | None:
    """Returns the claims of a token that this key signed; None for any other text. Compares in constant time."""
    if not token.startswith(_PREFIX):
        return None
    body, _, signature = token.removeprefix(_PREFIX).partition(".")
    if not hmac.compare_digest(signature.encode(), _signature(key, body).encode()):
        return None
    document = json.loads(base64.urlsafe_b64decode(body))
    return JobClaims(document["job_uid"], document["owner"])


def _signature(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()


_METADATA_KEY = "authorization"
_VERSION_KEY = "emberscale-version"
_SCHEME = "Bearer "
MAX_MESSAGE_BYTES = 256 << 20
# A peer behind a partition closes no connection: TCP would wait for minutes, and as long again after the partition.
_NOTICES_DEAD_PEERS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # the least time for an attempt to connect; TCP, TLS and HTTP/2 take four round trips
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *_NOTICES_DEAD_PEERS,
)


_log = structlog.get_logger()


def tokens_match(given: str, expected: str) -> bool:
    """Compares two tokens in constant time."""
    return hmac.compare_digest(given.encode("utf-8"), expected.encode("utf-8"))


class TokenCheck(ServerInterceptor):
    """Refuses calls without the token (UNAUTHENTICATED), and from incompatible versions (FAILED_PRECONDITION).

    With an `operator_token`, which opens every call, `token` does not open the calls named in `steering`, such as
    `Scale` (PERMISSION_DENIED).
    """

    def __init__(self, token: str, operator_token: str = "", steering: Collection[str] = ()) -> None:
        self._expected = token
        self._operator = operator_token
        self._steering = frozenset(steering) if operator_token else frozenset[str]()
        self._versions = CallerVersions()

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Passes calls with the right token on, and answers all others itself."""
        given = bearer_token(handler_call_details)
        steers = bool(self._operator) and tokens_match(given, self._operator)
        if not steers and not tokens_match(given, self._expected):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token of this job")
        method = handler_call_details.method.rpartition("/")[2]
        if not steers and method in self._steering:
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, f"only the operator may call {method}")
        problem = self._versions.problem(handler_call_details)
        if problem is not None:
            return _refusal(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return continuation(handler_call_details)


def _refusal(code: grpc.StatusCode, problem: str) -> Any:
    """Returns a handler that refuses a call without reading its message, which may fill the memory of the process."""

    def refuse(requests: object, context: grpc.ServicerContext) -> None:
        context.abort(code, problem)

    return grpc.stream_unary_rpc_method_handler(refuse)


_MOST_VERSIONS = 16
_LONGEST_SHOWN = 64


class CallerVersions:
    """The versions of callers; the first few that differ from this process's are logged, each once.

    Whoever has a token can name any number of them.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def problem(self, handler_call_details: Any) -> str | None:
        """Explains why the caller's version is incompatible with this one; None if they work together."""
        spoken = str(dict(handler_call_details.invocation_metadata).get(_VERSION_KEY, ""))
        problem = version_problem(spoken)
        shown = spoken[:_LONGEST_SHOWN]
        if spoken not in ("", spoken_version()) and shown not in self._told and len(self._told) < _MOST_VERSIONS:
            self._told.add(shown)
            _log.info("version_mismatch", caller_version=shown, own_version=VERSION, refused=problem is not None)
        return problem


def bearer_token(handler_call_details: Any) -> str:
    """Returns the token that a call carries; empty if it carries none."""
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


def call_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call."""
    return (_METADATA_KEY, f"{_SCHEME}{token}"), (_VERSION_KEY, spoken_version())


class _TokenGiver(UnaryInterceptor, StreamInterceptor):
    def __init__(self, token: str) -> None:
        self._entries = call_metadata(token)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), *self._entries],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)


def open_channel(address: str, token: str, authority: bytes | None = None) -> grpc.Channel:
    """Opens a channel whose calls carry the token; with an authority, over TLS to a server that it certifies."""
    return grpc.intercept_channel(tls.connect(address, authority, CHANNEL_OPTIONS), _TokenGiver(token))
