"""Compares runs: their manifests, and their results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from emberscale._run.record import RunPaths, RunRecord, read_record
from emberscale_api.errors import InvalidError
from emberscale_api.job.continuity import flat_fields
from emberscale_api.job.units import IN_WORDS

_OWN = ("spec.checkpoint.uri",)
"""Fields that differ from run to run by themselves."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its manifest, the same with durations as people write them, and its summary.json."""

    paths: RunPaths
    name: str
    manifest: Mapping[str, Any]
    in_words: Mapping[str, Any]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number of a summary. `relative`: differences are shown in per cent."""

    key: str
    label: str
    of: Callable[[Mapping[str, Any]], float | None]
    decimals: int = 0
    relative: bool = False


def _field(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda summary: summary.get(name)


def _evaluated(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    def last(summary: Mapping[str, Any]) -> float | None:
        evaluations = summary.get("evaluations") or [{}]
        value: float | None = evaluations[-1].get(name)
        return value

    return last


def _total(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda summary: sum(summary.get(name, {}).values())


FIGURES = (
    Figure("auc", "AUC", _field("auc"), 4),
    Figure("logloss", "log loss", _field("logloss"), 4),
    Figure("normalized_entropy", "normalised entropy", _evaluated("normalized_entropy"), 4),
    Figure("calibration", "calibration", _evaluated("calibration"), 4),
    Figure("samples", "samples", _field("samples")),
    Figure("samples_per_second", "samples/s", _field("samples_per_second"), relative=True),
    Figure("training_seconds", "seconds of training", _field("training_seconds"), 1, relative=True),
    Figure("wall_seconds", "wall seconds", _field("wall_seconds"), 1, relative=True),
    Figure("peak_memory_bytes", "peak memory, all processes", _total("peak_memory_bytes"), relative=True),
    Figure("rows", "embedding rows", _total("rows"), relative=True),
    Figure("restarts", "restarts", _total("restarts")),
    Figure("recoveries", "recoveries", _field("recoveries")),
    Figure("bad_records", "malformed records", _field("bad_records")),
)


def read_run(root: Path) -> FinishedRun:
    """Raises InvalidError for a folder without a run, and for a run that has not ended."""
    paths = RunPaths(root)
    record = read_record(paths)
    try:
        summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidError(f"{root}: has no {paths.summary.name}: the run has not ended") from None
    except (OSError, ValueError) as error:
        raise InvalidError(f"{paths.summary}: cannot be read: {error}") from error
    return FinishedRun(paths, record.name, record.manifest, _in_words(record), summary)


def _in_words(record: RunRecord) -> Mapping[str, Any]:
    try:
        given = record.given
    except ValidationError:  # another version's, whose fields can be compared as they are
        return record.manifest
    return given.model_dump(mode="json", by_alias=True, exclude_none=True, context=IN_WORDS)


def differing_fields(manifests: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields of the manifests that are not the same in all: by dotted path one value a manifest, None if absent."""
    flat = [flat_fields(manifest) for manifest in manifests]
    fields = dict.fromkeys(field for fields in flat for field in fields)
    values = {field: [one.get(field) for one in flat] for field in fields if field not in _OWN}
    return {field: found for field, found in values.items() if any(value != found[0] for value in found)}


def figures_of(runs: Sequence[FinishedRun]) -> dict[str, list[float | None]]:
    """Returns one value per run, by the figure's key, without figures that no run has."""
    values = {figure.key: [figure.of(run.summary) for run in runs] for figure in FIGURES}
    return {key: found for key, found in values.items() if any(value is not None for value in found)}


def labels_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns a label for each run: its folder's name, or as much of the path as distinguishes the runs."""
    parts = [run.paths.root.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(path[-depth:]) for path in parts]
        if len(set(labels)) == len(labels):
            break
    return labels
