"""Rebuilds from parity that lags behind pushes: what the rows have forgotten, and that nothing else is lost."""

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter
from tests.jobmaster.driven import Driven, protected
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe

from emberscale_api.checkpoint import EpochApplied
from emberscale_api.job.roles import Role
from emberscale_jobmaster.events import HeartbeatReceived, TakenOver, TaskWanted
from emberscale_jobmaster.machine import MasterState
from emberscale_jobmaster.operations import MovePhase
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.status import job_status
from eventually import unwrap


def lagging(parity: int = 1, servers: int = 3) -> Driven:
    """A job with protected servers that has done batches 0 to 5."""
    driven = protected(servers=servers, parity=parity, durability="Async")
    driven.train(2)
    assert driven.job.ledger.done == ((0, 6),)
    return driven


def lose(driven: Driven, lacks: dict[int, set[int]]) -> None:
    """Loses servers, of whose batches parity lacks some."""
    for index, batches in lacks.items():
        driven.kill(Role.PS, index)
        driven.lost[index] = {0: driven.lost[index][0] - batches}


def rebuild(driven: Driven, *lost: int) -> None:
    for index in lost:
        driven.join(Role.PS, index)
    assert (driven.job.rebuilding, driven.job.recoveries) == (None, 0)
    for worker, task in list(driven.tasks.items()):  # the heartbeat tells workers which leases have ended
        if task.token not in driven.job.ledger.leases:
            del driven.tasks[worker]


def test_batches_that_are_done_and_not_in_parity_are_forgotten() -> None:
    driven = lagging()
    lose(driven, {1: {3, 5}})
    rebuild(driven, 1)
    (share,) = driven.job.forgotten
    assert (share.servers, share.checkpoint, share.samples) == ((1,), "", 2 * driven.spec.training.batch_size)
    assert share.epochs == (EpochApplied(epoch=0, ranges=((3, 4), (5, 6))),)
    assert share.share == pytest.approx(1 / 3, abs=0.01)
    assert share.pls == pytest.approx(share.share * share.samples / driven.records / driven.spec.training.epochs)
    assert driven.ps[1].applied == {0: set(range(6))}, "nobody trains them again"
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)
    assert driven.storage.written[driven.job.checkpoint].image.forgotten == driven.job.forgotten


def test_people_are_told_what_was_forgotten() -> None:
    driven = lagging()
    lose(driven, {1: {3, 5}})
    rebuild(driven, 1)
    step = driven.job.scaling.steps[-1]
    samples = 2 * driven.spec.training.batch_size
    assert step.reason == "Recovered"
    assert f"nothing was rolled back; rows of ps-1, 33.3% of all, have forgotten their latest 2 batches, {samples}" in (
        step.message
    )
    status = job_status(driven.job, driven.state.seen, driven.spec, driven.now)
    assert [(one.checkpoint, one.samples) for one in status.forgotten] == [("", samples)]


def test_nothing_is_forgotten_of_a_server_whose_parity_has_all() -> None:
    driven = lagging()
    lose(driven, {1: set()})
    rebuild(driven, 1)
    assert driven.job.forgotten == ()
    assert driven.job.scaling.steps[-1].message.endswith("nothing was rolled back")


def test_each_of_two_lost_servers_forgets_what_its_own_parity_lacks() -> None:
    driven = lagging(parity=2, servers=4)
    lose(driven, {0: {5}, 2: {4, 5}})
    rebuild(driven, 0, 2)
    told = [(share.servers, share.epochs[0].ranges) for share in driven.job.forgotten]
    assert told == [((0,), ((5, 6),)), ((2,), ((4, 6),))]
    assert [driven.ps[index].applied for index in (0, 2)] == [{0: set(range(6))}] * 2


def test_what_a_row_forgets_twice_counts_once() -> None:
    driven = lagging()
    lose(driven, {1: {5}})
    rebuild(driven, 1)
    driven.pass_time(2)
    driven.train(2)
    lose(driven, {1: {6, 7}})
    rebuild(driven, 1)
    assert [share.epochs[0].ranges for share in driven.job.forgotten] == [((5, 6),), ((6, 8),)]


