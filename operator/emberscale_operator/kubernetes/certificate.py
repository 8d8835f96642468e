"""The certificate of a job: its own authority, so that no other job's processes can pass for those of this one."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from emberscale_api.certificates import SERVER_NAME

LIFETIME = timedelta(days=3650)
"""A job keeps its certificate until it is deleted, so the certificate must never need a renewal."""
_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True)
class CertificatePair:
    """A certificate and its key, each as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def self_signed(
    now: datetime | None = None, lifetime: timedelta = LIFETIME, name: str = SERVER_NAME
) -> CertificatePair:
    """A server's certificate for the DNS name `name`, signed by its own key, which is new (P-256)."""
    begin = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _CLOCK_SKEW)
        .not_valid_after(begin + lifetime)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificatePair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
