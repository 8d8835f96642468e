"""When rounds pay: what is measured, what is compared, and how often."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_trainer.worker.pace import Comparison, RoundPace, RoutingVersion, Stretch, StretchTimer

TABLE = (1, 1)
FIRST = 1_795_519_460_487_930
"""Tokens begin with the time."""

SPEED = st.floats(0.1, 1e6)


def stretch(in_rounds: bool, speed: float, token: int = 0, routing: RoutingVersion = TABLE) -> Stretch:
    """Returns a stretch, one half of a measured speed."""
    return Stretch(in_rounds, token, 8, 1_000_000, 1_000_000 / speed + 1, routing)


def speed_of(one: Stretch) -> float:
    return one.samples / one.seconds


def always(speed: float) -> Callable[[int], float]:
    return lambda _: speed


class Job:
    """The only worker of a job; `singles` and `rounds` are its speeds by token."""

    def __init__(self, singles: Callable[[int], float], rounds: Callable[[int], float], first: int = FIRST) -> None:
        self.pace = RoundPace()
        self.token = first
        self.verdicts: list[tuple[int, bool]] = []
        self.due: list[int] = []
        self.kinds: list[bool] = []
        self._speeds = (singles, rounds)

    def train(self, leases: int, *, each: int = 1) -> None:
        """Trains leases with one measured speed each; their tokens are `each` apart."""
        for _ in range(leases):
            if self.pace.begin_lease(self.token):
                self.due.append(self.token)
            in_rounds = self.pace.admits
            if in_rounds:
                self.pace.begin_rounds()
            self.kinds.append(in_rounds)
            for _ in range(2):
                found = self.pace.measured(stretch(in_rounds, self._speeds[in_rounds](self.token), self.token))
                if found is not None:
                    self.verdicts.append((self.token, found.pays))
            self.token += each

    def compare(self, times: int) -> None:
        """Trains until the end of `times` comparisons."""
        while len(self.verdicts) < times:
            self.train(1)


class TestPace:
    @given(SPEED, SPEED)
    def test_rounds_stay_just_where_they_are_as_fast(self, singles: float, rounds: float) -> None:
        job = Job(always(singles), always(rounds))
        job.train(7)
        ratio = speed_of(stretch(True, rounds)) / speed_of(stretch(False, singles))
        assert job.kinds[:6] == [False] * 3 + [True] * 3
        assert job.kinds[6] == (round(ratio, 2) >= 1)

    @given(SPEED, st.integers(0, 2), st.integers(0, 2))
    def test_one_odd_speed_of_each_kind_changes_no_verdict(self, odd: float, of_singles: int, of_rounds: int) -> None:
        job = Job(
            lambda token: odd if token == FIRST + of_singles else 1000,
            lambda token: odd if token == FIRST + 3 + of_rounds else 800,
        )
        job.train(7)
        assert job.verdicts == [(FIRST + 5, False)]

    @given(st.lists(SPEED, min_size=1), st.lists(SPEED, min_size=1), st.integers(1, 20))
    def test_whatever_is_measured_comparisons_come_ever_more_rarely(
        self, singles: list[float], rounds: list[float], each: int
    ) -> None:
        job = Job(lambda token: singles[token % len(singles)], lambda token: rounds[token % len(rounds)])
        job.train(1500, each=each)
        begun = [FIRST, *job.due]
        for before, (ended, _), after in zip(begun, job.verdicts, job.due, strict=False):
            assert after - before > min(max(64, (before - FIRST) / 4), 1 << 13) - each
            assert after - ended > ended - before - each
        assert 1 <= len(job.verdicts) <= 2 + math.log(1500 * each, 1.25)

    def test_most_comparisons_of_the_workers_of_a_job_begin_together(self) -> None:
        together, all_ = 0, 0
        for before in range(0, 640, 27):
            workers = 2 + before % 7
            jobs = [Job(always(1000), always(500 + 200 * one), FIRST + before + one) for one in range(workers)]
            for job in jobs:
                job.train(2000 // workers, each=workers)
            begun = [{due // workers for due in job.due} for job in jobs]
            for due in set().union(*begun):
                all_ += 1
                together += all({due - 1, due, due + 1} & one for one in begun)
        assert together > 0.8 * all_ > 60

    @given(st.floats(0.9, 0.99), st.floats(0.1, 0.89))
    def test_rounds_that_were_as_fast_may_be_somewhat_slower_later_and_no_more(self, some: float, much: float) -> None:
        share = 1.0
        job = Job(always(1000), lambda _: share * 1000)
        job.compare(1)
        share = some + 0.005
        job.compare(2)
        share = much
        job.compare(3)
        assert [pays for _, pays in job.verdicts] == [True, True, False]
        fresh = Job(always(1000), lambda _: some * 1000)
        fresh.train(6)
        assert [pays for _, pays in fresh.verdicts] == [False]

    def test_speeds_under_another_routing_table_are_not_compared(self) -> None:
        job = Job(always(1000), always(500))
        job.train(5)
        assert job.pace.measured(stretch(True, 500, 5, (1, 2))) is None
        assert not job.pace.admits
        for _ in range(6):
            job.pace.measured(stretch(False, 400, 6, (1, 2)))
        job.pace.begin_rounds()
        found = [job.pace.measured(stretch(True, 500, 7, (1, 2))) for _ in range(6)]
        assert [one is not None and one.pays for one in found] == [False] * 5 + [True]

    def test_rounds_that_begin_late_in_a_job_are_compared_again_as_soon_as_any(self) -> None:
        job = Job(always(1000), always(1500))
        job.pace.begin_lease(FIRST - 1_000_000)
        job.train(20_000)
        assert len(job.verdicts) > 1

    def test_what_ends_rounds_otherwise_has_both_speeds_measured_again(self) -> None:
        job = Job(always(1000), always(1000))
        job.train(10)
        job.pace.rest()
        assert job.pace.pending
        job.train(7)
        assert job.kinds[10:] == [False] * 3 + [True] * 4
        assert len(job.verdicts) == 2

    def test_rounds_that_were_given_up_for_their_speed_do_not_come_back_early(self) -> None:
        job = Job(always(1000), always(500))
        job.train(6)
        job.pace.rest()
        assert job.pace.given_up

    def test_a_few_batches_or_a_moment_are_no_speed(self) -> None:
        for batches, seconds in ((1, 60.0), (64, 0.001)):
            pace = RoundPace()
            for _ in range(15):
                pace.measured(Stretch(False, 1, batches, 100, seconds, TABLE))
            assert not pace.admits

    @given(SPEED, SPEED)
    def test_what_people_are_told_agrees_with_what_was_decided(self, rounds: float, singles: float) -> None:
        found = Comparison(rounds, singles, 1.0)
        told = float(str(found).split("(")[1].split("x")[0])
        assert (told >= 1) == found.pays
        assert str(found).endswith("1x or more pays)" if found.pays else "1x or more would pay)")


class TestTimer:
    def timer(self, *times: float) -> StretchTimer:
        return StretchTimer(iter(times).__next__)

    def test_a_stretch_lasts_from_one_commit_to_the_next(self) -> None:
        timer = self.timer(10.0, 11.5, 14.0)
        assert [timer.commit(1, 0.0, False, TABLE) for _ in range(3)] == [None, 1.5, 2.5]

    @pytest.mark.parametrize(
        ("token", "granted", "in_rounds", "routing", "counts"),
        [
            (1, 11.0, False, TABLE, True),
            (2, 9.0, False, TABLE, True),
            (2, 11.0, False, TABLE, False),
            (2, math.inf, False, TABLE, False),
            (1, 0.0, True, TABLE, False),
            (1, 0.0, False, (1, 2), False),
            (1, 0.0, False, (2, 1), False),
        ],
    )
    def test_only_training_of_one_kind_counts(
        self, token: int, granted: float, in_rounds: bool, routing: RoutingVersion, counts: bool
    ) -> None:
        timer = self.timer(10.0, 12.0, 13.0)
        timer.commit(1, 0.0, False, TABLE)
        assert timer.commit(token, granted, in_rounds, routing) == (2.0 if counts else None)
        assert timer.commit(token, granted, in_rounds, routing) == 1.0
