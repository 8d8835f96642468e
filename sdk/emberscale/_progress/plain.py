"""Progress where output is kept rather than looked at: lines, one below the other."""

from rich.console import Console

from emberscale._progress.words import figures, headline, remarks
from emberscale._run.summary import phase_name
from emberscale_api.job.duration import clock_time
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import RunView

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
            self.say(remark)
        self._before = snapshot
        phase = "Starting" if snapshot.status is None else phase_name(snapshot.status.phase)
        if phase == self._phase and snapshot.seconds < self._next:
            return
        self._phase = phase
        self._next = snapshot.seconds + _LINE_SECONDS
        self._print(f"{snapshot.seconds:7.1f}s  {_plain_line(snapshot)}")

    def say(self, remark: str) -> None:
        """Prints a line."""
        self._print(remark)

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
    if status.phase == pb.TRAINING and status.eta_seconds >= 0:
        parts.append(f"ETA {clock_time(status.eta_seconds)}")
    return "  ".join(parts)
