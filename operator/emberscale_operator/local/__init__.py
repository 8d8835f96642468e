"""A job on this machine: processes for pods, under the same job machine."""

from emberscale_operator.local.brain import BrainAddress, EmbeddedBrain
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.requests import KillRequest, edit_manifest, end_edits
from emberscale_operator.local.runner import LocalJob
from emberscale_operator.local.snapshot import MemberExit, RunOutcome, RunView

__all__ = [
    "BrainAddress",
    "EmbeddedBrain",
    "KillRequest",
    "LocalJob",
    "MemberExit",
    "RunFolder",
    "RunOutcome",
    "RunView",
    "edit_manifest",
    "end_edits",
]
