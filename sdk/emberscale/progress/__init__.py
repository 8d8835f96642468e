"""What a person sees while a job runs."""

from emberscale.progress.choice import Progress, open_progress

__all__ = ["Progress", "open_progress"]
