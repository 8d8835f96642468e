"""Trains recommendation models on this machine, and follows TrainingJobs on a cluster.

`train` runs a job here and returns its Training; it needs `emberscale[local]`. TrainingJobClient submits and follows
jobs on a cluster; it needs `emberscale[client]`. A name is imported when it is first used, so that a client needs
neither torch nor the seconds that importing it takes.

Private: `_start`, `_cli` and `_commands` are the command line; `_training` (with `_run`), `_profiling`, `_serving` and
`_drill` do what it asks for on this machine, and `_client` on a cluster; `_progress`, `_reports` and `_console` show
it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberscale._client import ClusterError, JobEvent, JobNotFoundError, TrainingJobClient
    from emberscale._run.summary import Summary
    from emberscale._serving.export import ExportedModel, ExportError, export_checkpoint
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
    "emberscale._client": ("ClusterError", "JobEvent", "JobNotFoundError", "TrainingJobClient"),
    "emberscale._run.summary": ("Summary",),
    "emberscale._serving.export": ("ExportError", "ExportedModel", "export_checkpoint"),
    "emberscale._training": ("Training", "TrainingFailedError", "train"),
    "emberscale_api.errors": ("InvalidError", "UnavailableError", "UnwritableError"),
    "emberscale_api.job": ("ManifestError", "TrainingJob", "load_manifest"),
    "emberscale_api.job.model": ("Features",),
    "emberscale_api.job.status": ("JobPhase", "TrainingJobStatus"),
}


def __getattr__(name: str) -> object:
    for module, names in _DEFINED_IN.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
