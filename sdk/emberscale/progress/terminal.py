"""Progress at the bottom of a terminal."""

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from emberscale.progress.redrawn import RedrawnProgress


class LiveProgress(RedrawnProgress):
    """At the bottom of the terminal; remarks scroll above."""

    def __init__(self, name: str, live: Live) -> None:
        super().__init__(name)
        self._live = live

    def say(self, remark: str) -> None:
        """A line above the live ones."""
        self._live.console.print(Text(remark, style="yellow"))

    def draw(self, view: RenderableType) -> None:
        """Redraws the live lines."""
        self._live.update(view, refresh=True)
