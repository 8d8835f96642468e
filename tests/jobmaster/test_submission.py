"""What the brain is told of a job: the bound that eviction sets to its rows, its parity, and since when it runs."""

from dataclasses import replace

import pytest
from tests.jobmaster.small_job import job

from emberscale_api.job import resolve_model
from emberscale_jobmaster import takeover
from emberscale_jobmaster.brain_messages import most_rows, submission


def test_the_brain_is_told_what_eviction_leaves_of_all_tables() -> None:
    spec = job(model={"embeddings": {"eviction": {"maxRows": 100_000}}}).spec
    tables = len(resolve_model(spec).tables)
    # up to 97 batches may pass before eviction looks at a bucket
    assert most_rows(spec) == tables * (100_000 + 97 * spec.training.batch_size)


def test_one_table_without_a_bound_leaves_all_of_them_without() -> None:
    evicted = {"eviction": {"maxRows": 100_000}, "tables": {"C3": {"eviction": {"ttlBatches": 50}}}}
    assert most_rows(job(model={"embeddings": evicted}).spec) == 0
    assert most_rows(job().spec) == 0


@pytest.mark.parametrize(("durability", "lags"), [("Sync", False), ("Async", True)])
def test_the_brain_is_told_whether_parity_lags(durability: str, lags: bool) -> None:
    keeping = job(fault_tolerance={"strategy": "ErasureCoding", "durability": durability}, ps={"replicas": 2})
    told = submission(keeping, "uid", takeover.initial(wall=1.0), data_bytes=0, wall=1.0).description
    assert (told.parity, told.async_parity) == (1, lags)


@pytest.mark.parametrize(("wall", "since"), [(1_000_000.0, 996_400.0), (60.0, 0.0)])
def test_the_brain_is_told_since_when_a_job_runs_that_it_does_not_know(wall: float, since: float) -> None:
    """Without it, a brain would take all servers that the job ever lost for losses of the last moments."""
    begun = takeover.initial(wall=1.0)
    running = replace(begun, clock=replace(begun.clock, active_seconds=3600.0))
    assert submission(job(), "uid", running, data_bytes=0, wall=wall).submitted_at == since
