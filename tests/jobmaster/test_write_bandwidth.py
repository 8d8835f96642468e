"""Which checkpoints are written at a limited bandwidth, what does not wait for them, and when the limit is too low."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.storage_double import StorageDouble

from emberscale_api.checkpoint import is_flash, is_priority
from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_jobmaster import checkpointing, draining
from emberscale_jobmaster.checkpointing import SAVE_SECONDS, SLOWED
from emberscale_jobmaster.due_checkpoints import STALLED_SECONDS
from emberscale_jobmaster.effects import CallServer, CheckpointTaken, SavedCall
from emberscale_jobmaster.events import DrainWanted, Saved, ServerAnswered
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.reports import ServerReport
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.warning_signs import warning_signs
from eventually import unwrap

INTERVAL = 20.0
LIMIT = 2 << 20


def limited(**settings: object) -> Driven:
    driven = Driven(**{"interval": INTERVAL, "write_bandwidth": "2Mi", "records": 200, **settings})  # type: ignore[arg-type]  # any of its fields
    driven.start()
    return driven


def writing(bandwidth: str | None = "2Mi") -> Driven:
    """A job that has just begun to write a checkpoint at the interval, and is going on with it."""
    driven = limited(write_bandwidth=bandwidth)
    driven.train(3)
    driven.faults["Saved", 0] = Fault(hangs=True)
    driven.pass_time(INTERVAL + 2)
    assert [one.purpose for one in driven.job.checkpointings] == [CheckpointPurpose.PERIODIC]
    return driven


def test_checkpoints_at_the_interval_are_limited_and_the_one_at_the_end_is_not() -> None:
    driven = limited()
    driven.train_for(2.5 * INTERVAL)
    driven.train_all()
    driven.pass_time(INTERVAL)
    assert unwrap(driven.job.outcome).reason == "Completed"
    *periodic, last = [driven.storage.limits[name] for name in sorted(driven.storage.limits)]
    assert len(periodic) >= 2
    assert {*periodic} == {LIMIT}
    assert last == 0


def test_saves_of_priority_rows_are_limited_and_flash_checkpoints_are_not() -> None:
    driven = limited(target_pls=0.5, priority="MFU", records=2000)
    driven.train_for(2.5 * INTERVAL)
    saves = {limit for name, limit in driven.storage.limits.items() if is_priority(name)}
    assert saves == {LIMIT}
    driven = limited(flash_interval=5.0, records=2000)
    driven.train_for(2.5 * INTERVAL)
    assert {limit for name, limit in driven.storage.limits.items() if is_flash(name)} == {0}


def test_without_the_field_nothing_is_limited() -> None:
    driven = limited(write_bandwidth=None)
    driven.train_for(2.5 * INTERVAL)
    assert {*driven.storage.limits.values()} == {0}


@pytest.mark.parametrize("ends", [Driven.train_all, Driven.suspend])
def test_a_checkpoint_that_the_job_waits_for_does_not_wait_for_one_of_limited_bandwidth(ends: object) -> None:
    driven = writing()
    driven.faults.clear()
    ends(driven)  # type: ignore[operator]
    driven.pass_time(3)
    assert not driven.job.checkpointings
    assert driven.storage.limits[driven.job.checkpoint] == 0


def test_it_waits_for_one_of_full_speed_that_makes_progress() -> None:
    driven = writing(bandwidth=None)
    driven.train_all()
    driven.pass_time(STALLED_SECONDS / 3)
    assert [one.purpose for one in driven.job.checkpointings] == [CheckpointPurpose.PERIODIC]


def drain_last(driven: Driven) -> None:
    last = driven.ps[2].member
    driven.tell(DrainWanted(now=driven.now, index=last.index, incarnation=last.incarnation, why="a test"))


def scale_in(driven: Driven) -> None:
    driven.plan(servers=2)


def asked_for_full_speed(driven: Driven) -> list[bool]:
    """All servers report progress; returns whether each is then asked to go on at full speed, by index."""
    calls = [call for call in driven.unanswered if isinstance(call, CallServer)]
    driven.unanswered.clear()
    for call in calls:
        (taking,) = driven.job.checkpointings
        answer = Saved(done=False, written_bytes=taking.written.get(call.server.index, 0) + 1)
        where: dict[str, Any] = {"operation": call.operation, "serial": call.serial, "server": call.server.index}
        driven.tell(ServerAnswered(now=driven.now, answer=answer, **where))
    asked = [call for call in driven.unanswered if isinstance(call, CallServer)]
    saving = {call.server.index: call.request for call in asked if isinstance(call.request, SavedCall)}
    return [request.at_full_speed for _, request in sorted(saving.items())]


@pytest.mark.parametrize("leave", [drain_last, scale_in])
def test_a_server_that_leaves_writes_at_full_speed_and_goes_while_the_others_write_at_the_limit(
    leave: Callable[[Driven], None],
) -> None:
    driven = limited(sizes_open=True)
    driven.plan(servers=3)
    leaver = driven.join(Role.PS, 2)
    driven.train(3)
    driven.faults = {("Saved", index): Fault(hangs=True, times=1000) for index in driven.ps}
    driven.pass_time(INTERVAL + 2)
    assert asked_for_full_speed(driven) == [False, False, False]
    leave(driven)
    assert asked_for_full_speed(driven) == [False, False, True]
    driven.pass_time(5)
    assert not draining.may_go(driven.job, 2, leaver.incarnation)
    driven.faults.clear()
    *others, last = [call for call in driven.unanswered if isinstance(call, CallServer)]
    driven.answer(last)
    driven.pass_time(5)
    assert draining.may_go(driven.job, 2, leaver.incarnation)
    driven.kill(Role.PS, 2)
    driven.train(3)
    (taking,) = driven.job.checkpointings
    for call in others:
        driven.answer(call)
    assert driven.job.checkpoint == taking.checkpoint
    writers = {Path(file.path).parent.name for file in driven.storage.written[taking.checkpoint].files}
    assert writers == {"ps-0", "ps-1", "ps-2"}
    assert driven.job.recoveries == 0


def test_at_most_one_is_written_however_late_it_is() -> None:
    driven = writing()
    driven.pass_time(min(SAVE_SECONDS / 2, 1.5 * INTERVAL))
    assert len(driven.job.checkpointings) == 1


def test_time_in_which_a_writer_waits_for_bandwidth_costs_no_training() -> None:
    driven = writing()
    (taking,) = driven.job.checkpointings
    for waited in (80.0, 90.0):
        answer = Saved(done=False, written_bytes=5, waited_seconds=waited)
        state = checkpointing.on_saved(driven.job, taking, 0, answer, taking.began_at + 95.0)
        (taking,) = state.checkpointings
    taking = replace(taking, held_seconds=2.0)
    _, (taken,) = checkpointing.on_manifest_written(state, taking, taking.began_at + 100.0)
    assert isinstance(taken, CheckpointTaken)
    assert taken.seconds == pytest.approx(100.0)
    assert taken.cost_seconds == pytest.approx(2.0 + SLOWED * 8.0)


def signs(driven: Driven, state: JobState | None = None, table_bytes: int = 0) -> list[str]:
    member = driven.ps[0].member
    report = ServerReport(rows={}, table_bytes=table_bytes, applied_batches=0, repeated_batches=0, stage_seconds={})
    seen = Observations().heard(member).served(member, report)
    return [sign for sign in warning_signs(state or driven.job, seen, driven.spec) if "writeBandwidth" in sign]


def written(driven: Driven, size: int) -> JobState:
    """The state in which one server has written so many bytes of the checkpoint under way."""
    (taking,) = driven.job.checkpointings
    return driven.job.having(replace(taking, written={0: size, 1: 10}))


def test_while_checkpoints_fit_into_their_interval_nothing_is_told() -> None:
    driven = writing()
    assert signs(driven) == []
    assert signs(driven, written(driven, int(LIMIT * INTERVAL)), table_bytes=1 << 40) == []
    assert signs(driven, replace(driven.job, most_written=int(LIMIT * INTERVAL))) == []


def test_of_a_checkpoint_that_took_longer_the_bandwidth_that_would_do_is_told() -> None:
    driven = writing()
    (sign,) = signs(driven, replace(driven.job, most_written=int(LIMIT * INTERVAL * 2.1)))
    assert sign == (
        "checkpoints take longer than their interval at spec.checkpoint.writeBandwidth 2Mi, so fewer are taken: 8Mi "
        "would do, or a longer spec.checkpoint.interval"
    )
    assert signs(driven, replace(driven.job, most_written=int(LIMIT * INTERVAL * 3.9))) == [sign]


def test_of_one_that_is_late_already_it_follows_from_the_size_of_the_tables() -> None:
    driven = writing()
    late = written(driven, int(LIMIT * INTERVAL) + 1)
    assert "4Mi would do" in signs(driven, late)[0]
    assert "128Mi would do" in signs(driven, late, table_bytes=int(LIMIT * INTERVAL * 50))[0]
    later = replace(late, most_written=int(LIMIT * INTERVAL * 2.1))
    assert "8Mi would do" in signs(driven, later, table_bytes=int(LIMIT * INTERVAL * 50))[0]


def test_what_a_server_wrote_is_measured_in_checkpoints_of_limited_bandwidth_only() -> None:
    driven = limited(incremental="OneShot", storage=StorageDouble(changed_bytes=2))
    driven.train_for(2.5 * INTERVAL)
    assert driven.job.checkpoint_costs[-1].bytes == 24
    assert driven.job.most_written == 2
    driven.storage.changed_bytes = 1000
    driven.train(1)
    driven.suspend()
    driven.pass_time(5)
    assert driven.job.checkpoint_costs[-1].written_bytes == 2000
    assert driven.job.most_written == 2
    unlimited = limited(write_bandwidth=None)
    unlimited.train_for(1.5 * INTERVAL)
    assert unlimited.job.most_written == 0
