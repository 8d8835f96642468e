"""Saves of priority rows between checkpoints: when they are taken, and which ones a lost server loads."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault

from emberscale_api.checkpoint import CheckpointManifest, is_priority
from emberscale_api.job.roles import Role
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_jobmaster.effects import CallServer, Effect, PrepareCall, SavedCall, WriteManifest
from emberscale_jobmaster.events import Event, Saved, ServerAnswered, StorageFailed
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.status import job_status
from master_stand_in import checkpoint_manifest

INTERVAL = 80.0
BETWEEN = INTERVAL / 8


def saving(priority: str = "MFU", **settings: object) -> Driven:
    """A job that has just taken its first checkpoint, and trained a batch since."""
    driven = Driven(**{"interval": INTERVAL, "target_pls": 1.0, "priority": priority, "records": 1000, **settings})  # type: ignore[arg-type]  # any of its fields
    driven.start()
    driven.train(20)
    driven.pass_time(driven.interval + 2)
    assert driven.job.checkpoint == "00000001"
    driven.join(Role.WORKER, 0)  # the lease of the first is over
    driven.train(1)
    return driven


def loaded(driven: Driven) -> list[tuple[str, tuple[str, ...]]]:
    """Records what each successor is told to load: a checkpoint, and saves over it."""
    called: list[tuple[str, tuple[str, ...]]] = []
    tell = driven._call

    def call(effect: CallServer) -> object:
        if isinstance(effect.request, PrepareCall) and effect.server.index == 1:
            called.append((effect.request.checkpoint, effect.request.priority))
        return tell(effect)

    driven._call = call  # type: ignore[method-assign,assignment]  # listens
    return called


def test_rows_are_saved_every_eighth_of_an_interval_and_complete_the_checkpoint() -> None:
    driven = saving()
    driven.pass_time(3.5 * BETWEEN)
    assert driven.job.priority.saves == ("priority-00000002", "priority-00000003", "priority-00000004")
    written = driven.storage.written["priority-00000004"]
    assert written.partial_rows == driven.job.checkpoint == "00000001"
    assert [cost.checkpoint for cost in driven.job.checkpoint_costs] == ["00000001"]
    driven.train_for(INTERVAL)
    newest = driven.job.checkpoint
    assert newest > "00000001"
    assert driven.job.priority.over("00000001", driven.job.routing.table.generation) == ()
    driven.train_for(BETWEEN)
    assert driven.job.priority.saves
    assert all(driven.storage.written[save].partial_rows == newest for save in driven.job.priority.saves)
    assert [int(save[-2:]) for save in driven.storage.checkpoints if is_priority(save)] == sorted(
        int(save[-2:]) for save in driven.job.priority.saves
    ), "those of the checkpoint before are removed"


def test_seven_saves_lie_between_two_checkpoints() -> None:
    driven = saving()
    driven.train_for(3.5 * INTERVAL)
    written = driven.storage.written
    completed = Counter(written[save].partial_rows for save in written if is_priority(save))
    whole = [one for one in written if not is_priority(one)]
    assert [completed[one] for one in whole[1:-1]] == [7, 7]


def test_a_job_with_flash_checkpoints_warns_that_it_saves_hardly_any_rows() -> None:
    driven = Driven(interval=300.0, flash_interval=15.0, target_pls=1.0, priority="MFU")
    driven.start()
    driven.train(20)
    driven.pass_time(620)
    assert driven.job.flash.checkpoint
    assert not driven.job.priority.saves
    (sign,) = job_status(driven.job, Observations(), driven.spec, driven.now).warnings
    assert sign.startswith("spec.faultTolerance.priority saves hardly any rows beside flash checkpoints")
    without = saving()
    assert not job_status(without.job, Observations(), without.spec, without.now).warnings


@pytest.mark.parametrize("settings", [{"priority": "None"}, {"priority": "SSU", "incremental": "Consecutive"}])
def test_checkpoints_are_as_without_them(settings: dict[str, str]) -> None:
    driven = saving(**settings)
    driven.train_for(2 * INTERVAL)
    built_on = {one: since for one, since in driven.storage.built_on.items() if not is_priority(one)}
    consecutive = settings.get("incremental") == "Consecutive"
    before = ""
    for one, since in built_on.items():
        assert since == (before if consecutive else "")
        before = one
    assert bool(driven.job.priority.saves) is (settings["priority"] != "None")


def test_a_lost_server_loads_the_checkpoint_and_then_the_saves() -> None:
    driven = saving()
    driven.pass_time(2.5 * BETWEEN)
    saves = driven.job.priority.saves
    driven.train(4)
    driven.kill(Role.PS, 1)
    called = loaded(driven)
    driven.join(Role.PS, 1)
    assert set(called) == {("00000001", saves)}
    (share,) = driven.job.forgotten
    assert (share.checkpoint, share.priority_saves, share.samples) == ("00000001", 2, 50)
    assert "00000001 with 2 saves of priority rows" in driven.job.scaling.steps[-1].message
    status = job_status(driven.job, Observations(), driven.spec, driven.now)
    assert [one.priority_saves for one in status.forgotten] == [2]
    driven.pass_time(BETWEEN)
    assert driven.job.priority.saves[:2] == saves, "they are still of this history"
    driven.train_all()


def test_after_a_roll_back_the_saves_of_before_are_loaded_by_none() -> None:
    driven = saving()
    driven.pass_time(2.5 * BETWEEN)
    before = driven.job.priority.saves
    for index in range(2):
        driven.kill(Role.PS, index)
    for index in range(2):
        driven.join(Role.PS, index)
    assert driven.job.routing.table.generation > 1
    driven.kill(Role.PS, 1)
    called = loaded(driven)
    driven.join(Role.PS, 1)
    assert set(called) == {("00000001", ())}
    driven.join(Role.WORKER, 0)
    driven.train_for(1.5 * BETWEEN)
    assert driven.job.priority.saves
    assert not {*driven.job.priority.saves} & {*before}


def test_a_damaged_save_is_left_out_and_the_checkpoint_is_not_blamed() -> None:
    driven = saving()
    driven.pass_time(2.5 * BETWEEN)
    driven.kill(Role.PS, 1)
    driven.faults["Prepare", 1] = Fault(code="DATA_LOSS")
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert not driven.job.damaged
    assert driven.job.routing.ready
    assert [(one.checkpoint, one.priority_saves) for one in driven.job.forgotten] == [("00000001", 0)]


def test_rows_that_have_seen_what_no_survivor_has_are_left_out() -> None:
    driven = saving()
    driven.pass_time(1.5 * BETWEEN)
    rows = driven.job.priority
    foreign = replace(rows, applied={0: ((0, 50),)})
    driven.kill(Role.PS, 1)
    driven.state = replace(driven.state, job=replace(driven.job, priority=foreign))
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert [one.priority_saves for one in driven.job.forgotten] == [0]
    assert driven.job.routing.table.generation == 1


def test_a_save_that_fails_is_tried_again_and_costs_no_checkpoint() -> None:
    driven = saving()
    driven.faults["Saved", 1] = Fault(code="ABORTED")
    driven.pass_time(1.2 * BETWEEN)
    assert CheckpointPurpose.PRIORITY in driven.job.troubles
    assert not driven.job.priority.saves
    driven.pass_time(2 * BETWEEN)
    assert driven.job.priority.saves
    assert CheckpointPurpose.PRIORITY not in driven.job.troubles
    assert driven.job.chain.base == "00000001"


def test_servers_are_told_of_the_last_save_that_counts() -> None:
    driven = saving()
    driven.pass_time(1.5 * BETWEEN)
    driven.faults["Saved", 1] = Fault(code="ABORTED")
    driven.pass_time(2 * BETWEEN)
    before = {one: since for one, since in driven.storage.built_on.items() if is_priority(one)}
    assert before == {
        "priority-00000002": "00000001",
        "priority-00000003": "priority-00000002",  # which fails
        "priority-00000004": "priority-00000002",
    }
    driven.train_for(INTERVAL)
    first = min(driven.job.priority.saves)
    assert driven.storage.built_on[first] == driven.job.checkpoint


def test_a_checkpoint_does_not_wait_for_a_save_that_hangs() -> None:
    driven = saving()
    driven.pass_time(6.5 * BETWEEN)
    driven.faults["Saved", 1] = Fault(hangs=True)
    driven.pass_time(BETWEEN)
    assert any(one.is_for_priority for one in driven.job.checkpointings)
    driven.pass_time(BETWEEN)
    assert driven.job.checkpoint > "00000001"


@pytest.mark.parametrize("grows", [True, False])
def test_a_save_lasts_while_its_server_examines_more_rows(grows: bool) -> None:
    driven = saving(interval=1600.0)
    driven.pass_time(100)
    call, asked = driven._call, list[CallServer]()

    def wait(effect: CallServer) -> Event | None:
        if not isinstance(effect.request, SavedCall):
            return call(effect)
        asked.append(effect)
        return None

    driven._call = wait  # type: ignore[method-assign,assignment]  # listens
    driven.pass_time(110)
    for half_minute in range(4):
        waiting, asked[:] = [*asked], []
        answer = Saved(done=False, examined_rows=(half_minute if grows else 1) * 1_000_000)
        for one in waiting:
            driven.tell(
                ServerAnswered(
                    now=driven.now, operation=one.operation, serial=one.serial, server=one.server.index, answer=answer
                )
            )
        driven.pass_time(30)
    assert bool(driven.job.checkpointings) is grows
    driven._call = call  # type: ignore[method-assign]
    for one in asked:
        driven.answer(one)
    assert bool(driven.job.priority.saves) is grows


def test_a_save_whose_manifest_is_late_ends_with_its_checkpoint() -> None:
    driven = saving()
    driven.pass_time(6.2 * BETWEEN)
    carry_out = driven._carry_out

    def fail_for_the_first(effect: Effect) -> Event | None:
        if isinstance(effect, WriteManifest) and effect.partial_rows == "00000001":
            return StorageFailed(now=driven.now, operation=effect.operation, serial=effect.serial, problem="EIO")
        return carry_out(effect)

    driven._carry_out = fail_for_the_first  # type: ignore[method-assign]  # a fault of some writes only
    driven.pass_time(3 * BETWEEN)
    newest = driven.job.checkpoint
    assert newest > "00000001"
    assert not any(one.is_for_priority for one in driven.job.checkpointings)
    driven.train_for(BETWEEN)
    assert driven.job.priority.checkpoint == newest


def test_a_new_master_knows_of_the_saves() -> None:
    driven = saving()
    driven.pass_time(1.5 * BETWEEN)
    saves = driven.job.priority.saves
    driven.master_dies()
    assert driven.job.priority.saves == saves


def test_saves_older_than_the_newest_checkpoint_are_removed_and_no_save_is_a_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path))
    for identifier in ("00000003", "priority-00000002", "priority-00000004"):
        (tmp_path / identifier).mkdir()
        manifest = checkpoint_manifest(id=identifier, number=int(identifier[-8:]))
        folder.write(manifest.model_copy(update={"files": ()}))
    assert folder.folders() == folder.complete() == ["00000003"]
    folder.prune(keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "priority-00000004"]
    text = (tmp_path / "priority-00000004" / "manifest.json").read_text()
    assert CheckpointManifest.from_json(text, "m").number == 4
