"""First shapes that exceed the free capacity."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.planner.room import Room, cut_to, fits, least_of
from emberscale_brain.planner.types import ClusterCapacity, ShapeBounds
from eventually import unwrap

BOUNDS = ShapeBounds((1, 8), (1, 4), (0.5, 8.0), (0.5, 8.0), (1 * GIB, 16 * GIB), (1 * GIB, 64 * GIB), cpu_step=0.5)
WANTED = JobShape(4, 2, 4.0, 2.0, 4 * GIB, 8 * GIB)


@st.composite
def bounds(draw: st.DrawFn) -> ShapeBounds:
    def pair(least: int, most: int, unit: int) -> tuple[int, int]:
        low = draw(st.integers(least, most))
        return low * unit, draw(st.integers(low, most)) * unit

    step = draw(st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]))
    workers, ps, worker_cpu, ps_cpu = pair(1, 6, 1), pair(1, 6, 1), pair(1, 8, 1), pair(1, 8, 1)
    return ShapeBounds(
        workers,
        ps,
        (worker_cpu[0] * step, worker_cpu[1] * step),
        (ps_cpu[0] * step, ps_cpu[1] * step),
        pair(1, 40, GIB // 4),
        pair(1, 40, GIB // 4),
        step,
    )


@st.composite
def shapes(draw: st.DrawFn, limits: ShapeBounds) -> JobShape:
    def grid(low: float, high: float) -> float:
        return min(high, low + limits.cpu_step * draw(st.integers(0, round((high - low) / limits.cpu_step))))

    return JobShape(
        draw(st.integers(*limits.workers)),
        draw(st.integers(*limits.ps)),
        grid(*limits.worker_cpu),
        grid(*limits.ps_cpu),
        draw(st.integers(*limits.worker_memory)),
        draw(st.integers(*limits.ps_memory)),
    )


@given(st.data(), bounds(), st.booleans())
def test_whatever_is_free_is_never_exceeded_and_no_bound_is_broken(
    data: st.DataObject, limits: ShapeBounds, keep_memory: bool
) -> None:
    """A job waits only if not even its smallest shape fits."""
    wanted = data.draw(shapes(limits))
    cores = st.floats(0.0, 60.0) | st.just(wanted.cpu)
    room = ClusterCapacity(
        data.draw(cores),
        data.draw(st.integers(0, 120)) * GIB,
        data.draw(st.floats(0.1, 10.0) | st.just(math.inf)),
        data.draw(st.integers(0, 12).map(lambda gib: float(gib * GIB)) | st.just(math.inf)),
    )
    shape = cut_to(wanted, limits, room, keep_memory=keep_memory)
    if shape is None:
        bottom = JobShape(
            limits.workers[0],
            limits.ps[0],
            limits.worker_cpu[0],
            limits.ps_cpu[0],
            limits.worker_memory[0],
            limits.ps_memory[0],
        )
        assert not fits(least_of(wanted, limits, room, keep_memory=keep_memory), room)
        assert keep_memory or not fits(bottom, room)
        return
    assert limits.contains(shape)
    assert shape.cpu <= room.cpu * (1 + 1e-9)
    assert shape.memory <= room.memory
    assert max(shape.worker_cpu, shape.ps_cpu) <= room.largest_node_cpu
    assert max(shape.worker_memory, shape.ps_memory) <= room.largest_node_memory
    assert shape.workers <= wanted.workers
    assert shape.worker_cpu <= wanted.worker_cpu
    if fits(wanted, room):
        assert shape == wanted
    if shape.workers < wanted.workers:
        assert not fits(replace(shape, workers=shape.workers + 1), room)


@given(st.data(), bounds())
def test_tables_that_are_known_keep_their_memory(data: st.DataObject, limits: ShapeBounds) -> None:
    """The shape has fewer PS with more memory each. There is one wherever the least shape fits."""
    wanted = data.draw(shapes(limits))
    least = least_of(wanted, limits, ClusterCapacity(math.inf, 1 << 62), keep_memory=True)
    spare_cpu, spare_memory = data.draw(st.floats(0.0, 60.0)), data.draw(st.integers(0, 120)) * GIB
    room = ClusterCapacity(least.cpu + spare_cpu, least.memory + spare_memory)
    shape = unwrap(cut_to(wanted, limits, room, keep_memory=True))
    assert shape.ps * shape.ps_memory >= wanted.ps * wanted.ps_memory
    assert shape.worker_memory == wanted.worker_memory


def test_each_dimension_keeps_about_the_same_share() -> None:
    shape = unwrap(cut_to(WANTED, BOUNDS, ClusterCapacity(5.0, 100 * GIB), keep_memory=True))
    assert shape.cpu == 5.0
    assert (shape.workers, shape.ps) == (2, 1)
    assert shape.ps_memory == 16 * GIB


def test_processes_are_cut_to_the_largest_node() -> None:
    room = ClusterCapacity(2.0, 6 * GIB, largest_node_cpu=1.0, largest_node_memory=3.0 * GIB)
    shape = unwrap(cut_to(WANTED, BOUNDS, room, keep_memory=False))
    assert max(shape.worker_cpu, shape.ps_cpu) <= 1
    assert shape.cpu == 2.0
    assert shape.memory > 5.5 * GIB


def test_tables_too_large_for_a_node_take_more_servers() -> None:
    room = ClusterCapacity(100.0, 100 * GIB, largest_node_memory=6.0 * GIB)
    shape = unwrap(cut_to(WANTED, BOUNDS, room, keep_memory=True))
    assert shape.ps == 3
    assert shape.ps * shape.ps_memory >= 16 * GIB


def test_without_room_for_the_least_there_is_no_shape() -> None:
    assert cut_to(WANTED, BOUNDS, ClusterCapacity(0.9, 100 * GIB), keep_memory=False) is None
    assert cut_to(WANTED, BOUNDS, ClusterCapacity(9.0, 2 * GIB - 1), keep_memory=False) is None
    assert cut_to(WANTED, BOUNDS, ClusterCapacity(9.0, 2 * GIB), keep_memory=False) is not None
    assert cut_to(WANTED, BOUNDS, ClusterCapacity(9.0, 19 * GIB), keep_memory=True) is None


def test_what_is_left_by_sums_of_cores_is_room_for_the_rest() -> None:
    """0.6 - 0.2 is less than 0.4 in binary numbers."""
    room, small = Room(ClusterCapacity(0.6, 100 * GIB), {}), JobShape(1, 1, 0.1, 0.1, GIB, GIB)
    room.take("ann", small)
    assert room.fits("ann", replace(small, workers=3))
    assert not room.fits("ann", replace(small, workers=4))
