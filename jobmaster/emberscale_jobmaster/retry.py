"""The retry policy of all operations: when to try again, and when to give up.

Pauses double from a second to half a minute. An outage of the storage for some minutes costs no job; one that exceeds
the patience ends the operation that needs the storage.
"""

from dataclasses import dataclass

from emberscale_api.readable import duration_text

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
PATIENCE_SECONDS = 600.0
"""For files that a job cannot continue without: its newest checkpoint, and its last one."""
CREDENTIALS_PATIENCE_SECONDS = 30.0
"""For the credentials of a new job: their issuer may learn of a new pod some seconds after the pod's start."""

SUSPENSION_PATIENCE_SECONDS = 60.0
"""For the checkpoint of a suspension; after that, the job is suspended at the previous checkpoint."""
LEAST_ATTEMPTS = 3
PASSING_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Codes after which a call to a server is repeated. If the server is gone, its missing heartbeats will show it."""


@dataclass(frozen=True)
class Trouble:
    """A failure that is retried.

    * `reason`: one CamelCase word. `message`: what went wrong the last time.
    * `since`: when it failed first. `next_at`: when it is tried again. Both in seconds of the job's clock.
    * `attempts`: how often it has failed.
    * `checkpoint`: the id of the checkpoint that could not be taken the last time; empty for anything else.
    """

    reason: str
    message: str
    since: float
    next_at: float
    attempts: int = 1
    checkpoint: str = ""

    def describe(self, now: float) -> str:
        """Describes the trouble for people."""
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"{self.message} (tried {times} in {duration_text(max(0.0, now - self.since))}, and tried again)"


def failed_again(before: Trouble | None, now: float, reason: str, message: str, at_least: float = 0.0) -> Trouble:
    """The trouble after one more failure; the next attempt waits for `at_least` seconds."""
    attempts = 1 if before is None else before.attempts + 1
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 10))
    since = now if before is None else before.since
    return Trouble(reason, message, since, now + max(pause, at_least), attempts)


def exhausted(trouble: Trouble, now: float, patience: float = PATIENCE_SECONDS) -> bool:
    """Returns whether it has failed for so long that it must be given up."""
    return trouble.attempts >= LEAST_ATTEMPTS and now - trouble.since >= patience
