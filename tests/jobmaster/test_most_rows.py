"""The brain is told the bound that eviction sets to a model's rows, if any."""

from tests.jobmaster.fakes import job

from emberscale_api.job import resolve_model
from emberscale_jobmaster.brain_messages import most_rows


def test_the_brain_is_told_what_eviction_leaves_of_all_tables() -> None:
    spec = job(model={"embeddings": {"eviction": {"maxRows": 100_000}}}).spec
    tables = len(resolve_model(spec).tables)
    # up to 97 batches may pass before eviction looks at a bucket
    assert most_rows(spec) == tables * (100_000 + 97 * spec.training.batch_size)


def test_one_table_without_a_bound_leaves_all_of_them_without() -> None:
    evicted = {"eviction": {"maxRows": 100_000}, "tables": {"C3": {"eviction": {"ttlBatches": 50}}}}
    assert most_rows(job(model={"embeddings": evicted}).spec) == 0
    assert most_rows(job().spec) == 0
