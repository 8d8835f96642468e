"""TableStore against a dict of rows, under any sequence of calls."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberscale_api.job import OptimizerType, TableSpec
from emberscale_api.routing import bucket_of
from emberscale_trainer.table import TableStore, Tracker

RATE = np.float32(0.1)
DIMENSIONS = (3, 8)

# few keys, so that calls meet the same rows; some of them in one bucket
SHARED_BUCKET = [key for key in range(20_000) if bucket_of(key) == 5][:12]
KEYS = st.one_of(st.sampled_from(SHARED_BUCKET), st.integers(-20, 20))
REQUEST = st.tuples(st.lists(KEYS, max_size=8), st.lists(KEYS, max_size=8))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), REQUEST),
        st.tuples(st.just("push"), REQUEST),
        st.tuples(st.just("load"), REQUEST),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("forget"), st.none()),
    ),
    max_size=25,
)


class Model:
    """What a store of SGD tables must do, row by row in numpy."""

    def __init__(self, specs: list[TableSpec], initial_weights: Any) -> None:
        self.specs = specs
        self.initial_weights = initial_weights
        self.rows: list[dict[int, tuple[NDArray[np.float32], int]]] = [{} for _ in specs]
        self.changed: list[set[int]] = [set() for _ in specs]

    def weights(self, table: int, key: int) -> NDArray[np.float32]:
        row = self.rows[table].get(key)
        weights: NDArray[np.float32] = self.initial_weights(self.specs[table], key) if row is None else row[0]
        return weights

    def step(self, table: int, key: int, gradient: NDArray[np.float32]) -> None:
        _, pushes = self.rows[table].get(key, (None, 0))
        self.put(table, key, self.weights(table, key) - RATE * gradient, pushes + 1)

    def put(self, table: int, key: int, weights: NDArray[np.float32], pushes: int) -> None:
        self.rows[table][key] = (weights, pushes)
        self.changed[table].add(key)

    def remove(self, bucket: int) -> None:
        for rows, changed in zip(self.rows, self.changed, strict=True):
            for key in [key for key in rows if bucket_of(key) == bucket]:
                del rows[key]
                changed.discard(key)


@pytest.fixture
def specs(make_spec: Any) -> list[TableSpec]:
    return [
        make_spec(number, dimension, OptimizerType.SGD, learning_rate=float(RATE))
        for number, dimension in enumerate(DIMENSIONS)
    ]


@given(calls=CALLS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_store_behaves_like_a_dict_of_rows(
    specs: list[TableSpec], initial_weights: Any, rows_of: Any, calls: list[tuple[str, Any]], seed: int
) -> None:
    store, model, random = TableStore(specs), Model(specs, initial_weights), np.random.default_rng(seed)
    for call, argument in calls:
        if call in ("pull", "push"):
            counts = np.array([len(keys) for keys in argument], np.uint32)
            keys = np.array([key for table in argument for key in table], np.int64)
            values = random.standard_normal(store.values_per_request(counts)).astype(np.float32)
            named = [(table, key) for table, keys_of_table in enumerate(argument) for key in keys_of_table]
            ends = np.cumsum([DIMENSIONS[table] for table, _ in named])
            if call == "push":
                store.push(counts, keys, values)
                for (table, key), gradient in zip(named, np.split(values, ends[:-1]), strict=bool(named)):
                    model.step(table, key, gradient)
            else:
                store.pull(counts, keys, values)
                for (table, key), answer in zip(named, np.split(values, ends[:-1]), strict=bool(named)):
                    assert np.array_equal(answer, model.weights(table, key))
        elif call == "load":
            for table, keys_of_table in enumerate(argument):
                layout = store.layouts[table]
                records = layout.empty(len(keys_of_table))
                fields = layout.fields(records)
                fields["key"] = keys_of_table
                fields["weights"] = random.standard_normal(fields["weights"].shape)
                fields["pushes"] = 7
                store.load(table, records)
                for record in fields:
                    model.put(table, int(record["key"]), record["weights"].copy(), 7)
        elif call == "remove":
            for table in range(len(specs)):
                store.remove_bucket(table, bucket_of(argument))
            model.remove(bucket_of(argument))
        else:
            store.forget_changes(Tracker.CHECKPOINT)
            model.changed = [set() for _ in specs]

    for table, spec in enumerate(specs):
        assert store.rows()[spec.name] == len(model.rows[table])
        assert set(rows_of(store, table, changed_for=Tracker.CHECKPOINT)) == model.changed[table]
        found = rows_of(store, table)
        assert set(found) == set(model.rows[table])
        for key, (weights, pushes) in model.rows[table].items():
            assert np.array_equal(found[key][0], weights)
            assert found[key][2] == pushes
