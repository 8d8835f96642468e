"""Which pulls and pushes one parameter server admits: their leases, their sessions, and memory that runs short."""

from tests.trainer.server.cores import NO_COUNTS, NO_KEYS, header, push, serving

from emberscale_api.shape import GIB
from emberscale_api.wire import Flag, Status
from emberscale_trainer.server.core import ServerCore, Wait
from emberscale_trainer.server.pressure import LONGEST_DELAY_SECONDS
from emberscale_trainer.server.staleness import StalenessBound


class TestLeases:
    def test_a_push_under_an_older_lease_of_the_shard_is_fenced(self) -> None:
        core = serving()
        assert push(core, header(0, token=7)) is Status.OK
        assert push(core, header(1, token=6)) is Status.FENCED
        assert push(core, header(9, token=6, shard=9)) is Status.OK

    def test_a_dead_lease_is_fenced_and_its_tickets_are_forgotten(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.admit(1, header(0, token=1), 0.0) is Status.OK
        assert core.admit(2, header(1, token=2, shard=1), 0.0) == Wait(None)
        core.hear_leases(1, live=[2], next_token=3)
        assert core.admit(2, header(1, token=2, shard=1), 0.0) is Status.OK
        assert core.admit(1, header(5, token=1), 0.0) is Status.FENCED
        assert push(core, header(0, token=1), session=1) is Status.FENCED
        assert push(core, header(1, token=2, shard=1), session=2) is Status.OK

    def test_a_push_under_way_of_a_dead_lease_no_longer_counts(self) -> None:
        core = serving(bound=StalenessBound(0))
        core.admit(1, header(0, token=1), 0.0)
        assert push(core, header(0, token=1), session=1) is Status.OK
        assert core.admit(2, header(1, token=2, shard=1), 0.0) == Wait(None)
        core.hear_leases(1, live=[2], next_token=3)
        assert core.admit(2, header(1, token=2, shard=1), 0.0) is Status.OK

    def test_no_push_is_applied_once_the_master_has_begun_another_generation(self) -> None:
        core = serving(generation=2, version=2)
        core.hear_generation(3)
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.REFRESH
        core.hear_generation(2)  # from a master that lost its last writes
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.OK

    def test_leases_of_another_generation_or_told_late_change_nothing(self) -> None:
        core = serving(generation=2, version=2)
        core.hear_leases(1, live=[], next_token=100)
        core.hear_leases(2, live=[5], next_token=6)
        core.hear_leases(2, live=[1], next_token=2)
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.FENCED
        assert push(core, header(0, token=5, generation=2, version=2)) is Status.OK
        assert push(core, header(1, token=6, generation=2, version=2)) is Status.OK


class TestSessions:
    def test_the_late_end_of_an_old_session_does_not_forget_its_successors_pulls(self) -> None:
        core = serving(bound=StalenessBound(0))
        old, new = 1, 2
        assert core.admit(new, header(0), 0.0) is Status.OK
        core.disconnected(old)
        assert core.admit(3, header(1, token=2, shard=1), 0.0) == Wait(None)

    def test_a_session_ends_with_its_first_connection(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert push(core, header(0), session=1) is Status.OK
        assert core.admit(1, header(1), 0.0) == Wait(None)  # waits on the other connection for the push under way
        core.disconnected(1)
        assert core.admit(2, header(1), 0.0) is Status.OK

    def test_a_pull_for_training_waits_for_the_bound_and_one_for_evaluation_does_not(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.pull(1, header(0), NO_COUNTS, NO_KEYS, 0, 0) is Status.OK
        second = header(1, token=2, shard=1)
        assert core.pull(2, second, NO_COUNTS, NO_KEYS, 0, 0) == Wait(None)
        assert core.pull(2, second._replace(flags=Flag.READ_ONLY), NO_COUNTS, NO_KEYS, 0, 0) is Status.OK
        core.disconnected(1)
        assert core.pull(2, second, NO_COUNTS, NO_KEYS, 0, 0) is Status.OK

    def test_a_pull_asked_for_anew_is_admitted_and_counts_once(self) -> None:
        core = serving(bound=StalenessBound(1))
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert core.admit(1, header(1), 0.0) is Status.OK
        assert core.admit(1, header(2), 0.0) == Wait(None)


def test_a_repeated_push_is_under_way_until_it_is_complete() -> None:
    core = serving(bound=StalenessBound(0))
    assert core.admit(1, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=1) is Status.OK
    core.disconnected(1)  # before the other servers got the push
    assert core.admit(2, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=2) is Status.REPEATED
    assert core.admit(3, header(1, shard=1), 0.0) == Wait(None)  # its pull could miss the push on the other servers
    core.complete(2, header(0))
    assert core.admit(3, header(1, shard=1), 0.0) is Status.OK


def test_what_still_comes_of_a_session_that_has_ended_keeps_nobody_waiting() -> None:
    """A push without room in memory ends one connection; a pull may be on its way on the other."""
    core = serving(bound=StalenessBound(0, 0))
    assert core.admit(1, header(0), 0.0) is Status.OK
    core.disconnected(1)
    assert core.admit(1, header(1), 0.0) is Status.REFRESH
    assert push(core, header(1), session=1) is Status.REFRESH
    assert core.admit(2, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=2) is Status.OK


def run_short(core: ServerCore) -> None:
    core.pressure.look(GIB - 1, GIB, 0.0)
    core.pressure.look(GIB, GIB, 0.1)


class TestMemoryPressure:
    def test_a_push_waits_for_memory_and_not_for_ever(self) -> None:
        core = serving()
        run_short(core)
        assert core.push(0, header(0), 1.0, 2.0) == Wait(1.0 + LONGEST_DELAY_SECONDS)
        assert core.push(0, header(0), 1.0, 1.0 + LONGEST_DELAY_SECONDS) is Status.OK

    def test_a_push_that_waits_goes_on_once_there_is_memory(self) -> None:
        core = serving()
        run_short(core)
        assert isinstance(core.push(0, header(0), 1.0, 1.0), Wait)
        core.pressure.look(0, GIB, 2.0)
        assert core.push(0, header(0), 1.0, 2.0) is Status.OK

    def test_neither_repeats_nor_batches_that_a_barrier_settles_wait(self) -> None:
        core = serving()
        assert push(core, header(0)) is Status.OK
        run_short(core)
        assert core.push(0, header(0), 1.0, 1.0) is Status.REPEATED
        core.hold(1, 1, 1, 10, 1.0)
        core.settle(1, 1, [(0, 0, 2)], 10, 1.0)
        assert core.push(0, header(1), 1.0, 1.0) is Status.OK
