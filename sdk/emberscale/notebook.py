"""What a person sees in a notebook while a job runs."""

# mypy: allow-untyped-calls
# IPython has no annotations for displays

from io import StringIO

from IPython.display import HTML, DisplayHandle
from rich.console import Console, Group, RenderableType
from rich.text import Text

from emberscale.progress import REDRAW_SECONDS, live_view, remarks
from emberscale_operator.local import Snapshot

_WIDTH = 100


class NotebookProgress:
    """The same lines in the output of a notebook's cell, redrawn in place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle = DisplayHandle()
        self._shown = False
        self._remarks: list[str] = []
        self._before: Snapshot | None = None
        self._next = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Redraws, a few times a second."""
        for remark in remarks(self._before, snapshot):
            self.say(remark)
        self._before = snapshot
        if snapshot.seconds >= self._next:
            self._next = snapshot.seconds + REDRAW_SECONDS
            self._draw(live_view(self._name, snapshot))

    def say(self, remark: str) -> None:
        """A line above the changing ones, from the next redraw on."""
        self._remarks.append(remark)

    def _draw(self, view: RenderableType) -> None:
        html = HTML(as_html(Group(*(Text(remark, style="yellow") for remark in self._remarks), view)))
        if self._shown:
            self._handle.update(html)
        else:
            self._handle.display(html)
            self._shown = True


def as_html(view: RenderableType) -> str:
    """What a terminal would show, as HTML."""
    console = Console(record=True, file=StringIO(), width=_WIDTH, force_terminal=True, force_jupyter=False)
    console.print(view)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>')
