import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue

import pytest
from sqlalchemy import Engine

from brain_process import BrainProcess
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.history.changes import Change, JobEnded, JobSubmitted, PlanMade, ProfileReported, StartUpObserved
from emberscale_brain.history.database import DatabaseAwayError, DatabaseUnusableError, open_engine
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, JobMetadata, PlanAction, PlannedShape, ShapeBounds
from emberscale_brain.service.recorder import ChangeRecorder
from postgres import PostgresServer, postgres_binaries

SHAPE = JobShape(2, 1, 4, 4, GIB, GIB)
JOB = JobId("a")


def submitted() -> Change:
    return JobSubmitted(JOB, "ann", JobMetadata("DLRM", 512, 1, 1, 1, 10**6), ShapeBounds(), 0.0)


def reported(sequence: int) -> ProfileReported:
    return ProfileReported(JOB, sequence, JobProfile(0.0, SHAPE, 512, 0.1, 1000.0))


def planned(version: int) -> PlanMade:
    return PlanMade(JOB, version, 0.0, "p", PlannedShape(SHAPE, PlanAction.SCALE, "why"))


def written(recorder: ChangeRecorder, *changes: Change) -> bool:
    """Records changes and has the recorder write, without its thread; returns whether the changes are durable."""
    durable = recorder.record(changes)
    recorder.write_waiting()
    return durable.result(timeout=0)


