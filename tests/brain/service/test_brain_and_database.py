"""A brain whose database is away, hangs, or was emptied, and what the database knows of running jobs."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.brain.service.test_brain import (
    JOB,
    NO_DEADLINE,
    TWO,
    MakeBrain,
    database_is_up,
    explain,
    planned,
    profile,
    running_jobs,
    submitted,
    written,
)

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import brain_pb2_grpc
from emberscale_api.rpc.token import open_channel
from emberscale_brain.history.changes import JobEnded, PlanMade
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.server import BrainServicer, serve
from emberscale_brain.service.settings import load_settings
from eventually import eventually


def test_the_database_knows_the_reasons_of_now_while_a_job_runs(open_brain: MakeBrain, tmp_path: Path) -> None:
    brain = open_brain()
    brain.submit(submitted(current=TWO))
    brain.report(JOB, [profile(1)], ())
    version = planned(brain).version
    brain.report(JOB, [profile(2)], ())
    brain.plan_once()
    assert written(brain)
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    (plan,) = store.plans(JOB, 1)
    assert plan.kept == "2 profiles"
    assert plan.version == version == brain.plan(JOB).version
    store.close()


def test_a_brain_that_started_without_its_database_goes_on_with_the_jobs_in_it(
    open_brain: MakeBrain, tmp_path: Path
) -> None:
    first = open_brain("planning.profilesPerJob=3")
    for job in (JOB, JobId("quiet"), JobId("brief")):
        first.submit(submitted(job, current=TWO))
    first.report(JOB, [profile(1), profile(2), profile(3)], ())
    first.stop()
    database, aside = tmp_path / "brain.db", tmp_path / "aside.db"
    database.rename(aside)
    database.symlink_to(tmp_path / "gone" / "brain.db")
    again = open_brain("planning.profilesPerJob=3")
    assert not database_is_up(again)
    again.submit(submitted(current=TWO, last_plan=7))
    assert planned(again).version == 8
    assert again.report(JOB, [profile(4)], ()).durable.result(timeout=60) is False
    away = planned(again)
    assert (away.version, away.shape.workers) == (9, 3)
    again.submit(submitted(JobId("brief"), current=TWO))
    again.end(JobEnded(JobId("brief"), "Complete", time.time()))
    aside.replace(database)
    eventually(lambda: database_is_up(again))
    assert again.plan(JobId("quiet")).version == 0
    assert running_jobs(again) == 2
    assert [point.profile.samples for point in explain(again).measured] == [2000, 3000, 4000]
    assert again.report(JOB, [profile(3), profile(5, workers=3)], ()).accepted == 2
    known = planned(again)
    assert (known.version, known.shape.workers, known.reason) == (10, 4, "3 profiles")


def test_a_database_that_was_emptied_learns_of_running_jobs_again(start_brain: MakeBrain, tmp_path: Path) -> None:
    brain = start_brain("planning.interval=1h")
    assert brain.submit(submitted(current=TWO))[1].result(timeout=60)
    assert brain.submit(submitted(JobId("brief"), current=TWO))[1].result(timeout=60)
    assert brain.report(JOB, [profile(1)], ()).durable.result(timeout=60)
    with closing(sqlite3.connect(tmp_path / "brain.db")) as database:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("DELETE FROM jobs")
        database.commit()
    assert brain.report(JOB, [profile(2)], ()).durable.result(timeout=60)
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    assert [known.samples for known in store.profiles(JOB, 10)] == [1000, 2000]
    ended = JobEnded(JobId("brief"), "Complete", time.time(), final_shape=TWO)
    assert brain.end(ended).result(timeout=60)
    assert [past.id for past in store.past_jobs(10)] == ["brief"]
    store.close()


def test_newcomers_do_not_wait_behind_explanations_while_the_database_hangs(
    start_brain: MakeBrain, submission: Callable[..., pb.SubmitJobRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    brain = start_brain("planning.interval=1h")
    assert brain.submit(submitted(current=TWO))[1].result(timeout=60)
    answers = threading.Event()

    def hang(self: HistoryStore, job: JobId, limit: int) -> list[PlanMade]:
        assert answers.wait(timeout=60)
        return []

    monkeypatch.setattr(HistoryStore, "plans", hang)

    async def ask() -> pb.BrainPlan:
        servicer = BrainServicer(brain, load_settings(None), asyncio.get_running_loop())
        request = pb.ExplainPlanRequest(job_uid=JOB)
        explanations = [asyncio.ensure_future(servicer.ExplainPlan(request, context=None)) for _ in range(64)]
        await asyncio.sleep(0)
        try:
            reply = await asyncio.wait_for(servicer.SubmitJob(submission("newcomer"), NO_DEADLINE), 30)
            assert not any(explanation.done() for explanation in explanations)
        finally:
            answers.set()
        await asyncio.gather(*explanations)
        return reply.plan

    plan = asyncio.run(ask())
    assert (plan.version, plan.action) == (1, "Start")


def test_masters_get_their_answers_in_time_while_the_database_hangs(
    start_brain: MakeBrain, submission: Callable[..., pb.SubmitJobRequest], hanging_writes: threading.Event
) -> None:
    brain = start_brain("planning.interval=1h")
    brain.submit(submitted(current=TWO))
    start_up = pb.StartUp(role="ps", seconds=20, time=time.time())
    report = pb.ReportProfileRequest(job_uid=JOB, start_ups=[start_up])

    async def ask() -> list[bool]:
        server, port = await serve(brain, load_settings(None, ["listen=127.0.0.1:0"]), "a-token", None)
        with open_channel(f"127.0.0.1:{port}", "a-token") as channel:
            stub = brain_pb2_grpc.BrainStub(channel)
            calls: list[Any] = [
                stub.SubmitJob.future(submission("newcomer"), timeout=5),
                stub.ReportProfile.future(report, timeout=5),
                stub.ReportProfile.future(report, timeout=2),
            ]
            try:
                return [(await asyncio.to_thread(call.result)).durable for call in calls]
            finally:
                await server.stop(None)

    assert asyncio.run(ask()) == [False, False, False]
