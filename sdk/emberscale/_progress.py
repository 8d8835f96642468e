"""Shows the progress of a job in a notebook, on a terminal, or as lines in a log.

Progress goes to stderr, except in a notebook.
"""

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from emberscale._console import open_console
from emberscale_api.checkpoint import number_of
from emberscale_api.environment import SUPERSEDED_EXIT_CODE
from emberscale_api.job.roles import MemberId
from emberscale_api.job.running import JobStatus, ScalingStep, SlowMember
from emberscale_api.job.status import ENDED, RECOVERY_STEPS, ROLLED_BACK_STEP, STARTED_STEP, JobPhase
from emberscale_api.readable import bytes_text, duration_text, rate_text
from emberscale_operator.local.snapshot import MemberExit, RunView
from emberscale_operator.machine import ExitReason


def figures(status: JobStatus) -> list[str]:
    """Returns speed, loss and AUC, as far as they are known."""
    parts = []
    if status.phase is JobPhase.TRAINING and status.samples_per_second > 0:
        parts.append(rate_text(status.samples_per_second))
    if status.samples and math.isfinite(status.loss):
        parts.append(f"loss {status.loss:.4f}")
    if status.samples and math.isfinite(status.auc):
        parts.append(f"AUC {status.auc:.4f}")
    return parts


def headline(snapshot: RunView) -> str:
    """The phase, and what it waits for."""
    status = snapshot.status
    if status is None:
        return "Starting"
    name = "Stopping" if snapshot.suspending else status.phase or "Starting"
    if status.phase is JobPhase.TRAINING and status.epochs > 1:
        return f"{name} epoch {status.epoch + 1} of {status.epochs}"
    if status.phase is JobPhase.EVALUATING:
        return f"{name}: {status.evaluated_samples:,} samples" if status.evaluated_samples else name
    return f"{name}: {status.message}" if status.message and status.phase is not JobPhase.TRAINING else name


def remarks(before: RunView | None, after: RunView) -> list[str]:
    """Returns remarks on what happened from one snapshot to the next."""
    lines = []
    if after.suspending and (before is None or not before.suspending):
        lines.append(f"stopping: {_stop_of(after.status)}; Ctrl-C again stops at once")
    if after.unforked and (before is None or not before.unforked):
        waiting = ", ".join(after.unforked)
        if_new = "kernels that are new are compiled first, which takes minutes"
        lines.append(f"{waiting}: start once all is imported; {if_new}")
    known = len(before.exits) if before is not None else 0
    lines.extend(
        exit_remark(ended)
        for ended in after.exits[known:]
        if not ended.disk_is_full and not _is_expected(ended, after.status)
    )
    full = [number for number, ended in enumerate(after.exits) if ended.disk_is_full]
    if full and full[0] >= known:  # the cause of every such exit, so that it is printed once
        lines.append("the disk of the run's folder is full and processes fail: free some space")
    old = before.status if before is not None else None
    new = after.status
    if new is None:
        return lines
    known_warnings = old.warnings if old is not None else ()
    lines.extend(f"warning: {warning}" for warning in new.warnings if warning not in known_warnings)
    if old is None:
        return lines
    if new.sizing.message != old.sizing.message and new.sizing.plan_version and _changes_shape(old, new):
        lines.append(f"plan: {new.sizing.message}")
    steps = _new_steps(old, new)
    lines.extend(step_remark(step) for step in steps)
    lines.extend(_slow_remarks(old, new))
    lines.extend(_memory_remarks(old, new))
    if new.recoveries > old.recoveries:
        checkpoint = _newest_checkpoint(new)
        went = f"training went back to checkpoint {checkpoint}" if checkpoint else "training began anew"
        has_reason = any(step.reason == ROLLED_BACK_STEP for step in steps)
        lines.append(went if has_reason else f"a parameter server was lost: {went}")
    if new.bad_records > old.bad_records:
        first = min(new.bad_record_samples, key=lambda record: (record.file, record.line), default=None)
        where = f", the first at {first.file}:{first.line}: {first.problem}" if first is not None else ""
        count = "1 malformed record was" if new.bad_records == 1 else f"{new.bad_records:,} malformed records were"
        lines.append(f"{count} found so far{where}")
    lines.extend(
        f"epoch {result.epoch}: held-out AUC {_figure(result.auc)}, log loss {_figure(result.logloss)}, "
        f"normalised entropy {_figure(result.normalized_entropy)}, calibration {_figure(result.calibration, 3)}"
        for result in new.evaluations[len(old.evaluations) :]
    )
    return lines