def test_a_batch_that_is_not_yet_reported_is_trained_again_and_not_forgotten() -> None:
    """The worker believes it done, and reports it only after the switch to the rebuilt rows has begun."""
    driven = lagging()
    worker = driven.workers[0]
    task = driven.tasks.get(worker) or driven.take(worker)
    batch = driven.committed[task.token] // driven.spec.training.batch_size
    for server in driven.ps.values():
        server.applied[0].add(batch)
    lose(driven, {1: {batch}})
    rebuild(driven, 1)
    assert driven.job.forgotten == ()
    assert batch not in driven.ps[1].applied[0]
    late = {task.token: driven.committed[task.token] + driven.spec.training.batch_size}
    driven.tell(HeartbeatReceived(now=driven.now, member=worker, leases=late))
    assert driven.job.ledger.done == ((0, batch),), "the lease has ended"
    assert driven.take(worker).start == batch * driven.spec.training.batch_size


def test_nobody_gets_a_lease_before_all_servers_have_switched() -> None:
    """A lost server may live on, and answer pushes together with survivors that have yet to hear of its successor."""
    driven = lagging()
    driven.tasks.clear()
    lose(driven, {1: {5}})
    driven.faults["Switch", 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert unwrap(driven.job.move).phase is MovePhase.SWITCH
    assert driven.job.ledger.leases == {}
    wanted = TaskWanted(now=driven.now, member=driven.workers[0])
    assert driven.tell(wanted) is None
    driven.master_dies()
    driven.pass_time(1)
    assert (driven.job.move, len(driven.job.forgotten)) == (None, 1)
    assert driven.tell(replace(wanted, now=driven.now)) is not None


def test_with_sync_a_rebuild_ends_no_lease() -> None:
    driven = protected()
    task = driven.take(driven.workers[0])
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    assert task.token in driven.job.ledger.leases


def test_servers_are_told_of_async_with_the_table() -> None:
    driven = lagging()
    assert all(server.async_parity for server in driven.ps.values())
    assert not any(server.async_parity for server in protected().ps.values())
    lose(driven, {1: set()})
    rebuild(driven, 1)
    assert all(server.async_parity for server in driven.ps.values())


def test_pushes_wait_while_any_server_runs_a_version_that_does_not_know_async() -> None:
    driven = Driven(servers=3, parity=1, durability="Async")
    for index in range(3):
        driven.join(Role.PS, index, knows_async=index != 1)
    driven.prepare()
    assert not any(server.async_parity for server in driven.ps.values())
    assert driven.job.scaling.steps[-1].message.endswith(
        "pushes wait for it as with durability Sync, since ps-1 did not say that they know Async"
    )
    driven.train(4)
    driven.pass_time(1)
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    assert all(server.async_parity for server in driven.ps.values()), "all know it under the next table"


def follow_earlier_version(driven: Driven) -> None:
    """A master of this version takes over from one that does not know Async, and writes nothing about it."""
    codec = TypeAdapter(JobState)
    state = json.loads(codec.dump_json(driven.job))
    del state["chosen_durability"]
    if state["move"] is not None:
        del state["move"]["settled"], state["move"]["forgotten"]
    driven.state = MasterState(codec.validate_json(json.dumps(state)))
    driven.tell(TakenOver(now=driven.now, wall=driven.now, has_flash_store=False))


@pytest.mark.parametrize("durability", ["Sync", "Async"])
def test_a_switch_that_an_earlier_version_has_begun_is_rolled_back(durability: str) -> None:
    """It has not written which batches count as applied to the rebuilt rows, nor which of them these lack."""
    driven = protected(servers=3, durability=durability)
    driven.train(2)
    lose(driven, {1: {3, 5} if durability == "Async" else set()})
    driven.faults["Switch", 1] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert unwrap(driven.job.move).phase is MovePhase.SWITCH
    follow_earlier_version(driven)
    assert driven.job.recoveries == 1


def test_servers_of_async_refuse_a_rebuild_if_the_master_has_forgotten_that_they_are() -> None:
    driven = lagging()
    follow_earlier_version(driven)
    driven.pass_time(2)
    lose(driven, {1: {3, 5}})
    driven.join(Role.PS, 1)
    driven.pass_time(20)
    assert (driven.job.recoveries, driven.job.forgotten) == (1, ())
