"""Folders of certificates, good ones and others."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from emberscale_api.certificates import SERVER_NAME, Certificates, read_certificates
from emberscale_operator.kubernetes.certificate import self_signed


def certificate_folder(folder: Path, name: str = SERVER_NAME, ended: timedelta | None = None) -> Path:
    """A folder, made here, with a certificate that is its own authority; with `ended` one that expired so long ago."""
    now = datetime.now(UTC)
    pair = self_signed(name=name) if ended is None else self_signed(now - ended - timedelta(days=1), timedelta(days=1))
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_bytes(pair.certificate)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    return folder


def certificates(folder: Path) -> Certificates:
    """Certificates of a folder that is made for them."""
    return read_certificates(certificate_folder(folder))
