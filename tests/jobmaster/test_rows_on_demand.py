"""A lost server's rows that are served before they are rebuilt, driven by the master's machine."""

from dataclasses import replace

from tests.jobmaster.driven import Driven, protected
from tests.jobmaster.scenario import describe

from emberscale_api.job import EvictionSpec
from emberscale_api.job.roles import Role
from emberscale_api.routing import ParityTrouble
from emberscale_jobmaster import losses
from emberscale_jobmaster.events import HeartbeatReceived
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.status import explanation
from eventually import unwrap


def prepared(driven: Driven) -> list[bool]:
    return [server.on_demand for server in driven.ps.values()]


def losing(servers: int = 3, interval: float = 1000.0) -> Driven:
    """A job whose ps-1 has a successor that serves its rows and lacks a hundred of them."""
    driven = protected(servers=servers, interval=interval, rebuilds_on_demand=True, sizes_open=True)
    driven.kill(Role.PS, 1)
    driven.missing = {1: 100}
    driven.join(Role.PS, 1)
    return driven


def test_the_rows_of_one_server_follow_on_demand() -> None:
    driven = losing()
    assert prepared(driven) == [True] * 3
    assert (driven.job.rebuilding, driven.job.move, driven.job.misses_rows) == (None, None, True)
    assert "those that are wanted first" in driven.job.scaling.steps[-1].message
    driven.train(1)


def test_the_rows_of_two_servers_are_sent_first() -> None:
    driven = protected(servers=4, parity=2, rebuilds_on_demand=True)
    driven.kill(Role.PS, 1)
    driven.kill(Role.PS, 2)
    driven.join(Role.PS, 1)
    driven.join(Role.PS, 2)
    assert prepared(driven) == [False] * 4
    assert not driven.job.misses_rows


def test_they_are_sent_first_if_one_server_does_not_know_how() -> None:
    driven = protected(rebuilds_on_demand=True)
    driven.kill(Role.PS, 1)
    driven.rebuilds_on_demand = False
    driven.join(Role.PS, 1)
    assert prepared(driven) == [False] * 3
    assert not driven.job.misses_rows


def test_they_are_sent_first_if_tables_evict_rows() -> None:
    driven = protected(rebuilds_on_demand=True)
    embeddings = driven.spec.model.embeddings.model_copy(update={"eviction": EvictionSpec(ttl_batches=9)})
    model = driven.spec.model.model_copy(update={"embeddings": embeddings})
    driven.spec = driven.spec.model_copy(update={"model": model})
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    assert prepared(driven) == [False] * 3


def test_people_are_told_until_all_rows_are_there() -> None:
    driven = losing()
    driven.pass_time(3)
    assert driven.job.scaling.steps[-1].reason == "Recovered"
    assert losses.unprotected_reason(driven.job, driven.spec) == "rows on ps-1 are still being rebuilt from parity"
    driven.missing.clear()
    driven.pass_time(1)
    assert driven.job.scaling.steps[-1].reason == "RowsRebuilt"
    driven.pass_time(1)
    assert not losses.unprotected_reason(driven.job, driven.spec)


def test_people_are_told_what_the_final_checkpoint_waits_for() -> None:
    driven = losing()
    still = "rows on ps-1 are still being rebuilt from parity"
    assert explanation(driven.job, driven.spec)[1].endswith(f"; {still}")
    driven.train_all()
    driven.pass_time(1)
    assert driven.job.stage is Stage.SAVE
    assert explanation(driven.job, driven.spec) == ("SavingModel", f"waiting to write the final checkpoint; {still}")
    driven.missing.clear()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_the_adopters_of_rows_are_all_waited_for() -> None:
    driven = protected(rebuilds_on_demand=True)
    driven.kill(Role.PS, 1)
    driven.missing = {0: 10, 2: 20}
    driven.pass_time(5)
    assert driven.job.parity_group.missing == {0, 2}
    still = "rows on ps-0, ps-2 are still being rebuilt from parity"
    assert losses.unprotected_reason(driven.job, driven.spec) == still
    del driven.missing[0]
    driven.pass_time(1)
    assert driven.job.parity_group.missing == {2}


def test_a_report_from_before_the_switch_says_nothing_of_missing_rows() -> None:
    driven = losing()
    server, table = driven.ps[1], driven.job.routing.table
    served = replace(driven._served(server.member), missing_rows=0)
    driven.tell(
        HeartbeatReceived(
            now=driven.now,
            member=server.member,
            generation=table.generation,
            version=table.version - 1,
            served=served,
        )
    )
    assert driven.job.misses_rows


def test_no_checkpoint_and_no_move_begins_while_rows_are_missing() -> None:
    driven = losing(interval=10.0)
    driven.called.clear()
    driven.plan(4)
    driven.join(Role.PS, 3)
    driven.pass_time(30)
    assert {name for name, _ in driven.called} <= {"Prune", "Resume", "Abandon"}
    driven.missing.clear()
    driven.pass_time(60)
    names = {name for name, _ in driven.called}
    assert {"Hold", "Prepare"} <= names


def test_a_suspension_waits_for_missing_rows() -> None:
    driven = losing()
    driven.suspend()
    driven.pass_time(5)
    assert driven.job.outcome is None
    driven.missing.clear()
    driven.pass_time(10)
    assert unwrap(driven.job.outcome)


def test_rows_that_do_not_come_take_the_job_back() -> None:
    driven = losing()
    version = driven.job.routing.table.version
    driven.troubles[1] = ParityTrouble(
        version, "100 rows that are rebuilt from parity do not arrive", 30.0, broken=True
    )
    driven.pass_time(6)
    assert driven.job.recoveries == 1
    assert not driven.job.misses_rows


def test_another_loss_meanwhile_takes_the_job_back() -> None:
    driven = losing()
    driven.kill(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.misses_rows) == (1, False)
    step, why = driven.job.scaling.steps[-1], "rows on ps-1 are still being rebuilt from parity"
    assert step.reason == "RolledBack"
    assert step.message == f"ps-2 is lost; the whole job goes back to a checkpoint: {why}"
