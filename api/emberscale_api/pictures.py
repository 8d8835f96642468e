"""The look of all pictures: one palette and one style, for runs, plans, profiles and simulations."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f6db5", "#d9722e", "#3a8f5c", "#8a5ea8", "#8a8f98"
OLIVE, TEAL, CRIMSON, INDIGO = "#b8a13a", "#4aa3a8", "#b04a6f", "#5b5f97"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GREY, OLIVE, TEAL, CRIMSON, INDIGO)
"""The colours of compared items, in this order; each differs clearly from its neighbours."""
LIGHT_BLUE, PALE_BLUE = "#5f9bd8", "#9cc3ea"
DARK_GREY, MIDDLE_GREY, LIGHT_GREY, PALE_GREY = "#5b6472", "#b9bec6", "#cfd4da", "#e3e6ea"
"""Shades: of text beside data, and of what is not compared, such as waits and areas behind data."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MIDDLE_GREY,
    "axes.grid": True,
    "grid.color": PALE_GREY,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
"""Matplotlib's rcParams."""


def headline(figure: "Figure", text: str) -> None:
    """Writes the title of a whole picture above it."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=14, fontweight="bold")


def subject(figure: "Figure", text: str) -> None:
    """Writes the subject of a picture above it, in lines of plain text."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=11)


def say_instead(axes: "Axes", why: str) -> None:
    """Writes why there is nothing to draw in the place of empty axes."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY, linespacing=1.6)
