"""Redis loses data while the job goes on: the last second or everything, with the master or without it."""

import threading
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import redis
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fake_ps import FakePs
from tests.jobmaster.pure import WORKER, Pure

from emberscale_api.compatibility import DEPOSED_BY_DELETION, StateKeys
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster import lifecycle, progress, takeover
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.store import DeposedError, JobStore
from eventually import unwrap


def server(index: int) -> MemberId:
    return MemberId(Role.PS, index, f"ps-{index}")


def test_a_server_with_rows_of_a_table_that_is_not_in_the_books_takes_all_back() -> None:
    pure = Pure()
    pure.start_training()
    known = pure.state.routing.table
    pure.apply(lifecycle.on_call(pure.state, pure.spec, server(0), known.generation, known.version))
    assert (pure.state.routing.ready, pure.state.recoveries) == (True, 0)

    pure.apply(lifecycle.on_call(pure.state, pure.spec, server(0), known.generation + 3, known.version + 5))

    assert (pure.state.routing.ready, pure.state.recoveries) == (False, 1)
    beyond = pure.state.routing.table
    assert (beyond.generation, beyond.version) == (known.generation + 4, known.version + 6)
    assert pure.phases[-1] is JobPhase.RESTORING
    assert not pure.state.ledger.leases


def test_a_new_book_begins_beyond_what_any_server_holds() -> None:
    pure = Pure()
    for index, generation in ((0, 5), (1, 7)):
        process = replace(_process(), incarnation=f"ps-{index}")
        pure.apply(lifecycle.register(pure.state, pure.spec, server(index), process, generation, generation))
    pure.apply(progress.begin_assignment(pure.state, pure.spec))
    assert pure.state.routing.table.generation == 8


def test_the_first_table_of_new_books_is_not_the_one_that_servers_hold() -> None:
    """Both tables are the first of their ledgers, but leases of the old ledger must not count under the new one."""
    pure = Pure()
    old = pure.state.routing.table
    for index in range(2):
        process = replace(_process(), incarnation=f"ps-{index}")
        pure.apply(lifecycle.register(pure.state, pure.spec, server(index), process, old.generation, old.version))
    assert pure.state.routing.table.generation == old.generation + 1


@pytest.mark.parametrize("stage", [Stage.DISCOVER, Stage.INDEX, Stage.READY])
def test_a_job_of_new_books_that_is_suspended_denies_no_checkpoints_for_which_nobody_has_looked(stage: Stage) -> None:
    pure = Pure(checkpoint={"uri": "/checkpoints"})
    pure.apply(progress.suspend(replace(pure.state, stage=stage), pure.spec))
    outcome = unwrap(pure.state.outcome)
    assert outcome.message == "resumes from the newest checkpoint, or from the start if there is none"


def test_a_job_that_has_looked_for_checkpoints_says_that_there_are_none() -> None:
    pure = Pure(checkpoint={"uri": "/checkpoints"})
    pure.start_training()
    pure.apply(progress.suspend(pure.state, pure.spec))
    assert unwrap(pure.state.outcome).message == "resumes from the start: no checkpoint was taken"


def test_numbers_after_which_none_would_follow_count_as_nonsense() -> None:
    """The next generation, version, token or checkpoint would not fit into a message, and the job would end."""
    pure = Pure()
    pure.start_training()
    before, table = pure.state, pure.state.routing.table
    beyond = takeover.MOST_NUMBER + 1
    for generation, version in ((beyond, table.version), (table.generation + 1, takeover.MOST_VERSION + 1)):
        pure.apply(lifecycle.on_call(pure.state, pure.spec, server(0), generation, version))
    assert takeover.surpass_numbers(pure.state, table.generation, beyond, beyond) is pure.state
    assert takeover.surpass_checkpoints(pure.state, beyond) is pure.state
    assert pure.state == before
    pure.apply(lifecycle.on_call(pure.state, pure.spec, server(0), takeover.MOST_NUMBER, table.version))
    assert pure.state.routing.table.generation == beyond, "the last one that counts has a successor"


def test_two_masters_that_take_over_from_the_same_books_give_no_number_twice() -> None:
    """The writes of the first are lost with the store's last second."""
    pure = Pure()
    pure.start_training()
    first, second = (takeover.on_takeover(pure.state, pure.spec, wall) for wall in (5000.0, 5001.5))
    given = 1000
    assert first.next_token > pure.state.next_token
    assert second.next_token > first.next_token + given
    assert second.next_barrier > first.next_barrier + given


@pytest.mark.parametrize("assigned", [False, True])
def test_two_masters_that_take_over_from_the_same_ledger_begin_different_generations(assigned: bool) -> None:
    """The first master's assignment may be lost, and the second may assign differently: to fewer servers, say."""
    pure = Pure()
    for index in range(2):
        process = replace(_process(), incarnation=f"ps-{index}")
        pure.apply(lifecycle.register(pure.state, pure.spec, server(index), process))
    if assigned:
        pure.start_training()
    generations = [pure.state.routing.table.generation]
    for wall in (1000.0, 1001.0):
        state = takeover.on_takeover(pure.state, pure.spec, wall)
        state = progress.unroute(state, pure.spec) if assigned else state
        generations.append(progress.begin_assignment(state, pure.spec).routing.table.generation)
    assert generations == sorted(set(generations))


