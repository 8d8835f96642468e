"""From YAML to a TrainingJob, with errors that name the field and what is allowed there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from emberscale_api.job.resolved import UnresolvableModelError, resolve_model
from emberscale_api.job.training_job import TrainingJob


class ManifestError(ValueError):
    """A manifest that cannot be used; the text is one line a problem, for people."""


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> TrainingJob:
    """Reads, overrides and checks a manifest file.

    `overrides` are `dotted.path=value`, the value in YAML. Raises ManifestError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: is not UTF-8 text") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ManifestError(f"{where}: is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(document, dict):
        raise ManifestError(
            f"{path}: holds no TrainingJob: expected a mapping with apiVersion, kind, metadata and spec"
        )
    return parse_manifest(apply_overrides(document, overrides), source=str(path))


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the document in which each `dotted.path=value` is set; missing mappings on the way are made."""
    result: dict[str, Any] = _copy(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            raise ManifestError(f"--set {override!r}: expected dotted.path=value, such as spec.worker.replicas=4")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ManifestError(f"--set {override!r}: the value is not valid YAML") from error
        target = result
        for depth, key in enumerate(keys[:-1]):
            child = target.setdefault(key, {})
            if not isinstance(child, dict):
                raise ManifestError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is not a mapping")
            target = child
        target[keys[-1]] = value
    return result


def parse_manifest(
    document: Mapping[str, Any], source: str = "manifest", unknown: Literal["forbid", "ignore"] = "forbid"
) -> TrainingJob:
    """Checks a manifest and fills in its defaults. Raises ManifestError, also for `unknown` fields if forbidden."""
    given = {key: value for key, value in document.items() if key != "status"}
    try:
        job = TrainingJob.model_validate(given, extra=unknown)
        resolve_model(job.spec)
    except ValidationError as error:
        raise ManifestError("\n".join(f"{source}: {line}" for line in _problems(error))) from error
    except UnresolvableModelError as error:
        raise ManifestError(f"{source}: {error}") from error
    return job


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "manifest"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{field}: unknown field; allowed here: {', '.join(_siblings(problem['loc']))}")
        elif problem["type"] == "missing":
            lines.append(f"{field}: is required")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = problem["input"]
            shown = "" if isinstance(given, dict | list | BaseModel) else f" (got {given!r})"
            lines.append(f"{field}: {message[0].lower()}{message[1:]}{shown}")
    return lines


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """The field names allowed where an unknown one was found."""
    part: Any = TrainingJob
    for key in location[:-1]:
        field = next((info for name, info in part.model_fields.items() if (info.alias or name) == key), None)
        if field is None:
            continue
        part = next((kind for kind in models_in(field.annotation)), part)
    return sorted(info.alias or name for name, info in part.model_fields.items())


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in models_in(argument)]
