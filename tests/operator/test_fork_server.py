"""Processes forked from one that has imported everything: tests with the real server, which takes seconds to start."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api import environment as names
from emberscale_api.fork_server import Ended, Forked, ForkRequest, LineBuffer, Message, decode, encode
from emberscale_operator.local.starters import ForkServerClient, Started
from eventually import eventually

COMMAND = (sys.executable, "-P", "-m", "emberscale_trainer.fork_server")
MESSAGES = st.one_of(
    st.builds(Forked, st.integers(), st.integers()),
    st.builds(Ended, st.integers(), st.integers()),
    st.builds(
        ForkRequest,
        st.integers(),
        st.text(),
        st.dictionaries(st.text(), st.text()),
        st.text(),
        st.none() | st.lists(st.integers()).map(tuple),
    ),
)


@given(messages=st.lists(MESSAGES), pieces=st.integers(1, 50))
def test_messages_arrive_as_they_were_sent_however_the_stream_is_cut(messages: list[Message], pieces: int) -> None:
    stream = b"".join(map(encode, messages))
    buffer = LineBuffer()
    lines = [line for start in range(0, len(stream), pieces) for line in buffer.add(stream[start : start + pieces])]
    assert [decode(line) for line in lines] == messages


@pytest.mark.parametrize("line", [b"", b"[]", b'{"kind": "Forked"}', b'{"kind": "Exec", "ticket": 1}', b"{"])
def test_anything_else_is_not_a_message(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"fork server|JSON|Expecting"):
        decode(line)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServerClient]:
    server = ForkServerClient(COMMAND, os.environ, tmp_path / "fork-server.log")
    yield server
    server.close()


@pytest.fixture
def waiting(tmp_path: Path) -> Mapping[str, str]:
    """Returns the environment of a worker that waits for a master that never comes."""
    token = tmp_path / "token"
    token.write_text("secret")
    return {
        **os.environ,
        names.JOB_NAME: "job",
        names.JOB_UID: "uid",
        names.ROLE: "worker",
        names.INDEX: "3",
        names.INCARNATION: "1",
        names.MASTER_ADDRESS: "127.0.0.1:9",
        names.TOKEN_FILE: str(token),
        names.LISTEN_HOST: "127.0.0.1",
        names.ADVERTISED_HOST: "127.0.0.1",
    }


def exists(process: Started) -> bool:
    process.poll()
    return process.pid is not None


def test_forked_processes_live_as_executed_ones_do_and_die_with_the_server(
    server: ForkServerClient, waiting: Mapping[str, str], tmp_path: Path
) -> None:
    core = max(os.sched_getaffinity(0))
    unnamed = server.start(("ps",), {}, tmp_path / "ps.log", None)
    killed_early = server.start(("worker",), waiting, tmp_path / "early.log", None)
    killed_early.send_signal(signal.SIGKILL)
    pinned = server.start(("worker",), waiting, tmp_path / "worker.log", [core])
    other = server.start(("worker",), waiting, tmp_path / "other.log", None)

    unnamed.wait(300)
    assert unnamed.poll() == 2
    assert names.JOB_NAME in (tmp_path / "ps.log").read_text()

    killed_early.wait(60)
    assert killed_early.poll() == -signal.SIGKILL

    eventually(lambda: exists(pinned))
    assert pinned.pid is not None
    eventually(lambda: " ".join(psutil.Process(pinned.pid).cmdline()).startswith("emberscale-worker 3"))
    assert os.sched_getaffinity(pinned.pid) == {core}
    assert os.getsid(pinned.pid) == pinned.pid
    pinned.send_signal(signal.SIGKILL)
    pinned.wait(60)
    assert pinned.poll() == -signal.SIGKILL
    pinned.send_signal(signal.SIGKILL)  # there is nobody to signal any more

    assert other.poll() is None
    assert other.pid is not None
    psutil.Process(other.pid).parent().kill()  # type: ignore[union-attr]  # the server, which is still alive
    eventually(lambda: other.poll() == -signal.SIGKILL)
    pid = other.pid
    eventually(lambda: not psutil.pid_exists(pid))

    again = server.start(("ps",), {}, tmp_path / "ps.log", None)
    again.wait(300)
    assert again.poll() == 2


def test_a_server_whose_log_cannot_be_written_is_told_from_a_defect(tmp_path: Path) -> None:
    server = ForkServerClient(COMMAND, os.environ, tmp_path / "missing" / "fork-server.log")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            server.start(("ps",), {}, tmp_path / "ps.log", None)
    server.close()


def test_a_server_that_cannot_start_ends_its_processes_with_its_own_exit_code(tmp_path: Path) -> None:
    server = ForkServerClient((sys.executable, "-c", "raise SystemExit(7)"), os.environ, tmp_path / "fork-server.log")
    process = server.start(("ps",), {}, tmp_path / "ps.log", None)
    process.wait(60)
    assert (process.poll(), process.pid) == (7, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_not_wanted_any_more_does_not_wait_for_the_server(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A server may take half a minute to import, and Ctrl-C must not wait for that."""
    never_ready = (sys.executable, "-c", "import signal; signal.pause()")
    server = ForkServerClient(never_ready, os.environ, tmp_path / "fork-server.log")
    process = server.start(("ps",), {}, tmp_path / "ps.log", None)
    process.send_signal(number)
    assert process.poll() == -number
    server.close()
