"""The Redis keys of a job's master: the master writes them, the operator removes them with the job."""

from dataclasses import dataclass

DEPOSED_BY_DELETION = 0
"""The term of a job that was deleted: no master ever has it, so one that still runs learns that it must go."""


@dataclass(frozen=True)
class StateKeys:
    """Keys of one job.

    `term` counts masters, `holder` names the one that writes, `state` is the state, `blocks` the index of each data
    file, `bad` the malformed records.
    """

    term: str
    holder: str
    state: str
    blocks: str
    bad: str

    @classmethod
    def of(cls, job_uid: str) -> "StateKeys":
        """The keys of the job of this uid."""
        return cls(*(f"emberscale:{job_uid}:{part}" for part in ("term", "holder", "state", "blocks", "bad")))
