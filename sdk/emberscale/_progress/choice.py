"""Progress where a person sees it: a notebook, a terminal, or a log; on stderr where it is not a notebook."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live

from emberscale._progress.plain import PlainProgress
from emberscale._progress.redrawn import LiveProgress
from emberscale_operator.local import RunView


class ProgressDisplay(Protocol):
    """Shows a job's state, and single remarks."""

    def show(self, snapshot: RunView) -> None:
        """The state as it is now."""

    def say(self, remark: str) -> None:
        """One line that stays."""


@contextmanager
def open_progress(name: str) -> Iterator[ProgressDisplay]:
    """Progress where it is seen: in the notebook's cell, or on stderr."""
    console = Console(stderr=True, highlight=False)
    if console.is_jupyter:
        from emberscale._progress.notebook import NotebookProgress  # IPython is there in notebooks only

        yield NotebookProgress(name)
        return
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveProgress(name, live)