def _newest_checkpoint(status: JobStatus) -> str:
    """Returns the id of the newest checkpoint of either tier, or the URI of another job's; empty if there is none."""
    flash = status.flash.checkpoint if status.flash is not None else ""
    own = "" if "/" in status.checkpoint else status.checkpoint
    return max((one for one in (flash, own) if one), key=number_of, default=status.checkpoint)


def _figure(value: float | None, digits: int = 4) -> str:
    return "nan" if value is None else f"{value:.{digits}f}"


def _slow_remarks(old: JobStatus, new: JobStatus) -> list[str]:
    """Names members that became slower than their peers, whose remedy changed, or that are no longer slow."""
    before, after = (
        {one.member.slot: (one.member, one.slowness) for one in status.members if one.slowness is not None}
        for status in (old, new)
    )
    lines = [
        slow_remark(member, slowness)
        for slot, (member, slowness) in after.items()
        if slot not in before or before[slot][1].remedy != slowness.remedy
    ]
    if new.phase is old.phase is JobPhase.TRAINING:
        lines.extend(f"{slot} is no longer slower than its peers" for slot in before if slot not in after)
    return lines


def _memory_remarks(old: JobStatus, new: JobStatus) -> list[str]:
    """Names servers that came near their memory limit and delay pushes."""
    known, now = ([one.member.slot for one in status.members if one.delays_for_memory] for status in (old, new))
    return [f"{slot} is near its memory limit and slows pushes down" for slot in now if slot not in known]


def slow_remark(member: MemberId, slowness: SlowMember) -> str:
    """How slow a member is, and what is done about it."""
    remedy = f": {slowness.remedy}" if slowness.remedy else ""
    return f"{member.slot} is {slowness.factor:g} times slower than its peers{remedy}"


def _stop_of(status: JobStatus | None) -> str:
    """Says what a stop waits for."""
    phase = status.phase if status is not None else None
    if phase in ENDED:
        return "the job is over, and its processes end"
    saves = phase in (JobPhase.TRAINING, JobPhase.EVALUATING, JobPhase.SAVING)  # no checkpoint may have their rows yet
    return "taking a checkpoint" if saves else "there is nothing new to save"


def _new_steps(old: JobStatus, new: JobStatus) -> list[ScalingStep]:
    """Returns unreported steps of a change of shape, except changes by a plan of the brain, reported as such."""
    known = max((step.number for step in old.sizing.steps), default=0)
    by_plan = bool(new.sizing.plan_version) and _changes_shape(old, new)
    return [
        step for step in new.sizing.steps if step.number > known and not (by_plan and step.reason == "PlannedScaling")
    ]


def step_remark(step: ScalingStep) -> str:
    """A step of a change of shape, or a recovery, and how long it took."""
    what = "recovery" if step.reason in RECOVERY_STEPS else "scaling"
    what = "start" if step.reason == STARTED_STEP else what
    return f"{what}: {step.message}" + (f" ({duration_text(step.seconds)})" if step.seconds else "")


def _changes_shape(old: JobStatus, new: JobStatus) -> bool:
    return new.sizing.scalings != old.sizing.scalings or not old.sizing.plan_version


def _is_expected(ended: MemberExit, status: JobStatus | None) -> bool:
    """Whether a process ended because all is trained: the status that says so may be older than its end."""
    is_trained = status is not None and status.phase in (JobPhase.SAVING, JobPhase.COMPLETE)
    return is_trained and ended.reason is ExitReason.COMPLETED


def exit_remark(ended: MemberExit) -> str:
    """Describes why a process ended, and names its log."""
    log = f"see logs/{ended.name}.log"
    match ended.reason:
        case ExitReason.OOM_KILLED if ended.memory_limit is not None:
            killed = f"{ended.name} was killed: it used more than its limit of {bytes_text(ended.memory_limit)}"
            if ended.grown is not None and ended.grown > ended.memory_limit:
                return f"{killed}, now {bytes_text(ended.grown)}"
            return f"{killed}, and gets no more; {log}"
        case ExitReason.COMPLETED:
            return f"{ended.name} ended before the job did; {log}"
        case ExitReason.KILLED if ended.code == SUPERSEDED_EXIT_CODE:
            return f"{ended.name} ended: a new process takes its place"
        case ExitReason.KILLED:
            return f"{ended.name} was killed by {_how(ended.code)}; it restarts"
        case _:
            return f"{ended.name} failed with {_how(ended.code)}; {log}"


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


_LINE_SECONDS = 5.0


