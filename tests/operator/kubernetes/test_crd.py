"""The CustomResourceDefinition follows the types."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emberscale_api.job.crd import custom_resource_definition, to_yaml

GENERATED = Path(__file__).parents[3] / "deploy/crd/emberscale.io_trainingjobs.yaml"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, and where it is."""
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


def test_every_schema_is_structural() -> None:
    for path, schema in nodes(SCHEMA):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert not schema.keys() & {"$ref", "$defs", "anyOf", "allOf", "oneOf", "title", "const"}, path
        assert not isinstance(schema.get("exclusiveMinimum"), float | str), path


def test_what_rules_compare_is_bounded() -> None:
    for path, schema in nodes(SCHEMA["properties"]["spec"], "spec"):
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema, path


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
