from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberscale_api.job import TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_trainer.table import TableStore

KEYS = st.integers(-(2**63), 2**63 - 1)

Pull = Callable[..., NDArray[np.float32]]


@given(
    keys=st.lists(KEYS, min_size=1, max_size=5, unique=True),
    dimension=st.integers(1, 20),
    kind=st.sampled_from(InitializerType),
    seed=st.integers(0, 2**40),
    number=st.integers(0, 100),
)
@settings(max_examples=50)
def test_a_fresh_row_has_the_weights_of_the_definition(
    make_spec: Any,
    pull: Pull,
    initial_weights: Callable[[TableSpec, int], NDArray[np.float32]],
    keys: list[int],
    dimension: int,
    kind: InitializerType,
    seed: int,
    number: int,
) -> None:
    spec = make_spec(number=number, dimension=dimension, initializer=kind, scale=0.5, seed=seed)
    expected = np.concatenate([initial_weights(spec, key) for key in keys])
    # the two math libraries may differ in the last bit
    np.testing.assert_allclose(pull(TableStore([spec]), keys), expected, rtol=3e-7, atol=1e-12)


@given(keys=st.lists(KEYS, min_size=1, max_size=30, unique=True), data=st.data())
@settings(max_examples=30)
def test_weights_do_not_depend_on_order_or_on_the_number_of_servers(
    make_spec: Any, pull: Pull, keys: list[int], data: st.DataObject
) -> None:
    spec = make_spec(dimension=6)
    alone = dict(zip(keys, pull(TableStore([spec]), keys).reshape(-1, 6), strict=True))
    servers = [TableStore([spec]) for _ in range(3)]
    for key in data.draw(st.permutations(keys)):
        assert np.array_equal(pull(servers[key % 3], [key]), alone[key])


@pytest.mark.parametrize("kind", [InitializerType.UNIFORM, InitializerType.NORMAL])
def test_weights_follow_the_distribution(make_spec: Any, pull: Pull, kind: InitializerType) -> None:
    weights = pull(TableStore([make_spec(dimension=15, initializer=kind, scale=0.2)]), range(20_000)).reshape(-1, 15)
    deviation = 0.2 if kind is InitializerType.NORMAL else 0.2 / np.sqrt(3)
    assert abs(weights.mean()) < 0.002
    assert abs(weights.std() - deviation) < 0.002
    # elements of a row are independent
    correlation = np.corrcoef(weights, rowvar=False) - np.eye(15)
    assert np.abs(correlation).max() < 0.04
    if kind is InitializerType.UNIFORM:
        assert np.abs(weights).max() <= np.float32(0.2)


def test_seeds_tables_and_keys_give_different_weights(make_spec: Any, pull: Pull) -> None:
    store = TableStore([make_spec(number=0, seed=1), make_spec(number=1, seed=1), make_spec(number=0, seed=2)])
    rows = pull(store, [1, 2], [1, 2], [1, 2]).reshape(6, -1)
    assert len(np.unique(rows)) == rows.size


def test_a_row_begins_with_the_weights_that_a_pull_before_it_is_answered_with(
    make_spec: Any, pull: Pull, push: Callable[..., None]
) -> None:
    store = TableStore([make_spec(), make_spec(number=1, dimension=9)])
    answered = pull(store, [3, -4], [5])
    assert store.rows() == {"C1": 0, "C2": 0}
    push(store, ([3, -4], np.zeros(8)), ([5], np.zeros(9)))
    assert store.rows() == {"C1": 2, "C2": 1}
    assert np.array_equal(pull(store, [3, -4], [5]), answered)
