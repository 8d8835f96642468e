"""The `emberscale` command."""

import typer

from emberscale.commands.run import run

app = typer.Typer(
    name="emberscale",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help="Trains deep-learning recommendation models on parameter servers.",
)
app.command()(run)


@app.callback()
def about() -> None:
    """Trains deep-learning recommendation models on parameter servers."""


def main() -> None:
    """The entry point of the console script."""
    app()
