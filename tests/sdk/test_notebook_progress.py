"""The progress of a job in a notebook's cell."""

# mypy: allow-untyped-calls
# IPython has few annotations

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from emberscale._progress import NotebookProgress
from emberscale_api.job.running import JobStatus
from emberscale_api.job.status import JobPhase
from emberscale_operator.local.snapshot import RunView


def snapshot(seconds: float, samples: int, suspending: bool = False) -> RunView:
    status = JobStatus(JobPhase.TRAINING, samples=samples, expected_samples=1000, epochs=1)
    return RunView(seconds, status, (), {}, (), suspending)


def test_the_cell_is_redrawn_in_place_and_remarks_stay() -> None:
    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher(parent=shell)
    shell.display_pub = publisher
    try:
        progress = NotebookProgress("mine")
        progress.show(snapshot(1.0, 250))
        progress.show(snapshot(1.01, 260))
        progress.show(snapshot(2.0, 500, suspending=True))
    finally:
        InteractiveShell.clear_instance()
    first, second = publisher.outputs
    assert not first["update"]
    assert second["update"]
    assert first["transient"] == second["transient"]
    assert "25.0%" in first["data"]["text/html"]
    html = second["data"]["text/html"]
    assert html.index("taking a checkpoint") < html.index("50.0%")
    assert html.startswith("<pre")
