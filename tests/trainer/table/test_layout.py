import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.job import OptimizerType
from emberscale_trainer.table import RowLayout
from emberscale_trainer.table.layout import state_floats


@pytest.mark.parametrize(
    ("optimizer", "floats"),
    [
        (OptimizerType.SGD, 0),
        (OptimizerType.MOMENTUM, 16),
        (OptimizerType.ADAGRAD, 16),
        (OptimizerType.ROW_WISE_ADAGRAD, 1),
        (OptimizerType.ADAM, 33),
        (OptimizerType.FTRL, 32),
    ],
)
def test_each_rule_keeps_its_state(optimizer: OptimizerType, floats: int) -> None:
    assert state_floats(optimizer, 16) == floats


@given(dimension=st.integers(1, 4096), state=st.integers(0, 9000))
def test_a_record_holds_its_fields_without_overlap(dimension: int, state: int) -> None:
    layout = RowLayout(dimension, state)
    assert layout.stride % 8 == 0
    assert 0 <= layout.stride - (8 + 4 * dimension + 4 * state + 4) < 8
    assert layout.dtype.itemsize == layout.stride


def test_fields_are_a_view_of_the_records() -> None:
    layout = RowLayout(dimension=3, state=1)
    records = layout.empty(2)
    fields = layout.fields(records)
    fields["key"] = [-1, 5]
    fields["weights"][1] = [1, 2, 3]
    fields["state"][1] = 4
    fields["pushes"][1] = 9
    assert records[0, :8].tobytes() == b"\xff" * 8
    assert (
        records[1].tobytes()
        == np.int64(5).tobytes()
        + np.array([1, 2, 3, 4], "<f4").tobytes()
        + np.array([9, 0], "<u4").tobytes()[: layout.stride - 24]
    )
