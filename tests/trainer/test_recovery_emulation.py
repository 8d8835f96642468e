"""How the benchmark of partial recovery counts lost samples."""

import pytest

from recovery_emulation import Failure, Plan, lost_samples

ONCE, TWICE = (Failure(6, (0,)),), (Failure(7, (0,)), Failure(6, (0,)))


@pytest.mark.parametrize(
    ("failures", "as_printed", "lost"),
    [
        (ONCE, False, 1),
        (ONCE, True, 1),  # saves come before batches 3, 5 and 8
        (TWICE, False, 1 + 1),
        (TWICE, True, 1 + 2),  # the loss before batch 6 counts again
        ((Failure(6, (0, 1)), Failure(7, (2,))), False, 1 + 1 + 2),
        ((Failure(5, (0,)),), False, 0),
    ],
)
def test_a_server_loses_once_what_it_learnt_since_the_last_save_or_again_as_equation_3_is_printed(
    failures: tuple[Failure, ...], as_printed: bool, lost: int
) -> None:
    plan = Plan(servers=4, interval=2.5, failures=failures)
    assert lost_samples(plan, 10, as_printed=as_printed) == pytest.approx(lost / 40)
