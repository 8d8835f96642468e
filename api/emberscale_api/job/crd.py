"""The CustomResourceDefinition of TrainingJob, from its types: `python -m emberscale_api.job.crd > FILE`.

The schema is structural, as the API server demands: references are inlined, `null` is left out, exclusive bounds follow
OpenAPI 3.0, and quantities and durations are `int-or-string`. `crd_rules` holds the rules that span fields.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from emberscale_api.job import crd_rules
from emberscale_api.job.manifest import models_in
from emberscale_api.job.model import ENTRYPOINT
from emberscale_api.job.run_policy import AUTO_INTERVAL
from emberscale_api.job.schema import ManifestPart, own_default
from emberscale_api.job.status import TrainingJobStatus
from emberscale_api.job.training_job import GROUP, KIND, PLURAL, VERSION, TrainingJobSpec
from emberscale_api.job.units import DURATION, QUANTITY

NAME = f"{PLURAL}.{GROUP}"

_MAX_STRING = 1024
_MAX_ITEMS = 256
"""The API server estimates the cost of a CEL rule from what is allowed; nobody has more data paths or columns."""
_LONG_STRINGS = {"value": 32768, "message": 32768}

_QUANTITY = "^([0-9]+([.][0-9]+)?|[.][0-9]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_DURATION = "^([0-9]+([.][0-9]+)?(ms|s|m|h|d))+$"
_DURATION_OF_CEL = "^([0-9]+([.][0-9]+)?(ms|s|m|h))+$"
_DURATION_OR_AUTO = {("CheckpointSpec", "interval")}

_EXTRA: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ModelSpec", "entrypoint"): {"pattern": ENTRYPOINT},
    ("EmbeddingSpec", "tables"): {"maxProperties": 64},
}

_KEPT = ("type", "format", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")
"""The keywords that structural schemas share with JSON schemas."""

_NUMBER_OR_WORD = {("CheckpointSpec", "quantization")}
"""Enumerations of which some values are numbers, which may be written as such."""

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Phase of the job"),
    ("Workers", "string", ".status.worker.summary", "Ready / desired workers"),
    ("PS", "string", ".status.ps.summary", "Ready / desired parameter servers"),
    ("Samples/s", "integer", ".status.progress.samplesPerSecond", "Recent throughput"),
    ("Progress", "string", ".status.progress.percent", "Share of all epochs' samples trained"),
    ("ETA", "string", ".status.progress.eta", "Time left at this throughput"),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation"),
)


def custom_resource_definition() -> dict[str, Any]:
    """The CustomResourceDefinition, as `kubectl apply` takes it."""
    schema = {
        "description": "A deep-learning recommendation model to train, and the processes that train it.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(TrainingJobSpec, bounded=True),
            "status": structural_schema(TrainingJobStatus, bounded=False),
        },
        "x-kubernetes-validations": [crd_rules.NAME],
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in _COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": columns,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.worker.replicas",
                "statusReplicasPath": ".status.worker.ready",
                "labelSelectorPath": ".status.selector",
            },
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": NAME,
            "labels": {"app.kubernetes.io/name": "emberscale", "app.kubernetes.io/part-of": "emberscale"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": "TrainingJobList",
                "plural": PLURAL,
                "singular": "trainingjob",
                "shortNames": ["tj"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def structural_schema(model: type[BaseModel], bounded: bool) -> dict[str, Any]:
    """The model's schema without references; `bounded` limits what the types leave unlimited."""
    document = model.model_json_schema(by_alias=True)
    definitions = document.pop("$defs", {})
    return _Inliner(definitions, bounded, _empty_parts(model)).object_of(model.__name__, document)


