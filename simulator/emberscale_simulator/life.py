"""Where a simulated job can be, and what can happen to it."""

from enum import StrEnum


class RunPhase(StrEnum):
    """Where a job is."""

    QUEUED = "Queued"
    STARTING = "Starting"
    TRAINING = "Training"
    STANDSTILL = "Standstill"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Happening(StrEnum):
    """What a job's next event is."""

    READY = "Ready"  # the end of a start or of a standstill
    DONE = "Done"
    FAILURE = "Failure"
    OUT_OF_MEMORY = "OutOfMemory"
    CHANGE_READY = "ChangeReady"
    MENDED = "Mended"  # slow pods are worked around
    WORKER_BACK = "WorkerBack"
