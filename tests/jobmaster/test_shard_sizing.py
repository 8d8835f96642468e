from hypothesis import given
from hypothesis import strategies as st

from emberscale_jobmaster.tasks import shard_batches

SPEEDS = st.one_of(st.none(), st.floats(0.1, 1e6))
BOUNDS = st.tuples(st.integers(1, 50), st.integers(0, 200)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.integers(0, 10_000), SPEEDS, st.lists(SPEEDS, max_size=8), BOUNDS)
def test_sizes_stay_within_the_manifests_bounds(
    available: int, speed: float | None, others: list[float | None], bounds: tuple[int, int]
) -> None:
    assert bounds[0] <= shard_batches(available, speed, [speed, *others], *bounds) <= bounds[1]


@given(st.integers(0, 10_000), st.floats(0.1, 1e5), st.floats(1, 10), st.lists(SPEEDS, max_size=8), BOUNDS)
def test_a_slower_worker_never_gets_the_larger_shard(
    available: int, slow: float, times: float, others: list[float | None], bounds: tuple[int, int]
) -> None:
    peers = [slow, slow * times, *others]
    assert shard_batches(available, slow, peers, *bounds) <= shard_batches(available, slow * times, peers, *bounds)


@given(st.lists(SPEEDS, min_size=1, max_size=8), BOUNDS)
def test_shards_shrink_as_the_work_runs_out(peers: list[float | None], bounds: tuple[int, int]) -> None:
    sizes = [shard_batches(available, peers[0], peers, *bounds) for available in range(0, 2000, 50)]
    assert sizes == sorted(sizes)
    assert sizes[0] == bounds[0]


def test_a_straggler_holds_a_part_of_a_shard_as_its_speed_is_of_its_peers() -> None:
    peers: list[float | None] = [100.0, 100.0, 25.0]
    assert shard_batches(100_000, 100.0, peers, 8, 64) == 64
    assert shard_batches(100_000, 25.0, peers, 8, 64) == 16


def test_a_worker_of_unknown_speed_counts_as_the_middle_of_its_peers() -> None:
    peers: list[float | None] = [100.0, 50.0, 200.0, None]
    assert shard_batches(400, None, peers, 1, 1000) == shard_batches(400, 100.0, [100.0, 50.0, 200.0, 100.0], 1, 1000)
