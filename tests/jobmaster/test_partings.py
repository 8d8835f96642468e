"""Servers of a parity group that are alive but do not reach each other: roll-backs, and the end of parity."""

import pytest
from tests.jobmaster.driven import ALL, Driven, advise, protected
from tests.jobmaster.scenario import describe

from emberscale_api.job import FaultToleranceStrategy
from emberscale_api.job.roles import Role
from emberscale_api.routing import ParityTrouble
from emberscale_jobmaster import losses, rebuilding
from emberscale_jobmaster.parity import PARTINGS_SECONDS
from emberscale_jobmaster.status import job_status


def parted(driven: Driven, seconds: float, *, broken: bool = True) -> ParityTrouble:
    return ParityTrouble(driven.job.routing.table.version, "ps-2 takes no more of its changes", seconds, broken)


@pytest.mark.parametrize(
    ("broken", "seconds"), [(True, rebuilding.PARTED_SECONDS), (False, 2 * 15.0)], ids=["parted", "silent"]
)
def test_servers_that_live_but_do_not_get_together_again_take_the_job_back(broken: bool, seconds: float) -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, seconds - 1, broken=broken)
    driven.pass_time(2)
    assert driven.job.recoveries == 0
    assert losses.unprotected_reason(driven.job, driven.spec) == "ps-1: ps-2 takes no more of its changes"
    driven.troubles[1] = parted(driven, seconds, broken=broken)
    driven.pass_time(seconds)
    assert driven.job.recoveries == 1
    step = driven.job.scaling.steps[-1]
    assert step.reason == "RolledBack"
    assert step.message.startswith("ps-1 cannot protect its rows: ps-2 takes no more of its changes; the whole job")
    driven.pass_time(2)  # reports about the previous table mean nothing
    assert driven.job.recoveries == 1
    assert not losses.unprotected_reason(driven.job, driven.spec)
    driven.troubles.clear()
    driven.train_all()


def part_again(driven: Driven, times: int) -> None:
    """Lets servers meet and part again this many times."""
    for _ in range(times):
        driven.pass_time(2)
        driven.troubles[1] = parted(driven, rebuilding.PARTED_SECONDS)
        driven.pass_time(rebuilding.PARTED_SECONDS + 1)
        driven.troubles.clear()


@pytest.mark.parametrize("strategy", ["ErasureCoding", "Auto"])
def test_a_link_that_comes_and_goes_takes_the_job_back_a_bounded_number_of_times(strategy: str) -> None:
    driven = Driven(servers=3, parity=1, strategy=strategy)
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.start()
    driven.train(4)
    part_again(driven, 2)
    assert (driven.job.recoveries, driven.job.chosen_parity, driven.job.forgone) == (2, 1, "")
    part_again(driven, 10)
    assert (driven.job.recoveries, driven.job.chosen_parity) == (3, 0)
    assert [server.parity for server in driven.ps.values()] == [0, 0, 0]
    why = "servers did not get together 3 times, the last time ps-1: ps-2 takes no more of its changes"
    assert driven.job.forgone == why
    assert driven.job.scaling.steps[-1].message == f"without parity of rows from now on: {why}"
    told = job_status(driven.job, driven.state.seen, driven.spec, driven.now)
    assert told.protection.problem == why
    assert told.protection.given_up == (strategy == "Auto")

    driven.join(Role.PS, 1)  # in place of a lost server; the successor keeps no parity, either
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.ps[1].parity) == (4, 0)
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_parity_is_kept_again_by_servers_that_load_rows_much_later() -> None:
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    driven.start()
    driven.train(4)
    part_again(driven, 3)
    assert driven.job.forgone
    driven.pass_time(PARTINGS_SECONDS, tick=2)
    assert driven.job.forgone, "servers are told as they load rows"
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert (driven.job.forgone, driven.job.chosen_parity, driven.job.parity_group.protected) == ("", 1, ALL)
    told = [step.message for step in driven.job.scaling.steps if step.reason == "ChangedParity"]
    assert len(told) == 2
    assert told[-1].endswith("to rebuild one parameter server: no servers have parted for a while")


def test_servers_that_all_ignore_that_none_is_kept_are_taken_back_again() -> None:
    """Servers of the previous version go by the manifest; without a roll-back, pushes would wait for ever."""
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    for index in range(3):
        driven.join(Role.PS, index, most_parity=0)
    driven.prepare()
    driven.train(4)
    part_again(driven, 5)
    assert (driven.job.recoveries, driven.job.forgone, driven.job.chosen_parity) == (5, "", 1)

    driven.pass_time(2)
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    part_again(driven, 3)
    assert (driven.job.recoveries, bool(driven.job.forgone)) == (6, True), "one that keeps none is enough"

    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1, most_parity=0)
    driven.pass_time(2)
    assert (driven.job.forgone, driven.job.chosen_parity) == ("", 1)


def part_again_and_again(driven: Driven) -> None:
    """Lets servers part often enough to lose parity, if the partings came one right after the other."""
    for _ in range(2):
        part_again(driven, 1)
        driven.pass_time(PARTINGS_SECONDS, tick=2)
    part_again(driven, 1)


def test_partings_between_which_the_job_does_not_get_on_count_however_rare_they_are() -> None:
    """Without a checkpoint between two partings, the job has made no progress."""
    driven = Driven(servers=3, parity=1, interval=1e6)
    driven.start()
    driven.train(4)
    part_again_and_again(driven)
    assert (driven.job.recoveries, bool(driven.job.forgone)) == (3, True)


def test_partings_that_are_rare_take_no_parity_away() -> None:
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    driven.start()
    driven.train(4)
    part_again_and_again(driven)
    assert (driven.job.recoveries, driven.job.forgone, driven.job.chosen_parity) == (3, "", 1)


def test_servers_that_never_reached_each_other_take_nobody_back() -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, 0.0, broken=False)  # no push waits
    driven.pass_time(300)
    assert driven.job.recoveries == 0
    assert losses.unprotected_reason(driven.job, driven.spec) == "ps-1: ps-2 takes no more of its changes"
    driven.troubles.clear()
    driven.pass_time(2)
    assert not losses.unprotected_reason(driven.job, driven.spec)


def test_what_lasted_before_anybody_could_see_it_is_no_trouble_yet() -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, 100, broken=False)  # its holder took longer to load, and connects right now
    driven.pass_time(3)
    driven.troubles.clear()
    driven.pass_time(40)
    driven.troubles[1] = parted(driven, 100, broken=False)
    driven.pass_time(3)
    assert driven.job.recoveries == 0


def test_a_master_that_was_stopped_first_sees_who_is_lost() -> None:
    driven = protected()
    driven.quiet.add(driven.ps[2].member.slot)
    driven.troubles[1] = parted(driven, 40, broken=False)
    driven.now += 40
    driven.pass_time(40)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_server_that_is_being_rebuilt_is_trouble_for_nobody() -> None:
    driven = protected()
    driven.kill(Role.PS, 2)
    driven.troubles[1] = parted(driven, 100)
    driven.pass_time(60)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_new_master_that_does_not_know_of_a_rebuild_first_sees_who_is_lost() -> None:
    driven = protected()
    driven.quiet.add(driven.ps[2].member.slot)
    driven.troubles[1] = parted(driven, 100)  # the previous master had it rebuilt, and its last second is lost
    driven.master_dies()
    driven.pass_time(40)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
