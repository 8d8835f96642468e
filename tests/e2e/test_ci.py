"""`.ci/run`, with stand-ins for make and the cluster."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eventually import eventually

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKE = """\
#!/bin/bash
echo "made $1"
case $1 in
  install) exit ${INSTALL:-0} ;;
  test) exit ${TEST:-0} ;;
  test-s3) exit ${S3:-0} ;;
esac
"""
CLUSTER = """\
#!/bin/bash
[ "${1:-}" != --images ] || exit ${IMAGES:-0}
trap 'sleep 0.5; touch down' EXIT
echo "tested on a cluster"
touch up
[ -z "${HANGS:-}" ] || tail --pid=$PPID --follow /dev/null
exit ${CLUSTER:-0}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in {"bin/make": MAKE, "tests/kubernetes/cluster.sh": CLUSTER}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    return tmp_path


@contextmanager
def running(checkout: Path, **ends: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **ends, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.Popen([checkout / ".ci" / "run"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({}, 0),
        ({"TEST": "2"}, 1),
        ({"CLUSTER": "1"}, 1),
        ({"S3": "2"}, 1),
        ({"CLUSTER": "77"}, 0),
        ({"IMAGES": "1"}, 0),
    ],
)
def test_each_part_runs_and_any_failure_counts(checkout: Path, ends: dict[str, str], code: int) -> None:
    with running(checkout, **ends) as run:
        told, _ = run.communicate(timeout=60)
    assert run.returncode == code
    assert set(told.splitlines()) == {"made install", "made test", "tested on a cluster", "made test-s3"}


def test_nothing_is_tested_without_an_installation(checkout: Path) -> None:
    with running(checkout, INSTALL="2") as run:
        told, _ = run.communicate(timeout=60)
    assert (run.returncode, told) == (2, "made install\n")


def test_an_interrupted_run_ends_after_its_clusters(checkout: Path) -> None:
    with running(checkout, HANGS="yes") as run:
        eventually((checkout / "up").exists)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == -signal.SIGTERM
        assert (checkout / "down").exists()
