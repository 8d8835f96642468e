"""Parses YAML into a TrainingJob, with errors that name the field and what is allowed there."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from emberscale_api.errors import InvalidError
from emberscale_api.job.resolved import UnresolvableModelError, resolve_model
from emberscale_api.job.training_job import TrainingJob

_LONGEST_SHOWN = 200


class ManifestError(InvalidError):
    """The manifest is invalid; the text has one line per problem."""


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> TrainingJob:
    """Reads, overrides and checks a manifest file.

    `overrides` are `dotted.path=value`, the value in YAML. Raises ManifestError.
    """
    from emberscale_api.job.yaml_text import read_yaml

    try:
        document = read_yaml(path)
    except InvalidError as error:
        raise ManifestError(str(error)) from error
    if not isinstance(document, dict):
        raise ManifestError(
            f"{path}: contains no TrainingJob: expected a mapping with apiVersion, kind, metadata and spec"
        )
    return parse_manifest(apply_overrides(document, overrides), source=str(path))


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the document in which each `dotted.path=value` is set; missing mappings on the way are made."""
    from emberscale_api.job.yaml_text import parse_yaml

    result: dict[str, Any] = plain(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            raise ManifestError(f"--set {override!r}: expected dotted.path=value, such as spec.worker.replicas=4")
        try:
            value = parse_yaml(text)
        except InvalidError as error:
            raise ManifestError(f"--set {override!r}: the value {error}") from error
        target = result
        for depth, key in enumerate(keys[:-1]):
            child = target.setdefault(key, {})
            if not isinstance(child, dict):
                what = "is a list: replace the whole list" if isinstance(child, list) else "is not a mapping"
                raise ManifestError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} {what}")
            target = child
        target[keys[-1]] = value
    return result


def parse_manifest(
    document: Mapping[str, Any], source: str = "manifest", unknown: Literal["forbid", "allow"] = "forbid"
) -> TrainingJob:
    """Checks a manifest and fills in its defaults.

    `unknown` says what becomes of fields that this version does not know: people's own are refused, those of a manifest
    that a newer version has accepted are kept. Raises ManifestError.
    """
    given = {key: value for key, value in document.items() if key != "status"}
    try:
        job = TrainingJob.model_validate(given, extra=unknown)
        resolve_model(job.spec)
    except ValidationError as error:
        raise ManifestError("\n".join(f"{source}: {line}" for line in _problems(error))) from error
    except UnresolvableModelError as error:
        raise ManifestError(f"{source}: {error}") from error
    return job


def plain(value: Any) -> Any:
    """A copy in plain dictionaries and lists, as pydantic takes them; those of other libraries may be views."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _problems(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(str(part) for part in one['loc']) or 'manifest'}: {_problem(one)}"
        for one in error.errors()
        if not _follows_from_another(one)
    ]


def _follows_from_another(error: ErrorDetails) -> bool:
    """Whether an error only repeats another: pydantic calls a list too short if one of its items is malformed."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _problem(error: ErrorDetails) -> str:
    """Describes a field's problem and what is allowed there."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        allowed, name = _siblings(error["loc"]), str(error["loc"][-1])
        meant = _closest(name, allowed)
        hints = [meant] if meant else _places_of(name)
        hint = f" (did you mean {' or '.join(hints)}?)" if hints else ""
        return f"unknown field{hint}; allowed here: {', '.join(allowed)}"
    if kind == "missing":
        return "is required"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        fields = _siblings((*error["loc"], ""))
        return f"must be a mapping of fields{_got(given)}" + (f"; allowed here: {', '.join(fields)}" if fields else "")
    if kind == "tuple_type":
        example = "..." if isinstance(given, dict | None) else given
        return f"must be a list, such as [{example}]{_got(given)}"
    if kind in ("too_short", "too_long") and context.get("field_type") == "Tuple":
        bound = f"least {context['min_length']}" if kind == "too_short" else f"most {context['max_length']}"
        return f"must have at {bound} item{'' if bound.endswith(' 1') else 's'}, and has {len(given)}"
    if kind in ("string_too_short", "string_too_long"):
        bound = f"least {context['min_length']}" if kind == "string_too_short" else f"most {context['max_length']}"
        return f"must have at {bound} character{'' if bound.endswith(' 1') else 's'}{_got(given)}"
    if kind in ("int_parsing", "int_from_float", "int_type"):
        return f"must be a whole number{_got(given)}"
    if kind in ("float_parsing", "float_type"):
        return f"must be a number{_got(given)}"
    if kind in ("bool_parsing", "bool_type"):
        return f"must be true or false{_got(given)}"
    if kind == "string_type" and isinstance(given, bool | int | float):
        return f"must be text: write it in quotes{_got(given)}"
    message = error["msg"].removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}".replace("input should be", "must be")
    if kind in ("enum", "literal_error"):
        allowed = re.findall(r"'([^']*)'", str(context["expected"]))
        return message + _got(given, _closest(str(given), allowed))
    return message if repr(given) in message else f"{message}{_got(given)}"


def _got(given: Any, meant: str = "") -> str:
    if given is None:
        return " (it is empty)"
    hint = f"; did you mean {meant}?" if meant else ""
    if isinstance(given, dict | list | tuple | BaseModel):
        return ""
    shown = repr(given)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}... of {len(str(given))} characters"
    return f" (got {shown}{hint})"


def _closest(given: str, allowed: Sequence[str]) -> str:
    """Returns the allowed word closest to what was written; empty if none is close."""
    plain = {word.lower(): word for word in allowed}
    meant = get_close_matches(re.sub(r"[-_ ]", "", given.lower()), plain, n=1, cutoff=0.7)
    return plain[meant[0]] if meant else ""


def _places_of(name: str, part: type[BaseModel] = TrainingJob, path: str = "") -> list[str]:
    """Returns the places where a manifest has a field of this name, at most three."""
    found = []
    for key, field in part.model_fields.items():
        here = f"{path}{field.alias or key}"
        if (field.alias or key) == name:
            found.append(here)
        for model in models_in(field.annotation) if get_origin(field.annotation) not in (dict, tuple) else ():
            found += _places_of(name, model, f"{here}.")
    return found[:3]


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """Returns the names of the fields that are allowed in place of an unknown one."""
    part: Any = TrainingJob
    for key in location[:-1]:
        field = next((info for name, info in part.model_fields.items() if (info.alias or name) == key), None)
        if field is None:
            continue
        part = next((kind for kind in models_in(field.annotation)), None)
        if part is None:
            return []
    return sorted(info.alias or name for name, info in part.model_fields.items())


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in models_in(argument)]
