"""Reads manifests that a newer version has accepted, with values that this version does not know.

A new kind of optimizer, or a new policy, is such a value. Whoever only looks after the job reads the field's default in
its place, and hands the manifest on with the values that are in it.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from emberscale_api.job.manifest import ManifestError, parse_manifest
from emberscale_api.job.training_job import TrainingJob


@dataclass(frozen=True)
class UnknownValue:
    """A value of an enumeration that this version does not know. `path` leads to it from the manifest's root."""

    path: tuple[str | int, ...]
    value: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))} ({self.value!r})"


def parse_newer_manifest(
    document: Mapping[str, Any], source: str = "manifest"
) -> tuple[TrainingJob, tuple[UnknownValue, ...]]:
    """Returns a manifest with each unknown value replaced by its default, and the unknown values.

    Unknown fields are kept. Raises ManifestError where anything else is wrong, or where a field has no default.
    """
    try:
        return parse_manifest(document, source, unknown="allow"), ()
    except ManifestError as error:
        unknown = unknown_values(document)
        if not unknown:
            raise
        refusal = error
    known = deepcopy(dict(document))
    for one in unknown:
        del _parent(known, one.path)[one.path[-1]]
    try:
        return TrainingJob.model_validate(known, extra="allow"), unknown
    except ValidationError as error:
        raise refusal from error


def unknown_values(document: Mapping[str, Any]) -> tuple[UnknownValue, ...]:
    """Returns the values that are in no enumeration of this version."""
    try:
        TrainingJob.model_validate(document, extra="allow")
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] == "enum" and isinstance(one["input"], str)]
        return tuple(
            UnknownValue(one["loc"], one["input"])
            for one in wrong
            if isinstance(one["loc"][-1], str) and _value(document, one["loc"]) == one["input"]
        )
    return ()


def with_values(text: str, unknown: Sequence[UnknownValue]) -> str:
    """Returns a manifest, or a part of one from its root on, in JSON, with defaults replaced by the unknown values."""
    if not unknown:
        return text
    document = json.loads(text)
    for one in unknown:
        parent = document
        for step in one.path[:-1]:
            if isinstance(parent, dict) and isinstance(step, str):
                parent = parent.setdefault(step, {})
            elif isinstance(parent, list) and isinstance(step, int) and step < len(parent):
                parent = parent[step]
            else:  # the part leaves out what the value is in
                break
        else:
            parent[one.path[-1]] = one.value
    return json.dumps(document, sort_keys=True)


def _value(document: Any, path: Sequence[str | int]) -> Any:
    """Returns the value at a path; None if the path names no place, such as one through a choice of types."""
    try:
        return _parent(document, path)[path[-1]]
    except (KeyError, IndexError, TypeError):
        return None


def _parent(document: Any, path: Sequence[str | int]) -> Any:
    for step in path[:-1]:
        document = document[step]
    return document
