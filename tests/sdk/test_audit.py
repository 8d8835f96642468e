"""Counting how often each sample was applied."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale._run.audit import (
    AuditReport,
    Counts,
    Runs,
    ServerRecord,
    audit_applied,
    contradictions_of,
    with_forgotten,
)
from emberscale_api.checkpoint import EpochApplied, ForgottenShare

APPLIED = st.dictionaries(st.integers(0, 12), st.integers(1, 3), max_size=12)
"""The number of times that each batch was applied."""


def as_runs(applied: dict[int, int]) -> Runs:
    """Returns runs of equal counts, as a server writes them."""
    runs: list[tuple[int, int, int]] = []
    for batch, times in sorted(applied.items()):
        if runs and runs[-1][1] == batch and runs[-1][2] == times:
            runs[-1] = (runs[-1][0], batch + 1, times)
        else:
            runs.append((batch, batch + 1, times))
    return runs


def test_every_batch_once_on_every_server_is_exact() -> None:
    counts = audit_applied(1000, 64, 1, [{0: [(0, 16, 1)]}, {0: [(0, 5, 1), (5, 16, 1)]}])
    assert counts == {0: Counts(missing=0, once=1000, repeated=0)}


def test_a_batch_that_one_server_missed_is_missing() -> None:
    counts = audit_applied(1000, 64, 1, [{0: [(0, 16, 1)]}, {0: [(0, 3, 1), (4, 16, 1)]}])
    assert counts == {0: Counts(missing=64, once=936, repeated=0)}


def test_the_last_batch_counts_only_the_samples_that_it_has() -> None:
    assert audit_applied(1000, 64, 1, [{0: [(0, 15, 1)]}]) == {0: Counts(missing=40, once=960)}
    assert audit_applied(1000, 64, 1, [{0: [(0, 15, 1), (15, 16, 2)]}]) == {0: Counts(once=960, repeated=40)}


def test_an_epoch_that_no_server_knows_is_missing_whole() -> None:
    assert audit_applied(100, 10, 2, [{0: [(0, 10, 1)]}])[1] == Counts(missing=100)


def test_what_is_missed_by_one_and_repeated_by_another_is_both() -> None:
    counts = audit_applied(20, 10, 1, [{0: [(0, 1, 2), (1, 2, 1)]}, {0: [(1, 2, 1)]}])
    assert counts == {0: Counts(missing=10, once=10, repeated=10)}


@pytest.mark.parametrize(
    ("applied", "expected"),
    [
        ({0: [(0, 3, 1)]}, {0: Counts(once=20, repeated=10)}),
        ({0: [(0, 1, 1), (2, 3, 1)]}, {0: Counts(missing=10, once=10, repeated=10)}),
        ({0: [(0, 2, 1)], 1: [(0, 1, 1)]}, {0: Counts(once=20), 1: Counts(repeated=10)}),
    ],
)
def test_batches_that_do_not_exist_count_as_repeated_and_make_up_for_none(
    applied: dict[int, Runs], expected: dict[int, Counts]
) -> None:
    assert audit_applied(20, 10, 1, [applied]) == expected


def test_without_servers_all_is_missing() -> None:
    assert audit_applied(20, 10, 1, []) == {0: Counts(missing=20)}


@given(st.integers(1, 120), st.integers(1, 16), st.lists(APPLIED, min_size=1, max_size=3))
def test_runs_are_counted_as_samples_one_by_one_would_be(
    records: int, batch_size: int, servers: list[dict[int, int]]
) -> None:
    batches = -(-records // batch_size)
    servers = [{batch: times for batch, times in server.items() if batch < batches} for server in servers]
    expected: Counter[str] = Counter()
    for sample in range(records):
        times = [server.get(sample // batch_size, 0) for server in servers]
        expected["missing"] += min(times) == 0
        expected["once"] += all(count == 1 for count in times)
        expected["repeated"] += max(times) > 1
    (found,) = audit_applied(records, batch_size, 1, [{0: as_runs(server)} for server in servers]).values()
    assert found == Counts(**{name: expected[name] for name in ("missing", "once", "repeated")})


def test_the_document_adds_the_epochs_up() -> None:
    report = AuditReport({1: Counts(once=5), 0: Counts(missing=1, once=4)}, (), "00000007", 2)
    assert report.as_document() == {
        "missing": 1,
        "once": 9,
        "repeated": 0,
        "forgotten": 0,
        "epochs": [
            {"epoch": 0, "missing": 1, "once": 4, "repeated": 0, "forgotten": 0},
            {"epoch": 1, "missing": 0, "once": 5, "repeated": 0, "forgotten": 0},
        ],
        "contradictions": [],
        "pls": 0.0,
        "forgotten_shares": [],
        "checkpoint": "00000007",
        "ps_count": 2,
        "origin": None,
    }
    assert not report.total.exact


def share(*ranges: tuple[int, int], pieces: tuple[int, int] = (0, 1)) -> ForgottenShare:
    """Returns the share of a partial recovery that made one piece and the first half of all buckets forget batches."""
    return ForgottenShare(
        servers=(0,),
        checkpoint="00000001",
        epochs=(EpochApplied(epoch=0, ranges=ranges),),
        samples=10,
        buckets=((0, 512),),
        pieces=(pieces,),
        pls=0.05,
    )


def test_what_is_forgotten_is_counted_once_and_is_neither_missing_nor_exact() -> None:
    shares = (share((2, 5)), share((3, 10)))
    counts = with_forgotten(audit_applied(95, 10, 1, [{0: [(0, 10, 1)]}]), shares, 95, 10)
    assert counts == {0: Counts(once=95, forgotten=75)}
    report = AuditReport(counts, (), "00000001", 1, shares)
    assert report.accounted
    assert not report.total.exact
    assert report.pls == pytest.approx(0.1)


def test_a_piece_must_lack_the_steps_that_it_forgot_and_no_others() -> None:
    applied: dict[int, Runs] = {0: [(0, 10, 1)]}
    shares = (share((2, 5)), share((3, 6)))
    assert contradictions_of([ServerRecord(applied, {0: 6, 1: 10})], shares) == ()
    for steps in ({0: 10, 1: 10}, {0: 7, 1: 10}, {0: 6, 1: 6}):
        assert contradictions_of([ServerRecord(applied, steps)], shares)
    (line,) = contradictions_of([ServerRecord(applied, {0: 5})], shares)
    assert line == "ps-0 recorded 10 pushes and forgot 4, but dense piece 0 took 5 steps"
