"""The console to which commands print, and progress bars on it.

rich is imported when something is shown: it would take the fastest commands a tenth of their time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


def open_console(**options: Any) -> "Console":
    """Returns a rich Console with these options, which prints names as they are: rich takes `:100:` for an emoji."""
    from rich.console import Console

    return Console(emoji=False, **options)


@contextmanager
def progress_bar(doing: str, *figures: "ProgressColumn", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Shows progress on stderr, if that is a terminal, until the end of the block; yields rich's `update` of its task.

    `figures` stand behind the bar: how much is done, and how long the rest takes.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(doing, total=total))


@contextmanager
def stages_bar(doing: str, *figures: "ProgressColumn") -> Iterator[Callable[[str, int, int], None]]:
    """As `progress_bar`, for work in stages; yields a function of the stage, the part that is done, and the total."""
    with progress_bar(doing, *figures) as update:
        yield lambda stage, done, total: update(description=stage, completed=done, total=total)
