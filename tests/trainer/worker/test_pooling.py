"""Pooled lists of ids, against torch.nn.EmbeddingBag."""

import numpy as np
import pytest
import torch
from torch import nn

from emberscale_api.job import InitializerSpec, OptimizerSpec, Pooling, TableSpec
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.rows import EmbeddingLayout
from master_stand_in import even_table

LISTS = [[3, 3, 7], [], [1], [7, 2, 9, 3, 3, 5, 1], []]


@pytest.mark.parametrize(("pooling", "mode"), [(Pooling.SUM, "sum"), (Pooling.MEAN, "mean")])
@pytest.mark.parametrize("dimension", [1, 5, 16])
def test_lists_are_pooled_as_embedding_bag_does(pooling: Pooling, mode: str, dimension: int) -> None:
    values = np.array([key for one in LISTS for key in one])
    edges = np.cumsum([0, *(len(one) for one in LISTS)])
    bag = nn.EmbeddingBag(10, dimension, mode=mode, include_last_offset=True)
    expected = bag(torch.from_numpy(values), torch.from_numpy(edges))
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    assert bag.weight.grad is not None

    spec = TableSpec(0, "history", 0, dimension, OptimizerSpec(), InitializerSpec(), 0, pooling)
    plan = KeyPlanner(even_table(2), [spec], 0).plan(np.empty((len(LISTS), 0), np.int64), [IdLists(values, edges)])
    keys = np.concatenate([asked[: counts[0]] for asked, counts in zip(plan.keys, plan.counts, strict=True)])
    layout = EmbeddingLayout([spec])
    pooled = layout.gather(bag.weight.detach().numpy()[keys].reshape(-1), plan)
    scattered = layout.scatter(gradient.numpy(), plan).reshape(len(keys), dimension)

    np.testing.assert_allclose(pooled, expected.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert not pooled[1].any()
    np.testing.assert_allclose(scattered, bag.weight.grad.numpy()[keys], rtol=1e-6, atol=1e-6)
    assert len(keys) == len({key for one in LISTS for key in one})
