"""Which of several runs has the brain."""

import subprocess
import sys
from pathlib import Path

import pytest

from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_operator.local.brain import BrainSeat, EmbeddedBrain

HOLDER = """
import sys
from pathlib import Path
from emberscale_operator.local.brain import BrainSeat
with BrainSeat(Path(sys.argv[1])) as seat:
    print(seat.take(), seat.address, flush=True)
    sys.stdin.read()
"""


def test_one_run_has_the_brain_and_all_know_where_it_is(tmp_path: Path) -> None:
    with BrainSeat(tmp_path) as one, BrainSeat(tmp_path) as other:
        assert one.take()
        assert one.take()
        assert not other.take()
        assert (one.address, one.token) == (other.address, other.token)


def test_when_a_run_ends_another_takes_the_seat_at_the_same_place(tmp_path: Path) -> None:
    with BrainSeat(tmp_path) as other:
        with BrainSeat(tmp_path) as one:
            assert one.take()
            address = one.address
        assert other.take()
        assert other.address == address


def test_a_run_that_is_killed_leaves_the_seat(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with (
        BrainSeat(tmp_path) as other,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run,
    ):
        assert run.stdout is not None
        assert run.stdout.readline().split() == ["True", other.address]
        assert not other.take()
        run.kill()
        run.wait()
        assert other.take()


def test_the_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    with BrainSeat(tmp_path) as seat:
        assert seat.token_file.stat().st_mode & 0o077 == 0
        assert len(seat.token) == 64


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"), BrainSeat(tmp_path / "file"):
        pass


@pytest.mark.parametrize("port", ["", "none", "99999"])
def test_a_port_that_was_not_written_whole_is_chosen_anew(tmp_path: Path, port: str) -> None:
    (tmp_path / "brain.port").write_text(port)
    with BrainSeat(tmp_path) as one, BrainSeat(tmp_path) as other:
        assert one.address == other.address
        assert one.take()


def test_a_run_that_cannot_read_the_port_of_a_seated_run_says_so(tmp_path: Path) -> None:
    with BrainSeat(tmp_path) as one:
        assert one.take()
        (tmp_path / "brain.port").write_text("99999")
        with pytest.raises(UnavailableError, match="cannot start a brain there"), BrainSeat(tmp_path):
            pass


def test_preferences_of_a_run_make_the_brain_its_own(tmp_path: Path) -> None:
    database = tmp_path / "brain.db"
    with (
        EmbeddedBrain(database).seat(None) as shared,
        EmbeddedBrain(database, ("cluster.cpu=2",)).seat(None) as own,
        EmbeddedBrain(database).seat(None) as too,
    ):
        assert shared.take()
        assert own.take()
        assert not too.take()
        assert own.address != shared.address


def test_a_file_that_is_no_database_is_named_before_the_run_starts(tmp_path: Path) -> None:
    database = tmp_path / "brain.db"
    database.write_text("This is no database.\n" * 100)
    with (
        pytest.raises(InvalidError, match="file is not a database; move it aside"),
        EmbeddedBrain(database).seat(None),
    ):
        pass
    with EmbeddedBrain(database, (f"database=sqlite:///{tmp_path / 'another.db'}",)).seat(None) as own:
        assert own.take()


def test_runs_share_a_brain_with_those_that_believe_its_certificate(tmp_path: Path) -> None:
    database = EmbeddedBrain(tmp_path / "brain.db")
    with (
        database.seat(None) as plain,
        database.seat(b"an authority") as secure,
        database.seat(b"an authority") as too,
        database.seat(b"another") as other,
    ):
        assert plain.take()
        assert secure.take()
        assert not too.take()
        assert other.take()
        assert secure.address == too.address
        assert len({seat.address for seat in (plain, secure, other)}) == 3
