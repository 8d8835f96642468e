"""Back-pressure near the memory limit: which requests wait, for how long, and when it ends."""

from pathlib import Path

import pytest

from emberscale_api.shape import GIB, memory_reserve
from emberscale_api.telemetry import MemoryGauge, memory_in_use
from emberscale_trainer.server.pressure import LONGEST_DELAY_SECONDS, PATIENCE_SECONDS, MemoryPressure

LIMIT = GIB
RESERVE = memory_reserve(LIMIT)


SCARCE = LIMIT - RESERVE // 2


def test_pushes_do_not_wait_while_memory_is_plentiful_or_unlimited() -> None:
    pressure = MemoryPressure()
    for now, used, limit in ((0.0, 0, LIMIT), (1.0, LIMIT - RESERVE, LIMIT), (2.0, 10 * LIMIT, None)):
        pressure.look(used, limit, now)
        assert pressure.delay == 0.0
    assert not pressure.delays


def test_a_server_whose_memory_does_not_grow_holds_nobody_up() -> None:
    pressure = MemoryPressure()
    for now in range(200):
        pressure.look(SCARCE, LIMIT, float(now))
        assert pressure.delay == 0.0
    assert pressure.seconds == 0.0


def test_a_push_waits_as_soon_as_growing_memory_is_scarce() -> None:
    pressure = MemoryPressure()
    pressure.look(LIMIT - 2 * RESERVE, LIMIT, 0.0)
    pressure.look(SCARCE, LIMIT, 0.1)
    assert pressure.delay == LONGEST_DELAY_SECONDS
    pressure.look(SCARCE, LIMIT, 8.0)
    assert pressure.delay == 0.0, "it has not grown any more, as after a load of rows"


def test_what_is_left_lasts_for_minutes_however_fast_pushes_would_use_it_up() -> None:
    pressure, used, course = MemoryPressure(), SCARCE, []
    for tenth in range(10 * int(PATIENCE_SECONDS)):
        pressure.look(used, LIMIT, tenth / 10)
        used += 0 if pressure.delay else RESERVE // 100
        course.append(used)
    assert max(course) <= LIMIT + RESERVE // 100
    assert course[len(course) // 2] == pytest.approx((SCARCE + LIMIT) / 2, abs=RESERVE // 50)
    assert pressure.delays


def test_pushes_go_on_once_rows_have_left_or_the_limit_has_grown() -> None:
    pressure = MemoryPressure()
    pressure.look(SCARCE, LIMIT, 0.0)
    pressure.look(LIMIT, LIMIT, 1.0)
    assert pressure.delay == LONGEST_DELAY_SECONDS
    pressure.look(LIMIT - 2 * RESERVE, LIMIT, 2.0)
    assert (pressure.delay, pressure.since) == (0.0, None)
    pressure.look(SCARCE, LIMIT, 3.0)
    pressure.look(LIMIT, LIMIT, 4.0)
    pressure.look(LIMIT, 2 * LIMIT, 5.0)
    assert pressure.delay == 0.0


def test_a_server_at_the_edge_of_the_reserve_does_not_begin_anew() -> None:
    pressure = MemoryPressure()
    pressure.look(SCARCE, LIMIT, 0.0)
    pressure.look(LIMIT - int(1.2 * RESERVE), LIMIT, 1.0)
    assert (pressure.since, pressure.used) == (0.0, SCARCE)


def test_pushes_wait_no_more_where_nothing_comes_of_it() -> None:
    pressure = MemoryPressure()
    pressure.look(SCARCE, LIMIT, 0.0)
    pressure.look(2 * LIMIT, LIMIT, PATIENCE_SECONDS - 1)
    assert pressure.delay == LONGEST_DELAY_SECONDS
    pressure.look(2 * LIMIT, LIMIT, PATIENCE_SECONDS)
    assert pressure.delay == 0.0


def test_the_time_for_which_pushes_wait_is_counted_and_told_without_flicker() -> None:
    pressure = MemoryPressure()
    pressure.look(SCARCE, LIMIT, 10.0)
    pressure.look(LIMIT, LIMIT, 12.0)
    assert pressure.delays
    pressure.look(LIMIT, LIMIT, 13.0)
    pressure.look(SCARCE, LIMIT, 15.0)
    assert (pressure.delay, pressure.delays) == (0.0, True)
    pressure.look(SCARCE, LIMIT, 30.0)
    assert not pressure.delays
    assert pressure.seconds == pytest.approx(3.0)


def test_a_containers_memory_is_read_without_the_files_that_can_be_dropped(tmp_path: Path) -> None:
    assert memory_in_use(tmp_path) is None
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.stat").write_text("anon 700\nactive_file 100\ninactive_file 150\n")
    gauge = MemoryGauge(granted=10, cgroups=tmp_path)
    assert (gauge.used(), gauge.limit()) == (750, 4096)
    (tmp_path / "memory.max").write_text("8192\n")  # resized in place
    assert gauge.limit() == 8192


def test_an_older_containers_memory_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    (folder / "memory.limit_in_bytes").write_text("4096\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_active_file 100\ntotal_inactive_file 150\n")
    gauge = MemoryGauge(cgroups=tmp_path)
    assert (gauge.used(), gauge.limit()) == (750, 4096)


def test_a_process_without_a_container_has_the_limit_that_it_was_given_last(tmp_path: Path) -> None:
    gauge = MemoryGauge(granted=100, cgroups=tmp_path)
    assert gauge.limit() == 100
    gauge.grant(0)
    gauge.grant(200)
    assert gauge.limit() == 200
    assert gauge.used() > 1 << 20
    assert MemoryGauge(cgroups=tmp_path).limit() is None
