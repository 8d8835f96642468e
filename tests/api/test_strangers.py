"""Calls of strangers, from whom anything may come: no NetworkPolicy need keep them away."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from emberscale_api.rpc import token as token_module
from emberscale_api.rpc.token import TokenCheck, open_channel

LIMIT = 1 << 20
"""A server that read a longer message would refuse it for its length."""


@pytest.mark.parametrize(
    ("shown", "spoken", "refusal"),
    [
        ("a guess", "", grpc.StatusCode.UNAUTHENTICATED),
        ("secret", "", grpc.StatusCode.PERMISSION_DENIED),
        ("secret", "99/99.1", grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_the_message_of_a_refused_call_is_never_read(
    shown: str, spoken: str, refusal: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call may carry 256 MiB: a few of them, held until they are refused, would end a process at its limit."""
    check = TokenCheck("secret", "operators", steering=() if spoken else ("Scale",))
    options = (("grpc.max_receive_message_length", LIMIT),)
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[check], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setattr(token_module, "spoken_version", lambda: spoken)
    try:
        with open_channel(f"127.0.0.1:{port}", shown) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/test.Master/Scale", bytes, bytes)(bytes(16 * LIMIT), timeout=60)
    finally:
        server.stop(None)
    assert refused.value.code() is refusal
