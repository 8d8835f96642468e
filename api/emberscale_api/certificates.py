"""The certificates of a process: those that its servers present, and the authority that its clients trust.

The folder that EMBERSCALE_TLS_FOLDER names has the layout of a kubernetes.io/tls Secret, as cert-manager writes it.
Every server of the process, gRPC and data plane, presents `tls.crt` and `tls.key`; every client verifies servers with
`ca.crt`. The process reads them once, at startup.

All certificates carry the same name, SERVER_NAME, and clients verify that name whatever the address. The addresses of
servers (pods, port-forwards, loopback) are unknown when a certificate is made, and TLS need not tell a job's processes
apart: they share one key. The authority proves that a server belongs to the job; the token proves who calls it.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from emberscale_api.errors import InvalidError

SERVER_NAME = "emberscale"
AUTHORITY_FILE, CHAIN_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True, eq=False)
class Certificates:
    """PEM texts for gRPC, and the same as contexts for sockets, which use TLS 1.3 only."""

    authority: bytes = field(repr=False)
    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext


def read_certificates(folder: Path) -> Certificates:
    """Reads the certificates in a folder, and tests them with a handshake. Raises InvalidError."""
    authority, chain, key = (_read(folder, name) for name in (AUTHORITY_FILE, CHAIN_FILE, KEY_FILE))
    client = client_context(authority, str(folder / AUTHORITY_FILE))
    client_context(chain, str(folder / CHAIN_FILE))  # names the file that is not PEM
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        # without a password, OpenSSL would ask the terminal for that of a key which has one
        server.load_cert_chain(folder / CHAIN_FILE, folder / KEY_FILE, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidError(
            f"{folder / KEY_FILE}: does not match {folder / CHAIN_FILE}, or is not unencrypted PEM: {error}"
        ) from error
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise InvalidError(
            f"{folder / CHAIN_FILE}: is refused under {folder / AUTHORITY_FILE}: {error.verify_message.rstrip('.')}; "
            f"reissue it from that authority and for the DNS name {SERVER_NAME}"
        ) from error
    return Certificates(authority, chain, key, server, client)


def client_context(authority: bytes, source: str) -> ssl.SSLContext:
    """Returns a context that trusts only this authority; `source` names it in the InvalidError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidError(f"{source}: contains no PEM certificate: {error}") from error
    return context


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise InvalidError(
            f"{folder / name}: cannot be read: {error.strerror}; the folder must hold {AUTHORITY_FILE}, {CHAIN_FILE} "
            f"and {KEY_FILE}"
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Performs a handshake in memory, to refuse what a peer would refuse, with the same message."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        ends = [end for end in ends if not _is_done(end)]


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
