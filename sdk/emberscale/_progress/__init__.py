"""What a person sees while a job runs."""

from emberscale._progress.choice import ProgressDisplay, open_progress

__all__ = ["ProgressDisplay", "open_progress"]
