"""The CustomResourceDefinition follows the types."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberscale_api.job import ManifestError, TrainingJobSpec, parse_manifest
from emberscale_api.job.crd import custom_resource_definition, to_yaml
from emberscale_api.job.manifest import apply_overrides
from training_jobs import job_body

GENERATED = Path(__file__).parents[3] / "deploy/crd/emberscale.io_trainingjobs.yaml"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every schema within a schema, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def test_the_definition_that_is_kept_is_the_one_that_the_types_give() -> None:
    assert GENERATED.read_text(encoding="utf-8") == to_yaml(custom_resource_definition()), (
        "deploy/crd differs from api/emberscale_api/job: run `make manifests`"
    )


def filled_in(schema: dict[str, Any], value: Any) -> Any:
    """Returns what the API server stores of a value: it fills in the defaults of missing fields."""
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    whole = {name: field["default"] for name, field in fields.items() if "default" in field} | value
    return {name: filled_in(fields.get(name, {}), part) for name, part in whole.items()}


def values(document: Any, path: str = "spec") -> Iterator[tuple[str, Any]]:
    """Yields every value of a document with its path, except those that say nothing."""
    if isinstance(document, dict):
        for name, part in document.items():
            yield from values(part, f"{path}.{name}")
    elif document not in (None, []):
        yield path, document


def test_the_api_server_fills_in_every_default_of_the_types() -> None:
    spec = job_body()["spec"]
    stored = filled_in(SCHEMA["properties"]["spec"], spec)
    of_types = TrainingJobSpec.model_validate(spec).model_dump(mode="json", by_alias=True)
    assert dict(values(stored)) == dict(values(of_types))


def test_descriptions_name_fields_as_manifests_spell_them() -> None:
    named = {path: re.findall(r"`\w+_\w+`", schema.get("description", "")) for path, schema in nodes(SCHEMA)}
    assert {path: names for path, names in named.items() if names} == {}
    assert "the start is `minReplicas`" in SCHEMA["properties"]["spec"]["properties"]["ps"]["description"]


def test_every_schema_is_structural() -> None:
    found = list(nodes(SCHEMA))
    assert "spec.data.columns.categorical[]" in [path.removeprefix(".") for path, _ in found]
    for path, schema in found:
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert not schema.keys() & {"$ref", "$defs", "anyOf", "allOf", "oneOf", "title", "const"}, path
        assert not isinstance(schema.get("exclusiveMinimum"), float | str), path


def test_what_rules_compare_is_bounded() -> None:
    found = list(nodes(SCHEMA["properties"]["spec"], "spec"))
    assert {"array", "string"} <= {schema.get("type") for _, schema in found}
    for path, schema in found:
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema, path


def numbers_of_sections() -> Iterator[str]:
    for section, schema in SCHEMA["properties"]["spec"]["properties"].items():
        for name, field in schema.get("properties", {}).items():
            if field.get("type") in ("integer", "number"):
                yield f"spec.{section}.{name}"


@pytest.mark.parametrize("path", list(numbers_of_sections()))
def test_a_field_that_takes_a_duration_takes_it_in_words_on_a_cluster_too(path: str) -> None:
    with pytest.raises(ManifestError, match=path):
        parse_manifest(apply_overrides(job_body(), [f"{path}=90s"]))


def test_the_example_of_the_docs_for_scaling_is_taken() -> None:
    scaling = SCHEMA["properties"]["spec"]["properties"]["scaling"]["properties"]
    assert all(scaling[name]["x-kubernetes-int-or-string"] for name in ("profileInterval", "cooldown"))
    assert TrainingJobSpec.model_validate(job_body(scaling={"profileInterval": "15s"})["spec"]).scaling.cooldown == 60


QUANTITIES = (
    "checkpoint.flash.maxBytes",
    "checkpoint.writeBandwidth",
    "hotEmbeddings.budget",
    "ps.resources.limits.memory",
    "worker.resources.requests.cpu",
)


@pytest.mark.parametrize("path", QUANTITIES)
def test_a_quantity_has_the_range_of_the_types_on_a_cluster_too(path: str) -> None:
    """A number or a text there as in a manifest; the rule's limits are those at which the types refuse it."""
    schema = SCHEMA["properties"]["spec"]
    for name in path.split("."):
        schema = schema["properties"][name]
    assert schema["x-kubernetes-int-or-string"]
    (rule,) = schema["x-kubernetes-validations"]
    least, most = re.findall(r"isGreaterThan\(quantity\('(\w+)'\)\)", rule["rule"])
    for refused in (least, f"{most[:-2]}.1{most[-2:]}"):
        with pytest.raises(ValueError, match=r"must be (above 0|at most 8Pi)"):
            TrainingJobSpec.model_validate(apply_overrides(job_body(), [f"spec.{path}={refused}"])["spec"])
    TrainingJobSpec.model_validate(apply_overrides(job_body(), [f"spec.{path}={most}"])["spec"])
    assert rule["message"] == f"must be above {least} and at most {most}"


def test_conditions_are_a_map_by_type() -> None:
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert set(conditions["items"]["properties"]) == {
        "type",
        "status",
        "observedGeneration",
        "lastTransitionTime",
        "reason",
        "message",
    }
