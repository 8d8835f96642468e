"""A profile at a glance."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from emberscale._profiling.job_profile import WORKER_THREADS, TimeBreakdown
from emberscale._reports.pictures import THOUSANDS
from emberscale_api import pictures as look
from emberscale_api.metrics import WAITS

_WIDTH_OF_CHARACTER = 0.0115
"""Of a label, as a share of the axes."""
_COLOURS = {
    "read": look.LIGHT_BLUE,
    "plan": look.PALE_BLUE,
    "pull": look.BLUE,
    "compute": look.GREEN,
    "wait_read": look.MIDDLE_GREY,
    "wait_pull": look.LIGHT_GREY,
    "wait": look.PALE_GREY,
    "push": look.ORANGE,
    "gather": look.BLUE,
    "update": look.ORANGE,
    "idle": look.PALE_GREY,
}


def draw_profile(profile: TimeBreakdown, picture: Path) -> None:
    """Draws each thread's time by stage, and throughput and CPU time by role, of the job and of the roof."""
    with mpl.rc_context(look.STYLE):
        profile_figure(profile).savefig(picture, dpi=130)


def profile_figure(profile: TimeBreakdown) -> Figure:
    """The picture before it is written."""
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    lanes, speed, cost = figure.subplots(1, 3, width_ratios=[3.4, 1, 1])
    look.subject(
        figure,
        f"{profile.name}: {profile.workers} workers, {profile.servers} parameter servers\n"
        f"{profile.received_bytes_per_sample:,.0f} bytes received and {profile.sent_bytes_per_sample:,.0f} sent a "
        f"sample, {profile.ids_per_key:.2f} ids a key",
    )
    _lanes(lanes, profile)
    _speed(speed, profile)
    _cost(cost, profile)
    return figure


def _lanes(axes: Axes, profile: TimeBreakdown) -> None:
    lanes = [
        (f"worker: {thread}", {stage: profile.worker_stages[stage] for stage in stages})
        for thread, stages in WORKER_THREADS.items()
    ]
    lanes.append(("server", dict(profile.server_stages)))
    for place, (_, shares) in enumerate(lanes):
        left = 0.0
        outside = []
        for stage, share in shares.items():
            axes.barh(place, share, left=left, height=0.56, color=_COLOURS[stage])
            text = f"{stage} {share:.0%}"
            if share > _WIDTH_OF_CHARACTER * (len(text) + 1):
                colour = look.DARK_GREY if stage in (*WAITS, "idle", "plan") else "white"
                axes.text(left + share / 2, place, text, ha="center", va="center", fontsize=9, color=colour)
            elif share >= 0.005:
                outside.append(text)
            left += share
        # what a part of the bar has no room for stands below it
        axes.text(0.004, place + 0.3, "   ".join(outside), ha="left", va="top", fontsize=8, color=look.DARK_GREY)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_title("Time of each thread, and of a server's lock")


def _speed(axes: Axes, profile: TimeBreakdown) -> None:
    values = [profile.samples_per_second, profile.roof.samples_per_second]
    axes.bar(["job", "no PS"], values, color=[look.BLUE, look.GREY], width=0.6)
    axes.set_title("Samples/s")
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.margins(y=0.1)
    axes.annotate(
        f"{profile.share_of_roof:.0%}", (0, values[0]), xytext=(0, 4), textcoords="offset points", ha="center"
    )


def _cost(axes: Axes, profile: TimeBreakdown) -> None:
    colours = {"worker": look.BLUE, "ps": look.ORANGE, "master": look.GREEN, "redis": look.PURPLE}
    bottom = 0.0
    for role, colour in colours.items():
        used = sum(seconds for name, seconds in profile.cpu_seconds.items() if name.startswith(f"{role}-"))
        height = used / profile.samples * 1e6
        axes.bar("job", height, bottom=bottom, color=colour, width=0.6, label=role)
        bottom += height
    axes.bar("no PS", profile.roof.cpu_seconds_per_sample * 1e6, color=look.GREY, width=0.6)
    axes.set_title("CPU µs a sample")
    axes.margins(y=0.08)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)
