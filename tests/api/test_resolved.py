"""From the manifest to columns and tables."""

from typing import Any

import pytest

from emberscale_api.job import (
    InitializerSpec,
    ManifestError,
    OptimizerType,
    Pooling,
    ResolvedModel,
    TrainingJob,
    resolve_model,
)
from emberscale_api.job.model import InitializerType
from training_jobs import training_job

COLUMNS = {
    "label": "clicked",
    "dense": ["price", "age"],
    "categorical": ["user", "item"],
    "lists": [{"name": "history", "maxLength": 50, "overflow": "Refuse"}, {"name": "tags"}],
}


def parsed(**spec: Any) -> TrainingJob:
    spec.setdefault("data", {"train": ["a.parquet"], "format": "Parquet", "columns": COLUMNS})
    return training_job(**spec)


def resolved(**spec: Any) -> ResolvedModel:
    return resolve_model(parsed(**spec).spec)


def test_every_column_of_ids_has_a_table_and_lists_come_last() -> None:
    model = resolved()
    assert model.columns.dense == ("price", "age")
    assert [table.name for table in model.tables] == ["user", "item", "history", "tags"]
    assert [table.number for table in model.tables] == [0, 1, 2, 3]
    assert [table.pooling for table in model.tables] == [None, None, Pooling.SUM, Pooling.SUM]


def test_criteo_has_fixed_columns() -> None:
    model = resolved(data={"train": ["a.tsv"]})
    assert [table.name for table in model.tables] == [f"C{number}" for number in range(1, 27)]
    assert len(model.columns.dense) == 13


def test_a_table_overrides_optimizer_initializer_and_pooling() -> None:
    tables = {
        "item": {"optimizer": {"type": "FTRL", "l1": 0.5}, "initializer": {"type": "Zeros"}},
        "tags": {"pooling": "Mean"},
    }
    model = resolved(model={"embeddings": {"tables": tables, "initializer": {"scale": 0.2}}})
    user, item, history, tags = model.tables
    assert (item.optimizer.type, item.optimizer.l1) == (OptimizerType.FTRL, 0.5)
    assert item.initializer.type is InitializerType.ZEROS
    assert user.initializer == InitializerSpec(scale=0.2)
    assert user.optimizer.type is OptimizerType.ROW_WISE_ADAGRAD
    assert (history.pooling, tags.pooling) == (Pooling.SUM, Pooling.MEAN)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"data": {"train": ["a"], "columns": COLUMNS}}, "whose columns are fixed"),
        ({"data": {"train": ["a"], "format": "CSV"}}, "columns is required for format CSV"),
        (
            {"data": {"train": ["a"], "format": "CSV", "columns": {"label": "a", "categorical": ["b", "a"]}}},
            "each column can be used once, but a is repeated",
        ),
        (
            {"data": {"train": ["a"], "format": "CSV", "columns": {"label": "a", "dense": ["b"]}}},
            "name at least one column in categorical or lists",
        ),
        (
            {"data": {"train": ["a"], "format": "CSV", "columns": {"label": "a", "lists": [{"name": "b", "x": 1}]}}},
            "spec.data.columns.lists.0.x: unknown field; allowed here: maxLength, name, overflow",
        ),
        ({"model": {"embeddings": {"tables": {"price": {}}}}}, "there are user, item, history, tags"),
        ({"model": {"embeddings": {"tables": {"user": {"pooling": "Mean"}}}}}, "lists are pooled"),
        ({"model": {"embeddings": {"tables": {"tags": {"dimension": 8}}}}}, "all dimensions must be equal"),
    ],
)
def test_what_contradicts_itself_is_refused_in_words(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as refused:
        parsed(**spec)
    assert words in str(refused.value)


def test_a_table_overrides_admission_and_eviction() -> None:
    tables = {"item": {"admission": {"minCount": 1}, "eviction": {"ttlBatches": 9}}, "tags": {"eviction": {}}}
    defaults = {"admission": {"minCount": 3}, "eviction": {"maxRows": 5000}}
    user, item, _, tags = resolved(model={"embeddings": {**defaults, "tables": tables}}).tables
    assert (user.admission.min_count, user.eviction.max_rows, user.eviction.ttl_batches) == (3, 5000, None)
    assert (item.admission.min_count, item.eviction.max_rows, item.eviction.ttl_batches) == (1, None, 9)
    assert (tags.admission.min_count, tags.eviction.removes_rows) == (3, False)


def test_every_id_has_a_row_for_ever_where_nothing_is_said() -> None:
    for table in resolved().tables:
        assert table.admission.min_count == 1
        assert not table.eviction.removes_rows


@pytest.mark.parametrize(
    ("embeddings", "field"),
    [
        ({"admission": {"minCount": 0}}, "admission.minCount"),
        ({"admission": {"minCount": 256}}, "admission.minCount"),
        ({"eviction": {"ttlBatches": 0}}, "eviction.ttlBatches"),
        ({"eviction": {"maxRows": 1023}}, "eviction.maxRows"),
        ({"eviction": {"ttl": "24h"}}, "eviction.ttl"),
        ({"tables": {"user": {"eviction": {"maxRows": 1}}}}, "tables.user.eviction.maxRows"),
        ({"tables": {"nobody": {"admission": {"minCount": 2}}}}, "tables.nobody"),
    ],
)
def test_admission_and_eviction_that_cannot_be_are_refused_by_their_field(embeddings: Any, field: str) -> None:
    with pytest.raises((ManifestError, ValueError), match=rf"spec\.model\.embeddings\.{field}"):
        resolved(model={"embeddings": embeddings})
