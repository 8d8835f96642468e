"""Partial recovery, beyond its scenarios: storage that is away, suspension, damage, and what is forgotten."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.small_job import job

from emberscale_api.checkpoint import ForgottenShare, is_flash
from emberscale_api.dataset import DataFile
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_jobmaster import reloading, retry
from emberscale_jobmaster.effects import CallServer
from emberscale_jobmaster.figures import phase_of
from emberscale_jobmaster.forgetting import forgotten_by
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import ReloadPhase, Restored, Source
from emberscale_jobmaster.ranges import normalised
from emberscale_jobmaster.state import JobState, Routing
from emberscale_jobmaster.status import explanation, job_status
from examples import examples


def losing(trained: int = 5, **settings: object) -> Driven:
    """A job that has trained `trained` batches after a checkpoint of 20, and has lost ps-1."""
    driven = Driven(interval=20.0, target_pls=1.0, **settings)  # type: ignore[arg-type]  # any of its fields
    driven.start()
    driven.train(20)
    driven.pass_time(22)
    driven.train(trained)
    driven.kill(Role.PS, 1)
    return driven


class TestStorage:
    """The job waits for a successor that reports why it cannot load, as it waits for storage everywhere else."""

    def outage(self, driven: Driven, seconds: float) -> None:
        """The successor reports every minute that it cannot read."""
        for _ in range(round(seconds / 60)):
            driven.pass_time(60)
            driven.faults["Prepare", 1] = Fault(problem="ps-1/rows: EIO; trying again")
            self.asked_again(driven)

    def asked_again(self, driven: Driven) -> None:
        calls = [call for call in driven.unanswered if isinstance(call, CallServer) and call.server.index == 1]
        driven.unanswered.clear()
        for call in calls:
            driven.answer(call)

    def test_an_outage_while_rows_are_loaded_is_waited_for_with_a_condition(self) -> None:
        driven = losing()
        driven.faults["Prepare", 1] = Fault(problem="ps-1/rows: EIO; trying again")
        driven.join(Role.PS, 1)
        self.outage(driven, 2 * reloading.LOAD_SECONDS)

        assert driven.job.reload is not None
        assert driven.job.reload.phase is ReloadPhase.LOAD
        reason, message = explanation(driven.job, driven.spec)
        assert reason == "CheckpointUnreachable"
        assert "ps-1: ps-1/rows: EIO; trying again" in message
        driven.faults.clear()
        self.asked_again(driven)
        assert phase_of(driven.job, driven.spec) is JobPhase.TRAINING
        assert driven.job.routing.table.generation == 1
        assert not driven.job.troubles

    def test_an_outage_that_outlasts_the_patience_fails_the_job(self) -> None:
        driven = losing()
        driven.faults["Prepare", 1] = Fault(problem="EIO")
        driven.join(Role.PS, 1)
        self.outage(driven, retry.PATIENCE_SECONDS + 120)
        assert driven.job.outcome is not None
        assert driven.job.outcome.reason == "CheckpointUnreachable"

    def test_a_successor_that_says_nothing_takes_the_job_back(self) -> None:
        driven = losing()
        driven.faults["Prepare", 1] = Fault(hangs=True)
        driven.join(Role.PS, 1)
        driven.pass_time(reloading.LOAD_SECONDS + 1)
        assert driven.job.routing.table.generation == 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_flash_checkpoint_counts_as_newer_than_one_that_began_before_it_and_ended_after_it(dies: bool) -> None:
    driven = Driven(interval=20.0, flash_interval=25.0, target_pls=0.05)
    driven.start()
    driven.train(4)
    driven.faults["Saved", 0] = Fault(hangs=True)
    driven.pass_time(21)
    driven.train(10)
    driven.pass_time(6)
    assert driven.job.flash.checkpoint
    driven.train(2)
    driven.answer_all()
    assert not is_flash(driven.job.checkpoint)
    if dies:
        driven.master_dies()
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert (driven.job.recoveries, driven.job.reloads) == (0, 1)
    assert [share.checkpoint for share in driven.job.forgotten] == [driven.job.flash.checkpoint]
    assert driven.job.pls == pytest.approx(2 / 50 / 2)


class TestSuspension:
    def test_a_suspension_keeps_what_survivors_hold(self) -> None:
        driven = losing()
        driven.suspend()
        assert driven.job.outcome is None
        driven.join(Role.PS, 1)
        driven.pass_time(2)
        assert driven.job.outcome is not None
        assert driven.job.outcome.message == "resumes from checkpoint 00000002"
        assert job_status(driven.job, Observations(), driven.spec, driven.now).samples == 250

    def test_a_suspension_does_not_wait_for_a_successor_for_ever(self) -> None:
        driven = losing()
        driven.suspend()
        driven.pass_time(retry.SUSPENSION_PATIENCE_SECONDS - 2)
        assert driven.job.outcome is None
        driven.suspend()  # again: that does not prolong it
        driven.pass_time(4)
        assert driven.job.outcome is not None
        assert driven.job.outcome.message == "resumes from checkpoint 00000001"


class TestDamage:
    @pytest.mark.parametrize("found", ["by its manifest", "while it is loaded"])
    def test_no_increment_builds_on_a_checkpoint_that_is_found_damaged(self, found: str) -> None:
        driven = losing(incremental="OneShot")
        driven.join(Role.PS, 1)
        driven.pass_time(22)
        assert driven.storage.built_on["00000002"] == "00000001"
        driven.kill(Role.PS, 1)
        if found == "by its manifest":
            driven.storage.damaged = {"00000002": "crc32 differs"}
        else:
            driven.faults["Prepare", 1] = Fault(code="DATA_LOSS")
        driven.join(Role.PS, 1)
        assert driven.job.checkpoint == "00000001"
        driven.pass_time(2)
        assert driven.job.forgotten[-1].checkpoint == "00000001"
        driven.pass_time(22)
        assert driven.storage.built_on["00000003"] == ""


class TestForgetting:
    def test_what_is_forgotten_twice_counts_once(self) -> None:
        driven = losing()
        driven.join(Role.PS, 1)
        first = driven.job.pls
        assert first == pytest.approx(50 / 500 / 2)
        driven.train(2)
        driven.kill(Role.PS, 1)
        driven.join(Role.PS, 1)
        assert driven.job.pls - first == pytest.approx(20 / 500 / 2)
        assert [share.samples for share in driven.job.forgotten] == [50, 20]

    def test_a_job_goes_on_partially_where_only_twice_counted_samples_exceed_the_target(self) -> None:
        driven = Driven(interval=20.0, target_pls=0.08)
        driven.start()
        driven.train(20)
        driven.pass_time(22)
        driven.train(5)
        for _ in range(3):  # 0.05 each, of the same five batches
            driven.kill(Role.PS, 1)
            driven.join(Role.PS, 1)
        assert driven.job.routing.table.generation == 1
        assert driven.job.pls == pytest.approx(0.05)


class TestOtherHistories:
    """A checkpoint that was out of reach may turn up again after rows have gone back to an older one."""

    def saved(self) -> Driven:
        """A job with a checkpoint of 20 batches in the folder."""
        driven = Driven(interval=20.0, flash_interval=25.0, target_pls=1.0)
        driven.start()
        driven.train(20)
        driven.pass_time(22)
        return driven

    def beyond_flash(self) -> Driven:
        """A job with a flash checkpoint of 24 batches, newer than one of 20 in the folder, and five batches more."""
        driven = self.saved()
        driven.train(4)
        driven.pass_time(4)
        assert driven.job.flash.checkpoint
        driven.train(5)
        return driven

    def lose(self, driven: Driven) -> None:
        driven.kill(Role.PS, 1)
        driven.join(Role.PS, 1)
        driven.pass_time(0.5)

    def test_rows_get_back_nothing_that_counts_as_forgotten(self) -> None:
        driven = self.beyond_flash()
        driven.storage.lacks_redis = True
        self.lose(driven)
        assert [(share.checkpoint, share.samples) for share in driven.job.forgotten] == [("00000001", 90)]
        driven.storage.lacks_redis = False
        self.lose(driven)
        assert driven.job.recoveries == 1, "the whole job goes to the flash checkpoint"
        assert is_flash(driven.job.checkpoint)
        assert driven.job.forgotten == ()

    def test_rows_that_have_forgotten_nothing_may_go_back_to_it(self) -> None:
        driven = self.beyond_flash()
        driven.storage.lacks_redis = True
        self.lose(driven)
        driven.storage.lacks_redis = False
        driven.kill(Role.PS, 0)
        driven.join(Role.PS, 0)
        driven.pass_time(0.5)
        assert driven.job.recoveries == 0
        assert [(share.servers, share.samples) for share in driven.job.forgotten] == [((1,), 90), ((0,), 50)]

    def test_rows_do_not_forget_what_they_forgot_in_a_history_that_is_given_up(self) -> None:
        driven = self.saved()
        driven.train(2)
        self.lose(driven)
        assert [share.samples for share in driven.job.forgotten] == [20]
        driven.pass_time(4)
        assert driven.job.flash.checkpoint
        driven.storage.lacks_redis = True
        for server in (0, 1):
            driven.kill(Role.PS, server)
        for server in (0, 1):
            driven.join(Role.PS, server)
        driven.pass_time(2)
        assert (driven.job.recoveries, driven.job.forgotten) == (1, ())
        driven.train(5)
        driven.storage.lacks_redis = False
        self.lose(driven)
        assert driven.job.recoveries == 2
        assert [share.samples for share in driven.job.forgotten] == [20]


NUMBERS = st.integers(0, 12)
SPANS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(normalised)
LOSSES = st.tuples(st.sets(st.integers(0, 2), min_size=1, max_size=2), SPANS, st.integers(0, 3))
"""The lost servers, the batches in the checkpoint, and the placement of the buckets at that time."""


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(LOSSES, max_size=5))
def test_each_row_counts_each_batch_that_it_has_forgotten_once(losses: list[tuple[set[int], object, int]]) -> None:
    spec = job(training={"batchSize": 10, "epochs": 1}).spec
    state = replace(JobState(), training_files=(DataFile("/data/day_0", 1, 115),))
    forgotten: dict[tuple[str, int], set[int]] = {}
    for lost, held, turn in losses:
        owners = [(number // 100 + turn) % 3 for number in range(BUCKETS)]
        pieces = [(number // 10 + turn) % 3 for number in range(DENSE_PIECES)]
        servers = tuple(PsAddress(index, f"ps-{index}", "", "") for index in range(3))
        table = RoutingTable(
            generation=1, version=1, servers=servers, bucket_owners=tuple(owners), piece_owners=tuple(pieces)
        )
        state = replace(state, routing=Routing(table, True))
        source = Source("00000001", Restored({0: held}))  # type: ignore[dict-item]  # ranges
        share = forgotten_by(state, spec, lost, {0: ((0, 12),)}, source)
        state = replace(state, forgotten=(*state.forgotten, share))
        gone = {number for number in range(12) if not any(first <= number < stop for first, stop in held)}  # type: ignore[attr-defined]  # ranges
        for kind, owned in (("buckets", owners), ("pieces", pieces)):
            for number, owner in enumerate(owned):
                if owner in lost:
                    forgotten[kind, number] = forgotten.get((kind, number), set()) | gone
    for (kind, number), batches in forgotten.items():
        assert _told(state.forgotten, kind, number) == batches
    samples = {batch: 5 if batch == 11 else 10 for batch in range(12)}
    lost_samples = sum(samples[one] for (kind, _), batches in forgotten.items() if kind == "buckets" for one in batches)
    assert state.pls == pytest.approx(lost_samples / BUCKETS / 115)


def _told(shares: tuple[ForgottenShare, ...], kind: str, number: int) -> set[int]:
    """Returns the batches that a bucket or piece has forgotten, by the records."""
    return {
        batch
        for share in shares
        if any(first <= number < stop for first, stop in (share.buckets if kind == "buckets" else share.pieces))
        for part in share.epochs
        for first, stop in part.ranges
        for batch in range(first, stop)
    }


def test_a_server_that_has_left_and_is_silent_during_a_reload_may_speak_again() -> None:
    driven = Driven(servers=2, interval=20.0, target_pls=1.0, sizes_open=True)
    driven.start()
    driven.plan(3)
    driven.join(Role.PS, 2)
    driven.plan(2)
    driven.train(20)
    driven.pass_time(22)
    left = driven.ps[2].member
    driven.quiet.add(left.slot)
    driven.pass_time(20)
    assert driven.job.members.process(Role.PS, 2) is None
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert driven.job.reloads == 1
    driven.quiet.discard(left.slot)
    driven.pass_time(2)
    assert driven.job.members.process(Role.PS, 2) is not None
    assert driven.job.recoveries == 0
