"""A whole job on this machine: real processes, a real Redis, the real protocol; only the training is simulated."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from emberscale_api.errors import UnavailableError
from emberscale_api.job import TrainingJob, parse_manifest
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_operator.local import runner
from emberscale_operator.local.backend import LocalBackend
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.runner import LocalJob
from emberscale_operator.local.snapshot import RunOutcome, RunView
from emberscale_operator.machine import ExitReason, Policy
from emberscale_operator.machine.restarts import Backoff
from eventually import eventually, unwrap

Commands = Mapping[Role, tuple[str, ...]]
MakeJob = Callable[..., LocalJob]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def make_local(job: TrainingJob, folder: RunFolder, stand_ins: Commands) -> MakeJob:
    def make(**options: object) -> LocalJob:
        settings: dict[str, object] = {
            "job": job,
            "uid": "uid-1",
            "folder": folder,
            "commands": stand_ins,
            "policy": Policy(Backoff(base=0.1), backoff_limit=1, stop_grace=2.0),
            **options,
        }
        return LocalJob(**settings)  # type: ignore[arg-type] # options by name, for brevity

    return make


class Watch:
    """Watches a running job, and does something to it once."""

    def __init__(self, when: Callable[[RunView], bool], then: Callable[[RunView], None]) -> None:
        self._when, self._then = when, then
        self.pids: set[int] = set()
        self.done = False
        self.last: RunView | None = None

    def __call__(self, snapshot: RunView) -> None:
        self.last = snapshot
        self.pids |= {process.pid for process in snapshot.processes}
        if not self.done and self._when(snapshot):
            self.done = True
            self._then(snapshot)

    def left(self) -> list[int]:
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]


def training(snapshot: RunView) -> bool:
    return snapshot.status is not None and snapshot.status.samples > 0


def nothing(snapshot: RunView) -> None:
    pass


def kill(name: str) -> Callable[[RunView], None]:
    def act(snapshot: RunView) -> None:
        os.kill(next(process.pid for process in snapshot.processes if process.name == name), signal.SIGKILL)

    return act


def run(local: LocalJob, watch: Watch) -> RunOutcome:
    with local:
        return local.run(watch)


def test_a_job_runs_to_its_end_and_leaves_only_its_files(make_local: MakeJob, folder: RunFolder) -> None:
    watch = Watch(training, nothing)
    outcome = run(make_local(), watch)
    assert outcome.phase is JobPhase.COMPLETE
    assert outcome.status is not None
    assert outcome.status.samples == outcome.status.expected_samples
    assert len(watch.pids) == 7
    assert watch.left() == []
    assert set(outcome.peak_memory) == {"redis-0", "redis-1", "master-0", "ps-0", "ps-1", "worker-0", "worker-1"}
    assert min(outcome.peak_memory.values()) > 1 << 20
    assert {path.name for path in folder.state.iterdir()} == {"appendonly.aof", "manifest.json"}
    assert not folder.sockets.is_symlink()


@pytest.mark.parametrize("victim", ["master-0", "ps-1", "worker-0", "redis-0"])
def test_a_killed_process_is_replaced_and_the_job_goes_on(
    make_local: MakeJob, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SAMPLES", "250000")
    monkeypatch.setenv("STAND_IN_REGISTRATIONS", "5" if victim in ("ps-1", "worker-0") else "4")
    watch = Watch(training, kill(victim))
    outcome = run(make_local(), watch)
    assert outcome.phase is JobPhase.COMPLETE
    assert [(ended.name, ended.reason) for ended in unwrap(watch.last).exits] == [(victim, ExitReason.KILLED)]
    role = victim.partition("-")[0]
    assert {name: count for name, count in outcome.restarts.items() if count} == ({role: 1} if role != "redis" else {})
    assert watch.left() == []


def test_a_run_that_hears_late_of_the_end_replaces_nobody_and_tells_of_no_exit(
    make_local: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = LocalBackend.observe

    async def observe_late(backend: LocalBackend, now: float) -> object:
        if watch.done and not waited:
            members = [one.pid for one in unwrap(watch.last).processes if one.name.startswith(("ps", "worker"))]
            waited.extend(members)
            eventually(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in members), "the end")
        return await observe(backend, now)

    waited: list[int] = []
    monkeypatch.setattr(LocalBackend, "observe", observe_late)
    monkeypatch.setenv("STAND_IN_SAMPLES", "200000")
    watch = Watch(training, nothing)
    outcome = run(make_local(), watch)
    assert outcome.phase is JobPhase.COMPLETE
    assert unwrap(watch.last).exits == ()
    assert len(waited) == 4
    assert len(watch.pids) == 7


def test_the_master_hears_of_a_member_that_ended(
    make_local: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "exits"
    monkeypatch.setenv("STAND_IN_EXITS", str(told))
    monkeypatch.setenv("STAND_IN_SAMPLES", "200000")
    monkeypatch.setenv("STAND_IN_REGISTRATIONS", "5")
    run(make_local(), Watch(training, kill("worker-1")))
    assert told.read_text().splitlines() == ["worker-1 Killed -9"]


def test_a_worker_above_its_memory_limit_is_oom_killed_until_the_job_gives_up(
    make_local: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_EAT_BYTES", str(4 << 30))
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    watch = Watch(training, nothing)
    outcome = run(make_local(), watch)
    assert (outcome.phase, outcome.reason) == (JobPhase.FAILED, "BackoffLimitExceeded")
    assert "worker-" in outcome.message
    assert "out of memory" in outcome.message
    assert watch.left() == []


def test_memory_grows_where_a_process_ran_out_of_it(make_local: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_EAT_BYTES", str(260 << 20))
    monkeypatch.setenv("STAND_IN_SAMPLES", "300000")
    monkeypatch.setenv("STAND_IN_REGISTRATIONS", "5")
    watch = Watch(training, nothing)
    outcome = run(make_local(policy=Policy(Backoff(base=0.1), backoff_limit=3, stop_grace=2.0)), watch)
    assert outcome.phase is JobPhase.COMPLETE
    assert {(ended.reason, ended.memory_limit, ended.grown) for ended in unwrap(watch.last).exits} == {
        (ExitReason.OOM_KILLED, 256 << 20, 384 << 20)
    }
    assert max(peak for name, peak in outcome.peak_memory.items() if name.startswith("worker")) > 260 << 20


def test_a_master_that_cannot_start_fails_the_job(make_local: MakeJob, stand_ins: Commands, folder: RunFolder) -> None:
    outcome = run(make_local(commands={**stand_ins, Role.MASTER: ("/bin/false",)}), Watch(training, nothing))
    assert (outcome.phase, outcome.reason) == (JobPhase.FAILED, "BackoffLimitExceeded")
    assert "master-0" in outcome.message
    assert str(folder.logs) in outcome.message


def test_suspending_saves_the_state_and_ends_every_process(
    make_local: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    local = make_local()
    watch = Watch(training, lambda _: local.suspend())
    outcome = run(local, watch)
    assert outcome.phase is JobPhase.SUSPENDED
    assert watch.left() == []


def test_other_commands_find_no_master_while_the_job_saves_its_state_to_end(
    make_local: MakeJob, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    monkeypatch.setenv("STAND_IN_SUSPEND_SECONDS", "1")
    local = make_local()
    watch = Watch(training, lambda _: local.suspend())
    found: dict[bool, list[bool]] = {False: [], True: []}

    def observe(snapshot: RunView) -> None:
        found[snapshot.suspending].append(folder.master_address.exists())
        watch(snapshot)

    with local:
        local.run(observe)
    assert found[False][0]
    assert len(found[True]) > 5
    assert sum(found[True]) <= 1, "the look during which the request comes may be the last with a master"


def test_suspending_before_the_master_is_up_just_ends(make_local: MakeJob) -> None:
    local = make_local()
    watch = Watch(lambda snapshot: bool(snapshot.processes), lambda _: local.suspend())
    outcome = run(local, watch)
    assert (outcome.phase, outcome.reason) == (None, "Interrupted")
    assert watch.left() == []


def test_killing_does_not_wait_for_the_state_to_be_saved(make_local: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    monkeypatch.setenv("STAND_IN_SUSPEND_SECONDS", "60")
    local = make_local()
    watch = Watch(training, lambda _: local.suspend())

    def observe(snapshot: RunView) -> None:
        watch(snapshot)
        if snapshot.suspending:
            local.kill()

    with local:
        outcome = local.run(observe)
    assert outcome.phase is None
    assert watch.left() == []


FORKS_SLEEPERS = """
import signal, socket
from emberscale_trainer.fork_server import ForkServer
ForkServer(socket.socket(fileno=0), {"ps": signal.pause, "worker": signal.pause}).serve()
"""


def test_killing_does_not_wait_for_a_fork_server_that_hangs(
    make_local: MakeJob, stand_ins: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_FORK_SERVER", (sys.executable, "-c", FORKS_SLEEPERS))
    local = make_local(commands={Role.MASTER: stand_ins[Role.MASTER]})
    killed_at: list[float] = []

    def kill_job(snapshot: RunView) -> None:
        worker = next(process.pid for process in snapshot.processes if process.name == "worker-0")
        unwrap(psutil.Process(worker).parent()).suspend()
        killed_at.append(time.monotonic())
        local.kill()

    watch = Watch(lambda snapshot: any(process.name == "worker-0" for process in snapshot.processes), kill_job)
    assert run(local, watch).phase is None
    assert time.monotonic() - killed_at[0] < 20
    eventually(lambda: watch.left() == [])  # init reaps what the server has forked


def test_members_that_do_not_listen_are_killed_after_the_grace(
    make_local: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DEAF", "1")
    watch = Watch(training, nothing)
    outcome = run(make_local(policy=Policy(stop_grace=0.5)), watch)
    assert outcome.phase is JobPhase.COMPLETE
    assert watch.left() == []


def test_the_plan_sets_the_number_of_workers_that_the_manifest_leaves_open(
    job: TrainingJob, make_local: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_WORKERS", "3")
    monkeypatch.setenv("STAND_IN_SAMPLES", "1000000000")
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["worker"] |= {"minReplicas": 2, "maxReplicas": 4}
    del document["spec"]["worker"]["replicas"]
    local = make_local(job=parse_manifest(document))
    third = Watch(
        lambda snapshot: any(process.name == "worker-2" for process in snapshot.processes), lambda _: local.suspend()
    )
    run(local, third)
    assert third.done


def test_a_port_that_is_taken_is_named(make_local: MakeJob) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 is unavailable: Address already in use"),
            make_local(master_port=port),
        ):
            pytest.fail("it started all the same")


def test_a_given_redis_that_does_not_answer_stops_the_start(make_local: MakeJob, folder: RunFolder) -> None:
    with pytest.raises(UnavailableError), make_local(redis_url="redis://127.0.0.1:1"):
        pytest.fail("it started all the same")
    assert not folder.root.exists()


def test_a_redis_server_that_cannot_start_is_named(make_local: MakeJob, folder: RunFolder) -> None:
    (folder.state / "appendonly.aof").mkdir(parents=True)
    with pytest.raises(UnavailableError, match=r"could not start.*redis-0\.log"):
        run(make_local(), Watch(training, nothing))
    assert not folder.sockets.is_symlink()


def test_only_the_master_is_told_where_redis_is(make_local: MakeJob) -> None:
    environments: dict[str, dict[str, str]] = {}

    def look(snapshot: RunView) -> bool:
        for process in snapshot.processes:
            if process.name.startswith("redis-"):
                continue  # its process title overwrites its environment
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                raw = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
                found = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
                if "EMBERSCALE_ROLE" in found:  # before a process executes its program, it has its parent's environment
                    environments[process.name] = found
        return False

    run(make_local(), Watch(look, nothing))
    assert [name for name, found in environments.items() if "EMBERSCALE_REDIS_URL" in found] == ["master-0"]
    assert environments["worker-1"]["EMBERSCALE_CPU_CORES"] == "1"
    assert environments["worker-1"]["OMP_NUM_THREADS"] == "1"
    assert "EMBERSCALE_CPU_CORES" not in environments["ps-0"]
    members = [(found["EMBERSCALE_ROLE"], found["EMBERSCALE_INDEX"]) for found in environments.values()]
    assert sorted(members) == [("master", "0"), ("ps", "0"), ("ps", "1"), ("worker", "0"), ("worker", "1")]
