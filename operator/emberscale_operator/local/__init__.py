"""A job on this machine: processes for pods, under the same job machine.

* `runner`: the run as a whole; `backend`: its processes as a backend of the job machine; `snapshot`: their reports.
* `processes`, `process`, `starters`, `tether`, `cpu`: starting, watching and ending processes, and their cores.
* `folder`, `environment`, `port`: files, variables and ports of a run; `requests`: requests of other commands to it.
* `embedded_redis`, `brain`: the store and the brain of a run.
"""

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
