"""Progress in the output of a notebook's cell."""

# mypy: allow-untyped-calls
# IPython has no annotations for displays

from io import StringIO

from IPython.display import HTML, DisplayHandle
from rich.console import Console, Group, RenderableType
from rich.text import Text

from emberscale._progress.redrawn import RedrawnProgress

_WIDTH = 100


class NotebookProgress(RedrawnProgress):
    """The same lines in the output of a notebook's cell, redrawn in place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._handle = DisplayHandle()
        self._shown = False
        self._remarks: list[str] = []

    def say(self, remark: str) -> None:
        """A line above the changing ones, from the next redraw on."""
        self._remarks.append(remark)

    def draw(self, view: RenderableType) -> None:
        """Replaces what the cell shows."""
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
