"""`emberscale compare`: shows how runs differ."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console
from emberscale._reports.comparison import FIGURES, Figure, differing_fields, figures_of, labels_of, read_run
from emberscale._run.preflight import ensure_drawable
from emberscale._run.summary import finite_json
from emberscale_api.errors import InvalidError
from emberscale_api.readable import bytes_text

HELP = paragraphs("""\
Shows how runs differ: in the fields of their manifests, and in their results: AUC, log loss, normalised entropy,
calibration, samples per second, time, memory and restarts. Differences are relative to the first run.

Also plots the loss, AUC and throughput of all runs in one picture, by samples and by time.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale compare runs/criteo-dlrm runs/wider

  emberscale compare runs/* --plot all.png --output json | jq .figures.auc
"""
_SHOWN_CHARACTERS = 48


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs that have ended, two or more.")
    ],
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Picture to write (.png, .svg or .pdf).")] = Path(
        "comparison.png"
    ),
    output: OutputFormat = Output.TEXT,
) -> None:
    """Shows how runs differ, and plots them together."""
    with bad_input_exits():
        if len(runs) < 2:
            raise InvalidError("RUN RUN...: name at least two runs to compare")
        if len({root.resolve() for root in runs}) < len(runs):
            raise InvalidError("RUN RUN...: a run is named twice")
        ensure_drawable(plot)
        finished = [read_run(root) for root in runs]
    # matplotlib takes a second to import, which only this moment should cost
    from emberscale._reports.pictures import draw_comparison

    labels = labels_of(finished)
    draw_comparison(finished, labels, plot)
    figures = figures_of(finished)
    if output is Output.JSON:
        fields = differing_fields([run.manifest for run in finished])
        named = [{"path": str(run.paths.root), "name": run.name, "phase": run.summary["phase"]} for run in finished]
        typer.echo(finite_json({"runs": named, "manifest": fields, "figures": figures, "plot": str(plot)}))
        return
    fields = differing_fields([run.in_words for run in finished])
    console = open_console()
    console.print(_manifest_table(labels, fields) if fields else "The manifests are the same.")
    console.print(_figures_table(labels, figures))
    console.print(f"picture: {plot}")


def _manifest_table(labels: Sequence[str], fields: dict[str, list[Any]]) -> Table:
    table = Table("manifest", *labels, title="Manifests", title_justify="left")
    for field, values in fields.items():
        table.add_row(field, *(_shown(value) for value in values))
    return table


def _shown(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _figures_table(labels: Sequence[str], figures: dict[str, list[float | None]]) -> Table:
    table = Table("figure", title="Results", title_justify="left")
    for label in labels:
        table.add_column(label, justify="right")
    for figure in FIGURES:
        if figure.key in figures:
            first, *others = figures[figure.key]
            table.add_row(
                figure.label, _number(figure, first), *(_with_difference(figure, value, first) for value in others)
            )
    return table


def _number(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    return bytes_text(value) if figure.key == "peak_memory_bytes" else f"{value:,.{figure.decimals}f}"


def _with_difference(figure: Figure, value: float | None, first: float | None) -> str:
    text = _number(figure, value)
    if value is None or first is None or value == first:
        return text
    if figure.relative:
        return f"{text} ({value / first - 1:+.1%})" if first else text
    return f"{text} ({value - first:+,.{figure.decimals}f})"
