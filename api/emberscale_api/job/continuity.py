"""The fields of a manifest that must not change, and for how long.

This is the only list. The job master checks a checkpoint against it, `emberscale run --resume` a run, and the
CustomResourceDefinition an edit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from emberscale_api.job.training_job import TrainingJob


class Keeper(IntEnum):
    """The scope in which a field must not change. A keeper also keeps the fields of all lower keepers.

    `MODEL`: rows and dense parameters are meaningless without it. `CHECKPOINT`: so are applied batches. `RUN`: all
    launches of a run share it. `RESOURCE`: a TrainingJob on a cluster keeps it from its creation on, since its
    processes read it once.
    """

    MODEL = 1
    CHECKPOINT = 2
    RUN = 3
    RESOURCE = 4


@dataclass(frozen=True)
class FixedField:
    """A field or a whole section, by its path in the manifest."""

    path: str
    keeper: Keeper

    def covers(self, path: str) -> bool:
        """Whether the path is this field's or lies within this section."""
        return path == self.path or path.startswith(f"{self.path}.")


@dataclass(frozen=True)
class Difference:
    """A field in which two manifests differ; None stands for a field that a manifest does not have."""

    path: str
    before: Any
    now: Any


FIXED_FIELDS = (
    FixedField("spec.model", Keeper.MODEL),
    FixedField("spec.data.format", Keeper.MODEL),
    FixedField("spec.data.columns", Keeper.MODEL),
    FixedField("spec.data.csv", Keeper.CHECKPOINT),
    FixedField("spec.data.shuffling", Keeper.CHECKPOINT),
    FixedField("spec.training.batchSize", Keeper.CHECKPOINT),
    FixedField("spec.training.seed", Keeper.CHECKPOINT),
    FixedField("spec.optimizers.sparse.type", Keeper.MODEL),
    FixedField("spec.optimizers.dense.type", Keeper.MODEL),
    FixedField("spec.optimizers.wide.type", Keeper.MODEL),
    FixedField("metadata.name", Keeper.RUN),
    FixedField("spec.data.train", Keeper.RUN),
    FixedField("spec.data.evaluation", Keeper.RUN),
    FixedField("spec.data.continuation", Keeper.RUN),
    FixedField("spec.checkpoint.uri", Keeper.RUN),
    FixedField("spec.checkpoint.initialFrom", Keeper.RUN),
    FixedField("spec.data", Keeper.RESOURCE),
    FixedField("spec.training", Keeper.RESOURCE),
    FixedField("spec.optimizers", Keeper.RESOURCE),
    FixedField("spec.sharding", Keeper.RESOURCE),
    FixedField("spec.faultTolerance", Keeper.RESOURCE),
    FixedField("spec.hotEmbeddings", Keeper.RESOURCE),
)


def fixed_fields(keeper: Keeper) -> tuple[str, ...]:
    """Returns the paths that the keeper keeps, without those inside another one."""
    kept = [field for field in FIXED_FIELDS if field.keeper <= keeper]
    return tuple(
        field.path for field in kept if not any(other.covers(field.path) for other in kept if other is not field)
    )


def differences(before: TrainingJob, now: TrainingJob) -> tuple[Difference, ...]:
    """Returns every field of name and spec in which two manifests differ; a list counts as one field."""
    old, new = _flat(before), _flat(now)
    return tuple(
        Difference(path, old.get(path), new.get(path))
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    )


def broken_fields(before: TrainingJob, now: TrainingJob, keeper: Keeper) -> tuple[Difference, ...]:
    """Returns the differences that the keeper does not allow."""
    kept = [field for field in FIXED_FIELDS if field.keeper <= keeper]
    return tuple(one for one in differences(before, now) if any(field.covers(one.path) for field in kept))


def _flat(job: TrainingJob) -> dict[str, Any]:
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"metadata.name": job.metadata.name, **flat_fields(document["spec"], "spec.")}


def flat_fields(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The single values of a document by their dotted paths; a list is one value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat.update(flat_fields(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
