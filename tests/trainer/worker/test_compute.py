"""What a model replica refuses to push."""

from pathlib import Path

import numpy as np
import pytest

from emberscale_trainer.data.source import Batch
from emberscale_trainer.table import NonFiniteGradientError
from in_process import InProcessTraining
from training_jobs import training_job

STEEP = """
import torch
from torch import nn

class Steep(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, dense, embeddings):
        steep = %s
        return embeddings["user"].sum(dim=1) + (steep - steep).sqrt().sum()  # 0, and its gradient is NaN
"""


@pytest.mark.parametrize(("steep", "of"), [('embeddings["user"]', "rows"), ("self.weight", "dense parameters")])
def test_gradients_that_are_not_finite_are_not_pushed_though_the_loss_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steep: str, of: str
) -> None:
    name = f"steep_{of.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(STEEP % steep)
    monkeypatch.syspath_prepend(tmp_path)
    columns = {"label": "clicked", "dense": ["price"], "categorical": ["user"]}
    job = training_job(
        data={"train": ["x"], "format": "Parquet", "columns": columns},
        model={"entrypoint": f"{name}:Steep", "embeddings": {"dimension": 4}},
    )
    training = InProcessTraining(job, servers=1)
    batch = Batch(
        number=7,
        start=0,
        stop=2,
        labels=np.array([0, 1], np.float32),
        dense=np.zeros((2, 1), np.float32),
        ids=np.array([[1], [2]]),
        lists=(),
        bad_records=(),
        truncated_records=0,
    )
    with pytest.raises(NonFiniteGradientError, match=f"of the {of} of batch 7 is nan"):
        training.train(batch)
    assert not any(training.stores[0].rows().values())