def _empty_parts(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The defaults of the sections of each type, by the type's name, for types that a section may have."""
    found = {}
    for field in model.model_fields.values():
        for part in models_in(field.annotation):
            found.update(_empty_parts(part))
            if isinstance(field.default, ManifestPart):
                found[part.__name__] = own_default(field.default).model_dump(mode="json", by_alias=True)
    return found


class _Inliner:
    def __init__(self, definitions: Mapping[str, Any], bounded: bool, empty: Mapping[str, dict[str, Any]]) -> None:
        self._definitions = definitions
        self._bounded = bounded
        self._empty = empty

    def object_of(self, type_name: str, source: Mapping[str, Any]) -> dict[str, Any]:
        properties = {name: self._field(type_name, name, field) for name, field in source["properties"].items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if "description" in source:
            schema["description"] = _described(source["description"])
        if "required" in source:
            schema["required"] = source["required"]
        if type_name in crd_rules.RULES:
            schema["x-kubernetes-validations"] = crd_rules.RULES[type_name]
        return schema

    def _field(self, type_name: str, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
        source = _without_null(source)
        if source.get("format") == QUANTITY:
            return _quantity(source)
        if source.get("format") == DURATION:
            schema = _duration(source, _DURATION_OF_CEL if type_name == "ShardingSpec" else _DURATION)
            return _or_auto(schema) if (type_name, name) in _DURATION_OR_AUTO else schema
        schema = self._convert(name, source)
        if (type_name, name) in _NUMBER_OR_WORD:
            return _number_or_word(schema)
        return {**schema, **_EXTRA.get((type_name, name), {})}

    def _convert(self, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
        source = _without_null(source)
        if "$ref" in source:
            type_name = source["$ref"].rpartition("/")[2]
            definition = self._definitions[type_name]
            if "properties" in definition:
                schema = self.object_of(type_name, definition)
                _take_field_defaults(schema, source.get("default") or {}, self._empty.get(type_name, {}))
                own = {field: part["default"] for field, part in definition["properties"].items() if "default" in part}
                _take_default(schema, source, own)
                schema["description"] = _described(source.get("description", schema.get("description", "")))
                return schema
            source = {**definition, **{key: value for key, value in source.items() if key != "$ref"}}
        schema = {key: source[key] for key in _KEPT if key in source}
        schema |= {key: value for key, value in source.items() if key.startswith("x-kubernetes-")}
        if "const" in source:
            schema["enum"] = [source["const"]]
        if "description" in source:
            schema["description"] = _described(source["description"])
        _take_bounds(schema, source)
        if source.get("default") not in (None, [], {}, ()):
            schema["default"] = _plain_number(source["default"])
        kind = source.get("type")
        if kind == "array":
            schema["items"] = self._convert(name, source["items"])
            if self._bounded:
                schema.setdefault("maxItems", _MAX_ITEMS)
        elif kind == "object" and isinstance(source.get("additionalProperties"), dict):
            schema["additionalProperties"] = self._convert(name, source["additionalProperties"])
            if self._bounded:
                schema.setdefault("maxProperties", _MAX_ITEMS)
        elif kind == "object" and schema.get("x-kubernetes-preserve-unknown-fields"):
            if name == "volumes":
                schema |= {"properties": {"name": {"type": "string", "maxLength": 253}}, "required": ["name"]}
        elif kind == "string" and self._bounded and "enum" not in schema and schema.get("format") is None:
            schema.setdefault("maxLength", _LONG_STRINGS.get(name, _MAX_STRING))
        elif kind == "integer" and self._bounded:
            schema["format"] = "int64"
        return schema


def _take_field_defaults(schema: dict[str, Any], given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Gives fields the defaults that a section has for them in place of their type's.

    The API server fills in the fields of a section that is given in part one by one.
    """
    for name, value in given.items():
        if value != own.get(name) and not isinstance(value, dict):
            schema["properties"][name]["default"] = _plain_number(value)


def _take_default(schema: dict[str, Any], source: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Gives an object a default of what differs from its fields' own defaults, which the API server fills in."""
    given = source.get("default")
    if given is None:
        return
    differing = {
        name: value
        for name, value in given.items()
        if name in own
        and not isinstance(value, dict)
        and value != own[name]
        and value not in (None, [])
        and "default" not in schema["properties"][name]
    }
    if differing or any("default" in field for field in schema["properties"].values()):
        schema["default"] = {name: _plain_number(value) for name, value in differing.items()}


def _without_null(source: Mapping[str, Any]) -> dict[str, Any]:
    if "anyOf" not in source:
        return dict(source)
    (kind,) = (option for option in source["anyOf"] if option.get("type") != "null")
    return {**{key: value for key, value in source.items() if key != "anyOf"}, **kind}


def _take_bounds(schema: dict[str, Any], source: Mapping[str, Any]) -> None:
    for bound in ("minimum", "maximum"):
        if bound in source:
            schema[bound] = source[bound]
        exclusive = f"exclusive{bound.capitalize()}"
        # a bound of an int64 at its very end is not a number that OpenAPI's float64 can hold
        if exclusive in source and source[exclusive] < 1 << 63:
            schema[bound] = source[exclusive]
            schema[exclusive] = True


def _number_or_word(schema: Mapping[str, Any]) -> dict[str, Any]:
    values = schema["enum"]
    numbers = ", ".join(value for value in values if value.isdecimal())
    return {
        "x-kubernetes-int-or-string": True,
        "pattern": f"^({'|'.join(values)})$",
        "maxLength": 32,
        "default": schema["default"],
        "description": schema["description"],
        "x-kubernetes-validations": [
            {"rule": f"type(self) != int || int(self) in [{numbers}]", "message": f"must be one of {', '.join(values)}"}
        ],
    }


def _quantity(source: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "x-kubernetes-int-or-string": True,
        "pattern": _QUANTITY,
        "maxLength": 32,
        "x-kubernetes-validations": [crd_rules.QUANTITY_RANGE],
    }
    if "description" in source:
        schema["description"] = _described(source["description"])
    if source.get("default") is not None:
        schema["default"] = source["default"]
    return schema


def _duration(source: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    zero = "minimum" in source or "ge" in source  # pydantic's own word, which stays where null is allowed
    schema: dict[str, Any] = {
        "x-kubernetes-int-or-string": True,
        "pattern": pattern,
        "maxLength": 32,
        "description": _described(
            f"{source.get('description', '').removesuffix('.')}. A duration such as 90s, 5m or 1h30m."
        ),
        "x-kubernetes-validations": [
            {
                "rule": f"type(self) != int || int(self) {'>=' if zero else '>'} 0",
                "message": "must not be negative" if zero else "must be above 0",
            }
        ],
    }
    if not zero:
        schema["x-kubernetes-validations"].append(
            {"rule": "type(self) == int || string(self).matches('[1-9]')", "message": "must be above 0"}
        )
    if source.get("default") is not None:
        schema["default"] = _plain_number(source["default"])
    return schema


def _or_auto(duration: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a duration that may also be AUTO_INTERVAL."""
    rules = duration["x-kubernetes-validations"]
    either = [{**rule, "rule": f"string(self) == '{AUTO_INTERVAL}' || {rule['rule']}"} for rule in rules]
    return {**duration, "pattern": f"^{AUTO_INTERVAL}$|{duration['pattern']}", "x-kubernetes-validations": either}


def _plain_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _described(text: str) -> str:
    """A docstring as one paragraph, with the names of fields as manifests spell them."""
    return re.sub("(?<=`)[a-z]+(?:_[a-z]+)+(?=`)", lambda name: to_camel(name[0]), " ".join(text.split()))


def to_yaml(document: Mapping[str, Any]) -> str:
    """Returns the definition in the format of `deploy/crd/`."""
    header = "# Generated by `make manifests` (python -m emberscale_api.job.crd); do not edit.\n"
    text: str = yaml.dump(document, Dumper=_AliasFreeDumper, sort_keys=False, width=120, allow_unicode=True)
    return header + text


class _AliasFreeDumper(yaml.SafeDumper):
    """Writes repeated parts in full: an alias would save lines and cost the reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    sys.stdout.write(to_yaml(custom_resource_definition()))
