"""Certificates that a job cannot use. A job with valid ones trains in test_planned_sizes.py."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from certificates import certificate_folder
from emberscale_api.environment import TLS_FOLDER
from local_jobs import Job


def test_certificates_that_are_of_no_use_keep_a_job_from_starting(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_FOLDER, str(certificate_folder(tmp_path / "tls", ended=timedelta(days=2))))
    finished = make_job().run()
    assert finished.code == 2
    assert f"{tmp_path}/tls/tls.crt: is refused" in finished.stderr
    assert "certificate has expired" in finished.stderr