def test_a_master_goes_beyond_checkpoints_that_a_server_has_heard_of() -> None:
    pure = Pure()
    pure.start_training()
    known = pure.state.next_checkpoint
    assert takeover.surpass_checkpoints(pure.state, known) is pure.state
    assert takeover.surpass_checkpoints(pure.state, known + 3).next_checkpoint == known + 3


def test_a_master_goes_beyond_numbers_that_a_server_has_of_one_whose_books_are_lost() -> None:
    """Otherwise that server would fence its leases and refuse its barriers for ever."""
    pure = Pure()
    pure.start_training()
    pure.acquire()
    table, token, barrier = pure.state.routing.table, pure.state.next_token, pure.state.next_barrier
    told = {"next_token": token + 5_000_000, "next_barrier": barrier + 7_000_000}
    unchanged = takeover.surpass_numbers(pure.state, table.generation, token, barrier)
    assert unchanged is pure.state
    assert takeover.surpass_numbers(pure.state, table.generation - 1, **told) is pure.state
    after = takeover.surpass_numbers(pure.state, table.generation, **told)
    assert after.next_token >= told["next_token"]
    assert after.next_barrier >= told["next_barrier"]
    assert not after.ledger.leases
    after.ledger.check()


def _process() -> Process:
    return Process("ps", "tcp://a", "a:1", "")


def test_a_master_grants_no_token_that_one_before_it_may_have_granted() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    task = pure.acquire()
    assert task is not None
    successor = takeover.on_takeover(pure.state, pure.spec, wall=1_800_000_000.0)
    forgetful = takeover.initial(wall=1_800_000_000.0)
    for state in (successor, forgetful):
        assert state.next_token > task.token + 1_000_000


def test_numbers_go_on_ascending_where_the_clock_went_back_between_two_masters() -> None:
    """The ledger may lack the last second, whose numbers must not be given again."""
    pure = Pure()
    pure.apply(takeover.on_takeover(pure.state, pure.spec, wall=1_800_000_000.0))
    pure.start_training()
    successor = takeover.on_takeover(pure.state, pure.spec, wall=1_700_000_000.0)
    assert successor.next_token >= pure.state.next_token + 1000
    assert successor.next_barrier >= pure.state.next_barrier + 1000


def test_a_master_that_goes_on_with_rows_gives_no_checkpoint_the_number_of_one_that_its_books_may_lack() -> None:
    """Otherwise its files would overwrite those of a complete checkpoint, and be removed with them."""
    pure = Pure()
    pure.start_training()
    successor = takeover.on_takeover(pure.state, pure.spec, wall=5.0)
    assert successor.next_checkpoint >= pure.state.next_checkpoint + 10


def test_of_two_masters_with_one_term_only_the_later_writes(cluster: Cluster) -> None:
    first, second = JobStore(cluster.redis.url, cluster.uid), JobStore(cluster.redis.url, cluster.uid)
    first.open()
    cluster.redis_is_empty()
    second.open()
    assert first.term == second.term == 1
    with pytest.raises(DeposedError):
        first.save(takeover.initial(wall=1.0))
    with pytest.raises(DeposedError):
        first.confirm()
    second.save(takeover.initial(wall=2.0))


def test_a_master_that_outlives_its_job_brings_nothing_back(cluster: Cluster) -> None:
    keys = StateKeys.of(cluster.uid)
    store = JobStore(cluster.redis.url, cluster.uid)
    store.open()
    store.save(takeover.initial(wall=1.0))
    client = redis.Redis.from_url(cluster.redis.url)
    client.delete(*astuple(keys))
    client.set(keys.term, DEPOSED_BY_DELETION)
    with pytest.raises(DeposedError):
        store.save(takeover.initial(wall=2.0))
    assert client.exists(*astuple(keys)) == 1


def test_what_no_master_writes_any_more_expires(cluster: Cluster) -> None:
    store = JobStore(cluster.redis.url, cluster.uid)
    store.open()
    store.save_blocks("Training", 0, b"blocks")
    store.add_bad_records([("/day", 9)])
    store.save(takeover.initial(wall=1.0))
    client = redis.Redis.from_url(cluster.redis.url)
    for key in astuple(StateKeys.of(cluster.uid)):
        assert client.ttl(key) > 0, key


def registers_anew(cluster: Cluster, ps: FakePs) -> None:
    """Registers a parameter server again, as one does that the master does not know."""
    caller = cluster.caller(pb.PS, ps.index, ps.incarnation)
    caller.register(
        data_address=f"tcp://127.0.0.1:{ps.port}",
        control_address=ps.address,
        generation=ps.generation,
        routing_version=ps.version,
    )


def test_master_and_redis_lost_at_once_cost_the_work_since_the_last_checkpoint(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.3})
    cluster.start_master()
    cluster.start_servers()
    worker = cluster.start_worker(0, records=1500, pace=0.01, last=threading.Event())
    cluster.until(lambda status: status.checkpoint and status.samples > 300, "a checkpoint")
    cluster.stop_master()
    worker.kill()
    held = {ps.index: ps.generation for ps in cluster.servers}
    cluster.redis_is_empty()

    cluster.start_master()
    for ps in cluster.servers:
        registers_anew(cluster, ps)
    cluster.start_worker(1, records=1500)

    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.samples) == (pb.COMPLETE, 1500), status.message
    for ps in cluster.servers:
        assert ps.generation > held[ps.index]
        assert ps.applied == {0: set(range(150))}
        assert Path(ps.assigned_from[-1]).parent == cluster.checkpoints
