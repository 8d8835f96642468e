"""Folders of certificates, valid or not."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from emberscale_api.certificates import SERVER_NAME, Certificates, read_certificates
from emberscale_operator.kubernetes.certificate import self_signed


def certificate_folder(folder: Path, name: str = SERVER_NAME, ended: timedelta | None = None) -> Path:
    """Makes a folder with a certificate that is its own authority; with `ended`, it expired that long ago."""
    now = datetime.now(UTC)
    pair = self_signed(name=name) if ended is None else self_signed(now - ended - timedelta(days=1), timedelta(days=1))
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_bytes(pair.certificate)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    return folder


def certificates(folder: Path) -> Certificates:
    """Makes a folder of certificates, and returns its content."""
    return read_certificates(certificate_folder(folder))
