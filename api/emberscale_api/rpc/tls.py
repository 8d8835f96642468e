"""TLS for gRPC if certificates are mounted, plain sockets otherwise."""

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from emberscale_api.certificates import SERVER_NAME, Certificates

_PROBE_SECONDS = 2.0
_Options = Sequence[tuple[str, Any]]


def bind(server: grpc.Server | grpc.aio.Server, address: str, certificates: Certificates | None) -> int:
    """Binds a server to an address, with TLS if there are certificates, and returns the port."""
    if certificates is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials([(certificates.key, certificates.chain)])
    return server.add_secure_port(address, credentials)


def connect(address: str, authority: bytes | None, options: _Options) -> grpc.Channel:
    """Returns a channel to a server that this authority, in PEM, has certified; without one, a plain channel."""
    if authority is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options=_named(options))


def connect_async(address: str, authority: bytes | None, options: _Options) -> grpc.aio.Channel:
    """`connect` for asyncio."""
    if authority is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=_named(options))


def _named(options: _Options) -> _Options:
    return [*options, ("grpc.ssl_target_name_override", SERVER_NAME)]


def handshake_problem(address: str, authority: bytes | None, setting: str) -> str | None:
    """`handshake_problem_async` for threads without an event loop."""
    return asyncio.run(handshake_problem_async(address, authority, setting))


async def handshake_problem_async(address: str, authority: bytes | None, setting: str) -> str | None:
    """Explains why no connection to `host:port` succeeds, if TLS is the reason; None for any other reason.

    gRPC tells a plain client only that the socket was closed, so this asks the server itself, within 2 s. It takes no
    thread: hundreds of servers may be silent at once. `setting` names the source of the authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=context, server_hostname=SERVER_NAME
            )
    except ssl.SSLCertVerificationError as error:
        return f"{address} presents a certificate that {setting} does not verify: {error.verify_message}"
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None  # it went away meanwhile
    except ssl.SSLError as error:
        return None if authority is None else f"{address} has no TLS, but {setting} asks for it ({error.reason})"
    except (OSError, ValueError):
        return None
    writer.transport.abort()
    return None if authority is not None else f"{address} requires TLS, but {setting} is not set"
