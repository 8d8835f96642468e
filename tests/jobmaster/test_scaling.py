"""Following plans: what a plan changes, when, and what it never does."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.jobmaster.pure import WORKER, Pure
from tests.jobmaster.small_job import job

from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import lifecycle, scaling, takeover
from emberscale_jobmaster.figures import phase_of, sizes_of, wanted_sizes
from emberscale_jobmaster.scaling import Advice, follow
from emberscale_jobmaster.sizes import RoleShapes, within_manifest
from emberscale_jobmaster.state import JobState, Stage
from eventually import unwrap

GIB = 1 << 30
OPEN: dict[str, Any] = {
    "worker": {"replicas": None, "maxReplicas": 8},
    "ps": {"replicas": None, "maxReplicas": 4},
    "checkpoint": {"uri": "memory://checkpoints"},
}


def sizes(workers: int, ps: int, cpu: float = 1.0) -> RoleShapes:
    return RoleShapes(RoleShape(ps, cpu, GIB), RoleShape(workers, cpu, GIB))


def plan(workers: int, ps: int, cpu: float = 1.0, version: int = 1, action: str = "Scale") -> Advice:
    return Advice(version, action, sizes(workers, ps, cpu), "because", 1000.0)


def training(**sections: object) -> Pure:
    pure = Pure(**{**OPEN, **sections})
    pure.apply(replace(pure.state, scaling=replace(pure.state.scaling, sizes=sizes(1, 1))))
    pure.start_training(records=1000)
    return pure


def test_a_job_without_sizes_starts_nobody_before_its_first_plan() -> None:
    pure = Pure(**OPEN)
    pure.apply(scaling.await_plan(pure.state, pure.spec))
    assert pure.state.scaling.waits_for_plan
    assert phase_of(pure.state, pure.spec) is JobPhase.PENDING
    pure.apply(follow(pure.state, pure.spec, plan(3, 2), now=5.0))
    assert not pure.state.scaling.waits_for_plan
    assert wanted_sizes(pure.state, pure.spec) == sizes(3, 2)


def test_a_job_with_sizes_waits_for_no_plan_and_follows_none() -> None:
    limits = {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}
    pure = Pure(worker={"replicas": 2, **limits}, ps={"replicas": 1, **limits})
    assert scaling.await_plan(pure.state, pure.spec) is pure.state
    assert follow(pure.state, pure.spec, plan(3, 2), now=5.0) is pure.state


def test_manual_scaling_follows_nothing() -> None:
    pure = training(scaling={"mode": "Manual"})
    assert follow(pure.state, pure.spec, plan(3, 2), now=1e6) is pure.state


NO_ROOM = Advice(1, "Wait", None, "2 cores are needed and 1 of 8 is free")


def test_a_job_without_room_waits_until_there_is_some() -> None:
    pure = Pure(**OPEN)
    pure.apply(scaling.await_plan(pure.state, pure.spec))
    pure.apply(follow(pure.state, pure.spec, NO_ROOM, now=40.0, wall=1000.0))
    pure.apply(follow(pure.state, pure.spec, replace(NO_ROOM, message="still too few"), now=599.0, wall=1559.0))
    waiting = pure.state.scaling
    assert (waiting.waits_for_plan, waiting.reason, waiting.since) == (True, "WaitingForRoom", 1000.0)
    assert waiting.message == "waits at most 10m for room: still too few"
    pure.apply(follow(pure.state, pure.spec, plan(3, 2, version=2), now=599.5))
    assert wanted_sizes(pure.state, pure.spec) == sizes(3, 2)


def test_a_job_that_gets_no_room_in_time_starts_as_the_manifest_says_and_says_why() -> None:
    pure = Pure(**{**OPEN, "scaling": {"timeout": "2m"}})
    pure.apply(scaling.await_plan(pure.state, pure.spec))
    pure.apply(follow(pure.state, pure.spec, NO_ROOM, now=119.0))
    assert pure.state.scaling.waits_for_plan
    pure.apply(follow(pure.state, pure.spec, NO_ROOM, now=120.0))
    assert (pure.state.scaling.waits_for_plan, pure.state.scaling.reason) == (False, "NoPlan")
    assert "the brain found no room within 2m (2 cores are needed" in pure.state.scaling.message


def test_a_job_that_will_never_have_room_starts_at_once_as_the_manifest_says() -> None:
    pure = Pure(**OPEN)
    pure.apply(scaling.await_plan(pure.state, pure.spec))
    pure.apply(follow(pure.state, pure.spec, replace(NO_ROOM, action="Refuse", message="9 cores of 8"), now=1.0))
    assert (pure.state.scaling.waits_for_plan, pure.state.scaling.reason) == (False, "NoPlan")
    assert pure.state.scaling.message.endswith("as the manifest says: 9 cores of 8")


def test_a_running_job_without_room_stays_as_it_is() -> None:
    pure = training()
    assert follow(pure.state, pure.spec, NO_ROOM, now=1e6) is pure.state


def test_without_a_plan_the_job_starts_as_the_manifest_says_and_says_why() -> None:
    pure = Pure(**OPEN)
    pure.apply(scaling.await_plan(pure.state, pure.spec))
    pure.apply(scaling.stop_waiting(pure.state, pure.spec, "the brain is away"))
    assert wanted_sizes(pure.state, pure.spec).worker.replicas == 1
    assert pure.state.scaling.reason == "NoPlan"
    assert "the brain is away" in pure.state.scaling.message


def test_more_workers_are_wanted_at_once() -> None:
    pure = training()
    pure.apply(follow(pure.state, pure.spec, plan(4, 1), now=100.0))
    assert sizes_of(pure.state, pure.spec) == sizes(4, 1)
    assert pure.state.routing.ready
    assert "workers 1 x 1 cores 1 GiB -> 4 x 1 cores 1 GiB" in pure.state.scaling.message


def test_a_change_waits_for_the_cooldown_unless_memory_runs_out() -> None:
    pure = training(scaling={"cooldown": "60s"})
    pure.apply(follow(pure.state, pure.spec, plan(2, 1), now=100.0))
    assert follow(pure.state, pure.spec, plan(3, 1, version=2), now=159.0) is pure.state
    urgent = follow(pure.state, pure.spec, plan(3, 1, version=2, action="GrowMemory"), now=159.0)
    assert sizes_of(urgent, pure.spec).worker.replicas == 3
    rested = follow(pure.state, pure.spec, plan(3, 1, version=2), now=160.0)
    assert sizes_of(rested, pure.spec).worker.replicas == 3


def test_more_servers_are_started_first_and_serve_once_the_rows_have_moved() -> None:
    pure = training()
    table = pure.state.routing.table
    pure.apply(follow(pure.state, pure.spec, plan(2, 3), now=100.0))
    assert wanted_sizes(pure.state, pure.spec) == sizes(2, 3)
    assert sizes_of(pure.state, pure.spec).ps.replicas == 1
    assert not scaling.move_due(pure.state)
    pure.register(Role.PS, 1, "ps-1")
    assert not scaling.move_due(pure.state)
    pure.register(Role.PS, 2, "ps-2")
    assert scaling.move_due(pure.state)
    task = unwrap(pure.acquire())
    pure.moved()
    assert sizes_of(pure.state, pure.spec) == sizes(2, 3)
    assert pure.state.routing.table.generation == table.generation
    assert pure.state.routing.table.version > table.version
    assert task.token in pure.state.ledger.leases
    assert pure.state.recoveries == 0
    assert not scaling.move_due(pure.state)


def test_fewer_servers_go_only_after_their_rows_have() -> None:
    pure = training()
    pure.apply(replace(pure.state, scaling=replace(pure.state.scaling, sizes=sizes(1, 1))))
    pure.apply(follow(pure.state, pure.spec, plan(1, 2), now=100.0))
    pure.register(Role.PS, 1, "ps-1")
    pure.moved()
    pure.apply(follow(pure.state, pure.spec, plan(1, 1, version=2), now=1000.0))
    assert wanted_sizes(pure.state, pure.spec).ps.replicas == 2
    assert scaling.move_due(pure.state)
    pure.moved()
    assert wanted_sizes(pure.state, pure.spec).ps.replicas == 1
    assert len(pure.state.routing.table.servers) == 1


def test_servers_that_do_not_come_are_given_up() -> None:
    pure = training()
    pure.apply(follow(pure.state, pure.spec, plan(1, 3), now=100.0))
    assert scaling.on_time_passed(pure.state, pure.spec, now=100.0 + 600.0 - 1) is pure.state
    pure.apply(scaling.on_time_passed(pure.state, pure.spec, now=100.0 + 600.0))
    assert wanted_sizes(pure.state, pure.spec) == sizes(1, 1)
    assert "ps-1, ps-2 did not join" in pure.state.scaling.message


def test_rows_move_without_a_place_for_checkpoints() -> None:
    pure = training(checkpoint={})
    pure.apply(follow(pure.state, pure.spec, plan(2, 3), now=100.0))
    assert wanted_sizes(pure.state, pure.spec) == sizes(2, 3)


def test_a_lost_server_brings_back_the_shape_in_force_and_the_change_goes_on_afterwards() -> None:
    pure = training()
    pure.apply(follow(pure.state, pure.spec, plan(1, 2), now=100.0))
    pure.register(Role.PS, 1, "ps-1")
    pure.register(Role.PS, 0, "ps-0-again")
    assert pure.state.recoveries == 1
    pure.assign()
    assert len(pure.state.routing.table.servers) == 1
    assert scaling.move_due(pure.state)


def test_a_worker_that_leaves_by_plan_gives_its_shard_back() -> None:
    pure = training()
    task = unwrap(pure.acquire(WORKER))
    pure.apply(lifecycle.on_exit(pure.state, pure.spec, WORKER, 0, "Completed"))
    pure.register(Role.WORKER, 1, "w1")
    assert pure.state.ledger.available >= task.stop - task.start


shapes = st.builds(
    RoleShapes,
    st.builds(RoleShape, st.integers(1, 8), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([GIB, 2 * GIB])),
    st.builds(RoleShape, st.integers(1, 16), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([GIB, 2 * GIB])),
)


@given(st.lists(st.tuples(shapes, st.floats(0, 300)), max_size=12), st.booleans())
def test_whatever_is_planned_the_shape_stays_within_the_manifest_and_keeps_the_cooldown(
    plans: list[tuple[RoleShapes, float]], with_checkpoints: bool
) -> None:
    pure = training(checkpoint={"uri": "memory://c"} if with_checkpoints else {}, scaling={"cooldown": "60s"})
    wall, changed = 0.0, []
    for version, (wanted, pause) in enumerate(plans, start=1):
        wall += pause
        before = pure.state.scaling.scalings
        pure.apply(follow(pure.state, pure.spec, Advice(version, "Scale", wanted, "because"), wall))
        after = wanted_sizes(pure.state, pure.spec)
        assert _allowed(after, pure.spec)
        assert sizes_of(pure.state, pure.spec).ps.replicas == len(pure.state.routing.table.servers)
        if pure.state.scaling.scalings > before:
            changed.append(wall)
        again = follow(pure.state, pure.spec, Advice(version, "Scale", wanted, "because"), wall)
        assert wanted_sizes(again, pure.spec) == after
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(changed))


def _allowed(shape: RoleShapes, spec: TrainingJobSpec) -> bool:
    return within_manifest(shape, spec) == shape


@pytest.mark.parametrize("stage", [Stage.EVALUATE, Stage.SAVE, Stage.READY])
def test_nothing_changes_while_the_job_does_not_train(stage: Stage) -> None:
    pure = training()
    resting: JobState = replace(pure.state, stage=stage)
    assert follow(resting, pure.spec, plan(4, 2), now=1e6) is resting


def test_a_new_master_goes_on_with_the_planned_shape() -> None:
    pure = training()
    pure.apply(follow(pure.state, pure.spec, plan(4, 1), now=100.0))
    narrower = job(**{**OPEN, "worker": {"replicas": None, "maxReplicas": 2}}).spec
    for spec, workers in ((pure.spec, 4), (narrower, 2)):
        taken_over = takeover.on_takeover(pure.state, spec, 200.0)
        goes_on = scaling.follow_manifest(taken_over, spec, sizes_of(taken_over, spec), now=200.0)
        assert sizes_of(goes_on, spec) == sizes(workers, 1)
