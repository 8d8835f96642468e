"""The certificates that a process reads at its start: it refuses, by name, whatever a peer would refuse."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import certificate_folder
from emberscale_api.certificates import client_context, read_certificates
from emberscale_api.environment import TLS_FOLDER, mounted_certificates
from emberscale_api.errors import InvalidError


def refusal(folder: Path) -> str:
    with pytest.raises(InvalidError) as raised:
        read_certificates(folder)
    return str(raised.value)


def test_nothing_is_mounted_by_default() -> None:
    assert mounted_certificates({}) is None


def test_a_sound_folder_is_read(tmp_path: Path) -> None:
    folder = certificate_folder(tmp_path / "tls")
    found = mounted_certificates({TLS_FOLDER: str(folder)})
    assert found is not None
    assert found.chain == (folder / "tls.crt").read_bytes()
    assert found.key.decode() not in repr(found)


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    folder = certificate_folder(tmp_path / "tls")
    (folder / name).unlink()
    with pytest.raises(InvalidError) as raised:
        mounted_certificates({TLS_FOLDER: str(folder)})
    said = str(raised.value)
    assert said.startswith(f"{TLS_FOLDER}: {folder / name}: cannot be read: No such file")
    assert "must hold ca.crt, tls.crt and tls.key" in said


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_that_is_no_pem_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = certificate_folder(tmp_path / "tls")
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith(f"{folder / name}: ")


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder, other = certificate_folder(tmp_path / "tls"), certificate_folder(tmp_path / "other")
    shutil.copy(other / "tls.key", folder)
    assert refusal(folder).startswith(f"{folder / 'tls.key'}: does not match {folder / 'tls.crt'}")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    folder = certificate_folder(tmp_path / "tls")
    key = serialization.load_pem_private_key((folder / "tls.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "tls.key").write_bytes(locked)
    assert "is not unencrypted PEM" in refusal(folder)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    folder = certificate_folder(tmp_path / "tls", ended=timedelta(days=2))
    said = refusal(folder)
    assert said.startswith(f"{folder / 'tls.crt'}: is refused under {folder / 'ca.crt'}: certificate has expired")
    assert "reissue it from that" in said


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    said = refusal(certificate_folder(tmp_path / "tls", name="ps-0.example"))
    assert "not valid for 'emberscale'; reissue it" in said


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    folder, other = certificate_folder(tmp_path / "tls"), certificate_folder(tmp_path / "other")
    shutil.copy(other / "ca.crt", folder)
    assert "self-signed certificate" in refusal(folder)


def test_an_authority_that_is_no_certificate_is_refused_under_the_name_of_its_source() -> None:
    with pytest.raises(InvalidError, match=r"^--brain-ca-file x: contains no PEM"):
        client_context(b"not PEM", "--brain-ca-file x")


@pytest.mark.parametrize(
    "module", ["emberscale_jobmaster", "emberscale_trainer.server", "emberscale_trainer.worker", "emberscale_brain"]
)
def test_a_process_with_certificates_that_are_of_no_use_ends_with_that_line(tmp_path: Path, module: str) -> None:
    folder = certificate_folder(tmp_path / "tls", ended=timedelta(days=2))
    token = tmp_path / "token"
    token.write_text("secret")
    identity = {
        "JOB_NAME": "job",
        "JOB_UID": "uid",
        "ROLE": "ps",
        "INCARNATION": "1",
        "MASTER_ADDRESS": "127.0.0.1:1",
        "TOKEN_FILE": str(token),
        "TLS_FOLDER": str(folder),
    }
    variables = {f"EMBERSCALE_{name}": value for name, value in identity.items()}
    done = subprocess.run(
        [sys.executable, "-m", module], env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"{TLS_FOLDER}: {folder / 'tls.crt'}: is refused" in line