class PlainProgress:
    """A line every few seconds, and one whenever the phase changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._before: RunView | None = None
        self._phase = ""
        self._next = 0.0

    def show(self, snapshot: RunView) -> None:
        """Prints a line if it is time for one."""
        for remark in remarks(self._before, snapshot):
            self._print(remark)
        self._before = snapshot
        known = None if snapshot.status is None else snapshot.status.phase
        phase = known or "Starting"
        if phase == self._phase and snapshot.seconds < self._next:
            return
        self._phase = phase
        self._next = snapshot.seconds + _LINE_SECONDS
        self._print(f"{_elapsed(snapshot):>8}  {_plain_line(snapshot)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _plain_line(snapshot: RunView) -> str:
    status = snapshot.status
    parts = [headline(snapshot)]
    if status is None:
        return parts[0]
    if status.expected_samples:
        share = status.samples / status.expected_samples
        parts.append(f"{share:6.1%}  {status.samples:,} of {status.expected_samples:,} samples")
    parts.extend(figures(status))
    return "  ".join([*parts, *_eta(status)])


def _elapsed(snapshot: RunView) -> str:
    """The time since the start, to a tenth of a second: a run that has just begun is at 0s."""
    return duration_text(round(snapshot.seconds, 1))


def _eta(status: JobStatus) -> list[str]:
    known = status.phase is JobPhase.TRAINING and status.eta_seconds >= 0
    return [f"ETA {duration_text(status.eta_seconds)}"] if known else []


_REDRAW_SECONDS = 0.2


class RedrawnProgress:
    """A few lines that change in place, with remarks above them.

    `say` prints a remark, and `draw` puts the changing lines in place of the last ones.
    """

    def __init__(self, name: str, say: Callable[[Text], None], draw: Callable[[RenderableType], None]) -> None:
        self._name = name
        self._say = say
        self._draw = draw
        self._before: RunView | None = None
        self._next = 0.0

    def show(self, snapshot: RunView) -> None:
        """Redraws, a few times a second."""
        for remark in remarks(self._before, snapshot):
            self._say(Text(remark, style="yellow"))
        self._before = snapshot
        if snapshot.seconds >= self._next:
            self._next = snapshot.seconds + _REDRAW_SECONDS
            self._draw(live_view(self._name, snapshot))


def live_view(name: str, snapshot: RunView) -> RenderableType:
    """The job in three lines: what it does, how far it is, how fast and how good."""
    status = snapshot.status or JobStatus()
    title = Text.assemble((name, "bold"), "  ", (headline(snapshot), "cyan"), ("  " + _elapsed(snapshot), "dim"))
    title.no_wrap = True
    title.overflow = "ellipsis"
    total = status.expected_samples
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=total or None, completed=status.samples, width=40, pulse=not total),
        Text(f"{status.samples / total:6.1%}" if total else "", "bold"),
        Text(f"{status.samples:,} / {total:,} samples" if total else "", "dim"),
        Text("".join(_eta(status)), "cyan"),
    )
    counts = Counter(process.name.rpartition("-")[0] for process in snapshot.processes)
    restarts = sum(snapshot.restarts.values())
    members = [f"{counts['ps']} PS", f"{counts['worker']} workers"]
    if restarts:
        members.append(f"{restarts} restarts")
    return Group(title, bar, Text("   ".join([*figures(status), *members]), "green"))


_WIDTH = 100


class NotebookProgress(RedrawnProgress):
    """The same lines in the output of a notebook's cell, redrawn in place with all remarks so far."""

    def __init__(self, name: str) -> None:
        self._remarks: list[Text] = []
        super().__init__(name, self._remarks.append, self._replace)
        self._display: Any = import_module("IPython.display")  # present only in notebooks, and not annotated
        self._handle = self._display.DisplayHandle()
        self._shown = False

    def _replace(self, view: RenderableType) -> None:
        html = self._display.HTML(as_html(Group(*self._remarks, view)))
        if self._shown:
            self._handle.update(html)
        else:
            self._handle.display(html)
            self._shown = True


def as_html(view: RenderableType) -> str:
    """Renders, as HTML, what a terminal would show."""
    console = open_console(record=True, file=StringIO(), width=_WIDTH, force_terminal=True, force_jupyter=False)
    console.print(view)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>')


@contextmanager
def open_progress(name: str) -> Iterator[PlainProgress | RedrawnProgress]:
    """Shows progress where people see it: in the notebook's cell, or on stderr."""
    console = open_console(stderr=True, highlight=False)
    if console.is_jupyter:
        yield NotebookProgress(name)
        return
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield RedrawnProgress(name, live.console.print, partial(live.update, refresh=True))
