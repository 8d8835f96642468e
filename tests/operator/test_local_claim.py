"""What a brain of several jobs counts for a run that was cut short."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.kubernetes.test_claims import claimed, submit
from tests.operator.test_local_job import Commands, Watch, training

from brain_process import BrainProcess
from emberscale_api.job import TrainingJob
from emberscale_operator.local.brain import BrainAddress, end_claim
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.runner import LocalJob

TOKEN = "the-token"


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[BrainProcess]:
    (tmp_path / "token").write_text(TOKEN)
    settings = (f"database=sqlite:///{tmp_path / 'brain.db'}", "cluster.cpu=8")
    brain = BrainProcess(tmp_path / "token", tmp_path / "brain.log", settings)
    yield brain
    brain.stop()


def test_the_cores_of_a_run_that_is_stopped_at_once_are_free(
    brain: BrainProcess, job: TrainingJob, stand_ins: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    for uid in ("stopped", "there"):  # the stand-in for the master does not do it
        submit(brain, uid)
    address = BrainAddress(brain.address, TOKEN)
    local = LocalJob(job, "stopped", RunFolder(tmp_path / "run"), commands=stand_ins, brain=address)
    with local:
        assert local.run(Watch(training, lambda _: local.kill())).phase is None
    assert claimed(brain, "stopped", "there") == {"there"}


async def test_a_brain_that_does_not_answer_is_not_waited_for_long() -> None:
    """The test itself may take two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = BrainAddress(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN)
        await end_claim(address, "a-job")
    await end_claim(address, "a-job")


async def test_a_job_that_the_brain_does_not_know_is_no_problem(brain: BrainProcess) -> None:
    await end_claim(BrainAddress(brain.address, TOKEN), "a-job")
