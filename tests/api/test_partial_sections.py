"""A section with only some fields keeps the defaults of all others, at any depth."""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import annotated_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from emberscale_api.job import ManifestError, TrainingJob, TrainingJobSpec, resolve_model
from emberscale_api.job.crd import custom_resource_definition
from emberscale_api.job.manifest import models_in
from emberscale_api.job.schema import ManifestPart
from training_jobs import training_job

SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
SPEC: dict[str, Any] = {"data": {"train": ["a.tsv"]}}
Path = tuple[str, ...]


def parsed(spec: Mapping[str, Any]) -> TrainingJob:
    return training_job(**spec)


def leaves(model: type[ManifestPart], path: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yields the path of every single value that a manifest may give by names alone, and its field."""
    for field in model.model_fields.values():
        parts = models_in(field.annotation)
        here = (*path, field.alias or "")
        if isinstance(field.default, ManifestPart) or here in (("data",), ("optimizers", "wide")):
            (part,) = parts
            assert issubclass(part, ManifestPart)
            yield from leaves(part, here)
        elif field.annotation is not None and not parts and _values(field):
            yield here, field


def _values(field: FieldInfo) -> list[Any]:
    """Returns a few valid values of the field."""
    kinds = getattr(field.annotation, "__args__", None) or (field.annotation,)
    kind = next(kind for kind in kinds if kind is not type(None))
    kind = getattr(kind, "__origin__", kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [one.value for one in kind]
    if kind is bool:
        return [True, False]
    if kind not in (int, float):
        return []
    metadata = [*field.metadata, *(item for one in kinds for item in getattr(one, "__metadata__", ()))]
    bounds = [one for item in metadata for one in getattr(item, "metadata", [item])]
    low: float = next((float(str(one.ge)) for one in bounds if isinstance(one, annotated_types.Ge)), 0)
    high: float = next((float(str(one.le)) for one in bounds if isinstance(one, annotated_types.Le)), math.inf)
    numbers = [low + 1, low + 3] if kind is int else [0.125, 0.25, 0.5]
    return [kind(number) for number in numbers if low <= number <= high]


LEAVES = [(path, field) for path, field in leaves(TrainingJobSpec) if path not in (("model", "architecture"),)]


def test_the_schema_has_values_at_every_depth() -> None:
    paths = [".".join(path) for path, _ in LEAVES]
    assert len(paths) > 60
    assert {"optimizers.sparse.learningRate", "optimizers.wide.l1", "model.embeddings.initializer.scale"} <= set(paths)
    assert {"suspend", "data.csv.header", "training.batchSize"} <= set(paths)


def put(document: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        document = document.setdefault(key, {})
    document[path[-1]] = value


def copied(document: Any) -> Any:
    return {key: copied(value) for key, value in document.items()} if isinstance(document, dict) else document


def outcome(spec: Mapping[str, Any]) -> TrainingJob | None:
    try:
        return parsed(spec)
    except ManifestError:
        return None


@st.composite
def settings(draw: st.DrawFn) -> dict[Path, Any]:
    chosen = draw(st.lists(st.sampled_from(range(len(LEAVES))), min_size=1, max_size=3, unique=True))
    return {LEAVES[number][0]: draw(st.sampled_from(_values(LEAVES[number][1]))) for number in chosen}


@given(settings())
def test_a_partial_section_is_the_whole_default_with_those_fields_set(chosen: dict[Path, Any]) -> None:
    partial = copied(SPEC)
    whole = parsed(SPEC).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    for path, value in chosen.items():
        put(partial, path, value)
        put(whole, path, value)
    assert outcome(partial) == outcome(whole)


def filled_in(schema: Mapping[str, Any], document: Any) -> Any:
    """Fills in the defaults of absent fields as the API server does, from the outside in."""
    if not isinstance(document, dict):
        return document
    properties = schema.get("properties", {})
    filled = {**{name: copied(one["default"]) for name, one in properties.items() if "default" in one}, **document}
    inner = schema.get("additionalProperties", {})
    return {name: filled_in(properties.get(name, inner), value) for name, value in filled.items()}


@given(settings())
def test_a_cluster_fills_in_the_same_defaults(chosen: dict[Path, Any]) -> None:
    partial = copied(SPEC)
    for path, value in chosen.items():
        put(partial, path, value)
    assert outcome(filled_in(SCHEMA, partial)) == outcome(partial)


@pytest.mark.parametrize("cluster", [False, True])
def test_a_table_and_the_wide_part_change_what_is_said_of_them_and_nothing_else(cluster: bool) -> None:
    spec = {
        **SPEC,
        "model": {
            "architecture": "WideAndDeep",
            "embeddings": {
                "initializer": {"type": "Normal", "scale": 0.3},
                "tables": {"C1": {"optimizer": {"learningRate": 0.5}, "initializer": {"scale": 0.1}}},
            },
        },
        "optimizers": {"sparse": {"type": "Adam", "beta1": 0.7}, "wide": {"l1": 0.25}},
    }
    job = parsed(filled_in(SCHEMA, spec) if cluster else spec)
    for travelled in (job, TrainingJob.from_json(job.to_json())):
        model = resolve_model(travelled.spec)
        first, second = model.embeddings[:2]
        assert first.optimizer == second.optimizer.model_copy(update={"learning_rate": 0.5})
        assert (first.optimizer.type, first.optimizer.beta1) == ("Adam", 0.7)
        assert (first.initializer.type, first.initializer.scale) == ("Normal", 0.1)
        assert model.tables[len(model.embeddings)].optimizer == second.optimizer.model_copy(update={"l1": 0.25})
