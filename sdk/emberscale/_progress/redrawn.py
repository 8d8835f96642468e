"""Progress in a few lines that change in place: at the bottom of a terminal, or wherever a subclass draws them."""

from abc import ABC, abstractmethod

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from emberscale._progress.words import figures, headline, remarks
from emberscale_api.job.duration import clock_time
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import RunView

_REDRAW_SECONDS = 0.2


class RedrawnProgress(ABC):
    """A few lines that change in place, with remarks above them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: RunView | None = None
        self._next = 0.0

    def show(self, snapshot: RunView) -> None:
        """Redraws, a few times a second."""
        for remark in remarks(self._before, snapshot):
            self.say(remark)
        self._before = snapshot
        if snapshot.seconds >= self._next:
            self._next = snapshot.seconds + _REDRAW_SECONDS
            self.draw(live_view(self._name, snapshot))

    @abstractmethod
    def say(self, remark: str) -> None:
        """A line above the changing ones."""

    @abstractmethod
    def draw(self, view: RenderableType) -> None:
        """Puts the changing lines in place of the last ones."""


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


def live_view(name: str, snapshot: RunView) -> RenderableType:
    """The job in three lines: what it does, how far it is, how fast and how good."""
    status = snapshot.status or pb.JobStatus()
    title = Text.assemble(
        (name, "bold"), "  ", (headline(snapshot), "cyan"), ("  " + clock_time(snapshot.seconds), "dim")
    )
    title.no_wrap = True
    title.overflow = "ellipsis"
    total = status.expected_samples
    bar = Table.grid(padding=(0, 1))
    eta = f"ETA {clock_time(status.eta_seconds)}" if status.phase == pb.TRAINING and status.eta_seconds >= 0 else ""
    bar.add_row(
        ProgressBar(total=total or None, completed=status.samples, width=40, pulse=not total),
        Text(f"{status.samples / total:6.1%}" if total else "", "bold"),
        Text(f"{status.samples:,} / {total:,} samples" if total else "", "dim"),
        Text(eta, "cyan"),
    )
    counts: dict[str, int] = {}
    for process in snapshot.processes:
        role = process.name.rpartition("-")[0]
        counts[role] = counts.get(role, 0) + 1
    restarts = sum(snapshot.restarts.values())
    members = [f"{counts.get('ps', 0)} PS", f"{counts.get('worker', 0)} workers"]
    if restarts:
        members.append(f"{restarts} restarts")
    return Group(title, bar, Text("   ".join([*figures(status), *members]), "green"))
