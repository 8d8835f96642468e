"""The console to which commands print."""

from functools import partial

from rich.console import Console

open_console = partial(Console, emoji=False)
"""Takes the arguments of a rich Console, which prints names as they are: rich takes `:100:` in them for an emoji."""
