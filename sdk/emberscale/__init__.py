"""Trains recommendation models on this machine, and follows TrainingJobs on a cluster.

`train` runs a job here and returns its Training; it needs `emberscale[local]`. TrainingJobClient submits and follows
jobs on a cluster; it needs `emberscale[client]`. A name is imported when it is first used, so that a client needs
neither torch nor the seconds that importing it takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberscale._client import ClusterError, JobEvent, JobNotFoundError, TrainingJobClient
    from emberscale._run.summary import Summary
    from emberscale._serving import ExportedModel, ExportError, export_checkpoint
    from emberscale._training import Training, TrainingFailedError, train
    from emberscale_api.errors import InvalidError, UnavailableError, UnwritableError
    from emberscale_api.job import ManifestError, TrainingJob, load_manifest
    from emberscale_api.job.model import Features
    from emberscale_api.job.status import JobPhase, TrainingJobStatus

__all__ = [
    "ClusterError",
    "ExportError",
    "ExportedModel",
    "Features",
    "InvalidError",
    "JobEvent",
    "JobNotFoundError",
    "JobPhase",
    "ManifestError",
    "Summary",
    "Training",
    "TrainingFailedError",
    "TrainingJob",
    "TrainingJobClient",
    "TrainingJobStatus",
    "UnavailableError",
    "UnwritableError",
    "export_checkpoint",
    "load_manifest",
    "train",
]

_DEFINED_IN = {
    "InvalidError": "emberscale_api.errors",
    "ClusterError": "emberscale._client",
    "ExportError": "emberscale._serving",
    "ExportedModel": "emberscale._serving",
    "Features": "emberscale_api.job.model",
    "JobEvent": "emberscale._client",
    "JobNotFoundError": "emberscale._client",
    "JobPhase": "emberscale_api.job.status",
    "ManifestError": "emberscale_api.job",
    "UnavailableError": "emberscale_api.errors",
    "Summary": "emberscale._run.summary",
    "Training": "emberscale._training",
    "TrainingFailedError": "emberscale._training",
    "TrainingJob": "emberscale_api.job",
    "TrainingJobClient": "emberscale._client",
    "TrainingJobStatus": "emberscale_api.job.status",
    "UnwritableError": "emberscale_api.errors",
    "export_checkpoint": "emberscale._serving",
    "load_manifest": "emberscale_api.job",
    "train": "emberscale._training",
}


def __getattr__(name: str) -> object:
    module = _DEFINED_IN.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