class HangingStore(HistoryStore):
    """A database whose writes hang until `goes_on` is set; `began` says that one does."""

    def __init__(self, engine: Engine, exclusive: bool = False) -> None:
        super().__init__(engine, exclusive)
        self.began, self.goes_on = threading.Event(), threading.Event()

    def write(self, changes: Sequence[Change]) -> None:
        self.began.set()
        assert self.goes_on.wait(timeout=60)
        super().write(changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "database"
    made.mkdir()
    return made


@pytest.fixture
def absent_store(folder: Path) -> Iterator[HistoryStore]:
    """A database whose folder does not exist."""
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    shutil.rmtree(folder)
    yield store
    store.close()


def test_what_waited_for_the_database_is_in_it_once_it_is_back(absent_store: HistoryStore, folder: Path) -> None:
    came_back = []
    recorder = ChangeRecorder(absent_store, on_return=lambda: came_back.append(True))
    assert written(recorder, submitted()) is False
    problem = recorder.away
    assert problem is not None
    assert recorder.record([reported(1), reported(2)]).result(timeout=0) is False
    folder.mkdir()
    recorder.write_waiting()
    assert (recorder.away, recorder.backlog, came_back) == (None, 0, [True])
    assert written(recorder, reported(3)) is True
    assert came_back == [True]
    assert absent_store.running_jobs(10) == [submitted(), reported(1), reported(2), reported(3)]


def test_a_database_that_is_away_is_tried_again_while_nobody_reports(absent_store: HistoryStore, folder: Path) -> None:
    came_back = threading.Event()
    recorder = ChangeRecorder(absent_store, retry_seconds=0.05, on_return=came_back.set)
    assert written(recorder, submitted()) is False
    folder.mkdir()
    recorder.start(recorder.away)
    assert came_back.wait(timeout=60)
    recorder.stop()
    assert recorder.away is None
    assert absent_store.running_jobs(10) == [submitted()]


def test_what_is_repeated_is_not_said_to_be_there_before_it_is(absent_store: HistoryStore, folder: Path) -> None:
    recorder = ChangeRecorder(absent_store)
    assert written(recorder, submitted()) is False
    assert written(recorder) is False
    folder.mkdir()
    assert written(recorder) is False
    assert written(recorder) is True
    assert absent_store.running_jobs(10) == [submitted()]


def test_plans_that_were_followed_by_others_go_when_no_profile_is_left(
    absent_store: HistoryStore, folder: Path
) -> None:
    recorder = ChangeRecorder(absent_store, retry_seconds=0.05, most_kept=3)
    recorder.start("it is not there")
    recorder.record([submitted(), *(planned(version) for version in range(1, 6))]).result(timeout=60)
    assert recorder.backlog == 3
    folder.mkdir()
    recorder.stop()
    assert [plan.version for plan in absent_store.plans(JOB, 10)] == [5, 4]


def test_the_oldest_profiles_go_when_too_many_wait(absent_store: HistoryStore, folder: Path) -> None:
    lost: Counter[str] = Counter()
    recorder = ChangeRecorder(
        absent_store, retry_seconds=0.05, most_kept=4, on_lost=lambda why, count: lost.update({why: count})
    )
    recorder.start("it is not there")
    recorder.record([submitted(), *(reported(n) for n in range(8))]).result(timeout=60)
    assert lost == {"Dropped": 5}
    folder.mkdir()
    recorder.stop()
    assert absent_store.running_jobs(10) == [submitted(), reported(5), reported(6), reported(7)]


@pytest.fixture
def hanging_store(folder: Path) -> Iterator[HangingStore]:
    store = HangingStore(open_engine(f"sqlite:///{folder / 'brain.db'}"))
    store.migrate()
    yield store
    store.goes_on.set()
    store.close()


def test_a_database_that_hangs_is_away_until_it_answers(hanging_store: HangingStore) -> None:
    now = [0.0]
    recorder = ChangeRecorder(hanging_store, hang_seconds=10.0, clock=lambda: now[0])
    recorder.start()
    hanging = recorder.record([submitted()])
    assert hanging_store.began.wait(timeout=60)
    now[0] = 10.0
    assert recorder.away is None
    now[0] = 10.1
    assert recorder.away == "the database has not answered a write for more than 10s"
    assert recorder.record([reported(1)]).result(timeout=0) is False
    assert (recorder.backlog, hanging.done()) == (2, False)
    hanging_store.goes_on.set()
    assert hanging.result(timeout=60) is True
    assert recorder.record([]).result(timeout=60) is True
    assert (recorder.away, recorder.backlog) == (None, 0)
    recorder.stop()
    assert hanging_store.running_jobs(10) == [submitted(), reported(1)]


def test_no_more_is_kept_than_may_be_while_the_database_hangs(hanging_store: HangingStore) -> None:
    lost: Counter[str] = Counter()
    recorder = ChangeRecorder(hanging_store, most_kept=4, on_lost=lambda why, count: lost.update({why: count}))
    recorder.start()
    recorder.record([submitted(), reported(0)])
    assert hanging_store.began.wait(timeout=60)
    backlogs, told = [], []
    for sequence in range(1, 6):
        told.append(recorder.record([reported(sequence)]))
        backlogs.append(recorder.backlog)
    assert (backlogs, lost) == ([3, 4, 4, 4, 4], {"Dropped": 3})
    hanging_store.goes_on.set()
    assert [durable.result(timeout=60) for durable in told[:3]] == [False, False, False]
    recorder.stop()
    assert hanging_store.running_jobs(10) == [submitted(), reported(0), reported(4), reported(5)]


def test_a_change_that_the_database_refuses_holds_up_nothing(folder: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    lost: Counter[str] = Counter()
    recorder = ChangeRecorder(store, on_lost=lambda why, count: lost.update({why: count}))
    stranger = StartUpObserved(JobId("stranger"), "ps", 0.0, 1.0)
    refused, fine = recorder.record([stranger]), recorder.record([submitted(), reported(1)])
    recorder.start()
    assert (refused.result(timeout=60), fine.result(timeout=60)) == (False, True)
    recorder.stop()
    assert lost == {"Refused": 1}
    assert store.running_jobs(10) == [submitted(), reported(1)]
    store.close()


def test_a_profile_that_the_database_refused_is_not_said_to_be_there_when_it_is_repeated(folder: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    recorder = ChangeRecorder(store)
    recorder.start()
    assert recorder.record([reported(1)]).result(timeout=60) is False
    assert recorder.record([], [reported(1)]).result(timeout=60) is False
    assert recorder.record([submitted(), reported(2)]).result(timeout=60) is True
    assert recorder.record([], [reported(2)]).result(timeout=60) is True
    recorder.stop()
    store.close()


def test_a_change_of_a_job_that_the_database_lost_brings_the_job_back(folder: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    lost: Counter[str] = Counter()
    recorder = ChangeRecorder(
        store,
        on_lost=lambda why, count: lost.update({why: count}),
        retell=lambda job: [submitted(), reported(1)] if job == JOB else [],
    )
    recorder.start()
    assert recorder.record([reported(2)]).result(timeout=60) is True
    assert recorder.record([JobEnded(JobId("nobody"), "Failed", 0.0)]).result(timeout=60) is False
    recorder.stop()
    assert lost == {"Refused": 1}
    assert store.running_jobs(10) == [submitted(), reported(1), reported(2)]
    store.close()


def test_a_change_that_cannot_be_written_at_all_ends_neither_the_recorder_nor_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    write = HistoryStore.write

    def stumble(self: HistoryStore, changes: Sequence[Change]) -> None:
        if any(change == reported(2) for change in changes):
            raise ZeroDivisionError("no such luck")
        write(self, changes)

    monkeypatch.setattr(HistoryStore, "write", stumble)
    recorder = ChangeRecorder(store)
    fine, poisoned, later = (recorder.record(changes) for changes in ([submitted()], [reported(2)], [reported(3)]))
    recorder.start()
    assert [future.result(timeout=60) for future in (fine, poisoned, later)] == [True, False, True]
    recorder.stop()
    store.close()


def test_a_refused_change_is_counted_once_though_the_database_fails_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    write, away = HistoryStore.write, [DatabaseAwayError("it went between two writes")]

    def fail_once(self: HistoryStore, changes: Sequence[Change]) -> None:
        if changes == [submitted()] and away:
            raise away.pop()
        write(self, changes)

    monkeypatch.setattr(HistoryStore, "write", fail_once)
    lost: Counter[str] = Counter()
    recorder = ChangeRecorder(store, on_lost=lambda why, count: lost.update({why: count}))
    assert written(recorder, reported(1), submitted(), reported(2)) is False
    assert recorder.backlog == 2
    recorder.write_waiting()
    assert (recorder.away, recorder.backlog, lost) == (None, 0, {"Refused": 1})
    assert store.running_jobs(10) == [submitted(), reported(2)]
    store.close()


def test_an_error_of_the_recorder_itself_is_told_and_it_goes_on(absent_store: HistoryStore, folder: Path) -> None:
    errors = [ZeroDivisionError("no such luck")]

    def stumble() -> None:
        if errors:
            raise errors.pop()

    recorder = ChangeRecorder(absent_store, on_return=stumble)
    assert written(recorder, submitted()) is False
    folder.mkdir()
    recorder.write_waiting()
    assert recorder.away == "the recorder failed: ZeroDivisionError: no such luck"
    recorder.write_waiting()
    assert recorder.away is None
    assert absent_store.running_jobs(10) == [submitted()]


def test_a_database_that_goes_again_while_it_is_read_is_tried_again(absent_store: HistoryStore, folder: Path) -> None:
    trouble = [DatabaseAwayError("gone again"), DatabaseUnusableError("written by a newer Emberscale")]

    def read() -> None:
        if trouble:
            raise trouble.pop()

    recorder = ChangeRecorder(absent_store, on_return=read)
    assert written(recorder, submitted()) is False
    folder.mkdir()
    seen = []
    for _ in range(3):
        recorder.write_waiting()
        seen.append(recorder.away)
    assert seen == ["written by a newer Emberscale", "gone again", None]


def test_a_brain_whose_database_has_another_brain_by_now_writes_nothing_of_what_it_kept(folder: Path) -> None:
    mine, others = (HistoryStore.open(f"sqlite:///{folder / 'brain.db'}", exclusive=True) for _ in range(2))
    mine.migrate()
    mine.claim()
    superseded: Queue[str] = Queue()
    recorder = ChangeRecorder(mine, retry_seconds=0.05, on_superseded=superseded.put)
    others.claim()
    recorder.start("it was away")
    assert recorder.record([submitted()]).result(timeout=60) is False
    assert "another brain has the database now" in superseded.get(timeout=60)
    recorder.stop()
    assert recorder.away is not None
    assert others.running_jobs(10) == []
    for store in (mine, others):
        store.close()


def test_many_callers_share_transactions_and_each_hears_of_its_own(folder: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{folder / 'brain.db'}")
    store.migrate()
    recorder = ChangeRecorder(store)
    futures = [recorder.record([submitted()])] + [recorder.record([reported(n)]) for n in range(200)]
    assert not any(future.done() for future in futures)
    recorder.start()
    assert all(future.result(timeout=60) for future in futures)
    recorder.stop()
    assert len(store.profiles(JOB, 1000)) == 200
    store.close()


def test_a_brain_answers_while_postgresql_is_down_and_catches_up(
    run_brain: Callable[..., BrainProcess], submission: Callable[..., pb.SubmitJobRequest], socket_folder: Path
) -> None:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no postgres binary on this machine: apt-get install postgresql")
    server = PostgresServer(binaries, socket_folder.with_name(socket_folder.name + "-away"))
    try:
        brain = run_brain(f"database={server.url()}", "planning.interval=1h")
        reply = brain.stub.SubmitJob(submission("early"))
        assert (reply.plan.version, reply.durable) == (1, False)
        assert "database_unavailable" in brain.log.read_text()
        server.start()
        while not brain.stub.SubmitJob(submission("again")).durable:
            brain.stub.ReportOutcome(pb.ReportOutcomeRequest(job_uid="again", phase="Failed"))
        server.stop()
        assert brain.stub.SubmitJob(submission("late"), timeout=30).durable is False
        assert brain.stub.GetPlan(pb.GetPlanRequest(job_uid="late")).version == 1
        server.start()
        while not brain.stub.SubmitJob(submission("last")).durable:
            brain.stub.ReportOutcome(pb.ReportOutcomeRequest(job_uid="last", phase="Failed"))
        store = HistoryStore.open(server.url())
        known = {change.job for change in store.running_jobs(1) if isinstance(change, JobSubmitted)}
        store.close()
        assert {"early", "again", "late", "last"} <= known
    finally:
        server.remove()
