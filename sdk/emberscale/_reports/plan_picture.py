"""A picture of a plan: what the model says of what was measured, and the shapes among which was chosen."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emberscale_api.rpc import brain_pb2 as pb

_BLUE, _GREY, _ORANGE, _GREEN = "#2f6db5", "#8a8f98", "#d9722e", "#3a8f5c"


def draw_plan(explanation: pb.PlanExplanation, picture: Path) -> None:
    """Predicted against measured throughput, and the Pareto front with the present and the chosen shape."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        plan_figure(explanation).savefig(picture, dpi=140)


def plan_figure(explanation: pb.PlanExplanation) -> Figure:
    """The picture before it is written."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    fit, front = figure.subplots(1, 2)
    _draw_fit(fit, explanation)
    _draw_front(front, explanation)
    return figure


def _draw_fit(axes: Axes, explanation: pb.PlanExplanation) -> None:
    axes.set(title="What the model says of what was measured", xlabel="measured samples/s")
    axes.set_ylabel("predicted samples/s")
    if not explanation.measured:
        _say(axes, "nothing is measured yet: the first profile\nis made after spec.scaling.profileInterval of training")
        return
    shapes: dict[str, tuple[list[float], list[float]]] = {}
    for point in explanation.measured:
        shape = point.profile.shape
        name = f"{shape.workers} x {shape.worker_cpu:g}, {shape.ps} PS x {shape.ps_cpu:g}"
        measured, predicted = shapes.setdefault(name, ([], []))
        measured.append(point.profile.throughput)
        predicted.append(point.predicted)
    colours = mpl.colormaps["tab10"]
    for number, (name, (measured, predicted)) in enumerate(shapes.items()):
        axes.scatter(measured, predicted, color=colours(number % 10), alpha=0.6, label=name)
    top = 1.05 * max(max(max(measured), max(predicted)) for measured, predicted in shapes.values())
    axes.plot([0, top], [0, top], color=_GREY, linewidth=1, zorder=0)
    axes.set(xlim=(0, top), ylim=(0, top))
    if len(shapes) <= 10:
        axes.legend(frameon=False, fontsize="small", title="workers x cores")


def _say(axes: Axes, why: str) -> None:
    """Why there is nothing to draw, in the place of empty axes."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=_GREY, linespacing=1.6)


def _draw_front(axes: Axes, explanation: pb.PlanExplanation) -> None:
    axes.set(title="The cheapest shape for each throughput", xlabel="cost per hour", ylabel="predicted samples/s")
    points = explanation.front
    if not points and not explanation.HasField("present") and not explanation.HasField("chosen"):
        _say(axes, "no shapes were compared:\nwithout a measurement there is no model of the job")
        return
    if points:
        cost, speed = [point.cost_per_hour for point in points], [point.throughput for point in points]
        doubt = [1.645 * point.uncertainty for point in points]
        low = [one * max(0.0, 1 - share) for one, share in zip(speed, doubt, strict=True)]
        high = [one * (1 + share) for one, share in zip(speed, doubt, strict=True)]
        axes.fill_between(cost, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="90% interval")
        axes.plot(cost, speed, ".-", color=_BLUE)
    for name, colour, size in (("present", _ORANGE, 90), ("chosen", _GREEN, 40)):
        if explanation.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
            point = getattr(explanation, name)
            axes.scatter([point.cost_per_hour], [point.throughput], color=colour, s=size, label=name, zorder=3)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right")
