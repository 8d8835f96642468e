"""Real processes in place of pods."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from emberscale_api.environment import SUPERSEDED_EXIT_CODE
from emberscale_api.job.roles import Role
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.process import Launch
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.local.requests import KillRequest
from emberscale_operator.local.starters import Started, execute
from emberscale_operator.machine import ExitReason, Instance, InstanceId, InstanceState, Resources
from eventually import eventually, unwrap

MakeBackend = Callable[..., JobProcesses]

WORKER = InstanceId(Role.WORKER, 0, 1)
SLEEP = "import threading; threading.Event().wait()"
EAT = f"eaten = b'1' * (300 << 20); {SLEEP}"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"


def observe(backend: JobProcesses) -> dict[InstanceId, Instance]:
    return {instance.id: instance for instance in backend.observe(time.monotonic())}


def pid_of(backend: JobProcesses) -> int:
    return backend.processes()[0].pid


def ended(backend: JobProcesses, instance: InstanceId = WORKER) -> bool:
    return observe(backend)[instance].state is InstanceState.EXITED


def test_an_instance_runs_until_it_ends_and_is_seen_until_it_is_deleted(make_backend: MakeBackend) -> None:
    backend = make_backend("raise SystemExit(7)")
    backend.create(WORKER, Resources(), now=1.0)
    eventually(lambda: ended(backend))
    seen = observe(backend)[WORKER]
    assert seen.exit is not None
    assert (seen.exit.reason, seen.exit.code, seen.exit.deleted) == (ExitReason.ERROR, 7, False)
    backend.delete(WORKER, now=2.0)
    assert observe(backend) == {}


def test_a_process_that_was_superseded_did_nothing_wrong(make_backend: MakeBackend) -> None:
    backend = make_backend(f"raise SystemExit({SUPERSEDED_EXIT_CODE})")
    backend.create(WORKER, Resources(), now=1.0)
    eventually(lambda: ended(backend))
    seen = observe(backend)[WORKER]
    assert unwrap(seen.exit).reason is ExitReason.KILLED


def test_an_incarnation_is_never_started_twice(make_backend: MakeBackend) -> None:
    backend = make_backend("")
    backend.create(WORKER, Resources(), now=1.0)
    first = pid_of(backend)
    backend.create(WORKER, Resources(), now=1.0)
    assert [view.pid for view in backend.processes()] == [first]
    eventually(lambda: ended(backend))
    backend.delete(WORKER, now=2.0)
    backend.create(WORKER, Resources(), now=3.0)
    assert backend.processes() == ()


def test_a_process_that_is_yet_to_be_forked_does_not_run_and_its_time_has_not_begun(tmp_path: Path) -> None:
    """The fork server may compile kernels for minutes on a busy machine: no process is late meanwhile."""
    held: list[tuple[Sequence[str], Mapping[str, str], Path, Sequence[int] | None]] = []

    def hold(*arguments: Any) -> Started:
        held.append(arguments)
        return forked

    forked = Forked()
    command = (sys.executable, "-c", SLEEP)
    processes = JobProcesses(lambda *_: Launch(command, os.environ, "1-abc", hold), tmp_path)
    processes.create(WORKER, Resources(), now=1.0)
    (seen,) = processes.observe(100.0)
    assert seen.state is InstanceState.PENDING
    assert processes.unforked(asked_by=0.9) == ()
    assert processes.unforked(asked_by=1.0) == ("worker-0",)
    forked.process = execute(*held[0])
    (seen,) = processes.observe(200.0)
    assert (seen.state, seen.started_at) == (InstanceState.RUNNING, 200.0)
    assert processes.unforked(asked_by=1.0) == ()
    (seen,) = processes.observe(300.0)
    assert seen.started_at == 200.0
    processes.kill_all()


class Forked:
    """What a starter returns for a process that comes later, if at all."""

    def __init__(self) -> None:
        self.process: Started | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def poll(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        unwrap(self.process).send_signal(number)

    def wait(self, timeout: float) -> object:
        return unwrap(self.process).wait(timeout)


def test_a_process_above_its_memory_limit_is_killed_as_by_a_kubelet(make_backend: MakeBackend) -> None:
    backend = make_backend(EAT)
    limit = 150 << 20
    backend.create(WORKER, Resources(memory_bytes=limit), now=1.0)
    eventually(lambda: ended(backend))
    seen = observe(backend)[WORKER]
    assert seen.exit is not None
    assert (seen.exit.reason, seen.exit.code) == (ExitReason.OOM_KILLED, -signal.SIGKILL)
    assert backend.peak_memory()["worker-0"] > limit


def test_a_process_within_its_memory_limit_is_left_alone_and_its_peak_recorded(make_backend: MakeBackend) -> None:
    backend = make_backend(EAT)
    backend.create(WORKER, Resources(memory_bytes=1 << 30), now=1.0)

    def eaten() -> bool:
        assert not ended(backend)
        return backend.peak_memory()["worker-0"] > 300 << 20

    eventually(eaten)


def test_a_resize_changes_the_limit_of_memory_in_place(make_backend: MakeBackend) -> None:
    backend = make_backend(EAT)
    backend.create(WORKER, Resources(memory_bytes=1 << 30), now=1.0)
    eventually(lambda: observe(backend) and backend.peak_memory()["worker-0"] > 300 << 20)
    backend.resize(WORKER, Resources(memory_bytes=100 << 20))
    eventually(lambda: ended(backend))
    seen = unwrap(observe(backend)[WORKER].exit)
    assert seen.reason is ExitReason.OOM_KILLED


def test_a_process_that_is_killed_for_want_of_memory_keeps_the_limit_that_it_was_above(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend(EAT)
    limit = 150 << 20
    backend.create(WORKER, Resources(memory_bytes=limit), now=1.0)
    eventually(lambda: observe(backend) and backend.peak_memory()["worker-0"] > limit)
    backend.resize(WORKER, Resources(memory_bytes=1 << 30))
    eventually(lambda: ended(backend))
    assert observe(backend)[WORKER].resources.memory_bytes == limit


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores to tell")
def test_processes_with_limits_are_spread_over_the_cores(make_backend: MakeBackend) -> None:
    backend = make_backend(SLEEP)
    usable = os.sched_getaffinity(0)
    for index in range(2):
        backend.create(InstanceId(Role.PS, index, 1), Resources(cpu_cores=0.5), now=1.0)
    backend.create(InstanceId(Role.MASTER, 0, 1), Resources(), now=1.0)
    pids = {view.name: view.pid for view in backend.processes()}
    eventually(lambda: len(os.sched_getaffinity(pids["ps-1"])) == 1)
    assert os.sched_getaffinity(pids["ps-0"]) != os.sched_getaffinity(pids["ps-1"])
    assert os.sched_getaffinity(pids["master-0"]) == usable


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores to tell")
def test_a_resize_moves_every_thread_to_its_cores(make_backend: MakeBackend, tmp_path: Path) -> None:
    threads = (
        f"import threading; threading.Thread(target=threading.Event().wait).start(); print('up', flush=True); {SLEEP}"
    )
    backend = make_backend(threads)
    backend.create(WORKER, Resources(cpu_cores=1), now=1.0)
    eventually(lambda: "\nup\n" in (tmp_path / "worker-0.log").read_text())
    backend.resize(WORKER, Resources(cpu_cores=2))
    tasks = [thread.id for thread in psutil.Process(pid_of(backend)).threads()]
    assert len(tasks) == 2
    assert {len(os.sched_getaffinity(task)) for task in tasks} == {2}


def test_deleting_a_live_instance_ends_it_and_that_is_no_failure(make_backend: MakeBackend) -> None:
    backend = make_backend(SLEEP)
    backend.create(WORKER, Resources(), now=1.0)
    backend.delete(WORKER, now=time.monotonic())
    assert observe(backend)[WORKER].state is not InstanceState.RUNNING
    eventually(lambda: ended(backend))
    seen = unwrap(observe(backend)[WORKER].exit)
    assert seen.deleted


def test_one_that_does_not_stop_in_time_is_killed(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(DEAF, stop_grace=0.3)
    backend.create(WORKER, Resources(), now=1.0)
    eventually(lambda: "deaf" in (tmp_path / "worker-0.log").read_text().splitlines())
    backend.delete(WORKER, now=time.monotonic())
    eventually(lambda: ended(backend))
    seen = unwrap(observe(backend)[WORKER].exit)
    assert seen.code == -signal.SIGKILL


def test_the_log_says_which_incarnation_speaks(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend("print('hello')")
    for incarnation in (1, 2):
        instance = InstanceId(Role.WORKER, 0, incarnation)
        backend.create(instance, Resources(), now=1.0)
        eventually(partial(ended, backend, instance))
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line for line in lines if line == "hello"] == ["hello"] * 2
    heads = [json.loads(line) for line in lines if "process starting" in line]
    assert [head["incarnation"] for head in heads] == ["life-1", "life-2"]
    assert lines.index("hello") == 1


def test_killing_all_leaves_none(make_backend: MakeBackend) -> None:
    backend = make_backend(DEAF)
    for index in range(3):
        backend.create(InstanceId(Role.WORKER, index, 1), Resources(), now=1.0)
    pids = [view.pid for view in backend.processes()]
    backend.kill_all()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_request_to_kill_names_one_process_and_is_taken_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    instance = Instance(WORKER, InstanceState.RUNNING, Resources(), 0.0, name="1-abc")
    others = (
        replace(instance, name="2-abc"),
        replace(instance, id=InstanceId(Role.PS, 0, 1)),
        replace(instance, state=InstanceState.EXITED),
    )
    assert KillRequest.take(folder, [instance]) is None
    request = KillRequest("worker-0", "1-abc")
    request.ask(folder)
    assert KillRequest.take(folder, [*others, instance]) == instance
    assert KillRequest.take(folder, [instance]) is None
    assert not request.take_back(folder), "it was taken"


def test_a_request_to_kill_who_is_not_there_stays_until_it_is_taken_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    instance = Instance(WORKER, InstanceState.RUNNING, Resources(), 0.0, name="1-abc")
    request = KillRequest("worker-0", "2-abc")
    request.ask(folder)
    assert KillRequest.take(folder, [instance]) is None
    assert request.take_back(folder)
    assert KillRequest.take(folder, [replace(instance, name="2-abc")]) is None
