"""A user's own model takes a dry step before anything starts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emberscale_api.job import TrainingJob
from emberscale_trainer.models.refusals import EntrypointError
from emberscale_trainer.models.rehearsal import rehearse
from training_jobs import training_job

COLUMNS = {"label": "y", "dense": ["a", "b"], "categorical": ["c"], "lists": [{"name": "d"}]}
MODULE = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(len(features.dense) + sum(features.embeddings.values()), 1)

    def forward(self, dense, embeddings):
        return self.linear(torch.cat([dense, *embeddings.values()], dim=1))[:, 0]

class OneColumn(Good):
    def forward(self, dense, embeddings):
        return self.linear.bias + embeddings["c"].sum(dim=1)

class Probabilities(Good):
    def forward(self, dense, embeddings):
        return torch.sigmoid(super().forward(dense, embeddings))

class Takes(Good):
    def forward(self, dense, embeddings):
        c = embeddings.pop("c")
        return super().forward(dense, {"c": c, **embeddings})

class NotANumber(Good):
    def forward(self, dense, embeddings):
        return super().forward(dense, embeddings) * float("nan")

class Column(Good):
    def forward(self, dense, embeddings):
        return self.linear(torch.cat([dense, *embeddings.values()], dim=1))

class Squeezed(Good):
    def forward(self, dense, embeddings):
        return super().forward(dense, embeddings).squeeze()

class Doubles(Good):
    def forward(self, dense, embeddings):
        return super().forward(dense, embeddings).double()

class Raises(Good):
    def forward(self, dense, embeddings):
        return self.look_up(embeddings)

    def look_up(self, embeddings):
        return embeddings["price"]

class Mismatched(Good):
    def forward(self, dense, embeddings):
        return self.linear(dense)[:, 0]

class Detached(Good):
    def forward(self, dense, embeddings):
        return super().forward(dense, {name: vector.detach() for name, vector in embeddings.items()})

class Frozen(Good):
    def forward(self, dense, embeddings):
        with torch.no_grad():
            return super().forward(dense, embeddings)

class Normalised(Good):
    def __init__(self, features):
        super().__init__(features)
        self.norm = nn.BatchNorm1d(3)

class Empty(nn.Module):
    def __init__(self, features):
        super().__init__()

class Double(Good):
    def __init__(self, features):
        super().__init__(features)
        self.double()

class Lazy(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.LazyLinear(1)

    def forward(self, dense, embeddings):
        return self.linear(torch.cat([dense, *embeddings.values()], dim=1))[:, 0]

def number(features):
    return 3

def fails(features):
    raise RuntimeError("out of luck")

def leaves(features):
    raise SystemExit("bye")

text = "text"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TrainingJob]:
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "imports_what_is_not_there.py").write_text("import no_such_module\n")
    (tmp_path / "no_python.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)

    def make(entrypoint: str) -> TrainingJob:
        return training_job(
            data={"train": ["x"], "format": "CSV", "columns": COLUMNS},
            model={"entrypoint": entrypoint, "embeddings": {"dimension": 3}},
        )

    return make


def test_a_sound_model_passes(job: Callable[[str], TrainingJob]) -> None:
    assert rehearse(job("own:Good")) == []


def test_a_model_may_take_embeddings_out_of_their_dict(job: Callable[[str], TrainingJob]) -> None:
    assert rehearse(job("own:Takes")) == []


def test_a_model_that_returns_no_numbers_is_remarked_on(job: Callable[[str], TrainingJob]) -> None:
    assert rehearse(job("own:NotANumber")) == ["some outputs for random inputs are NaN or infinite, which ends a job"]


def test_columns_that_a_model_does_not_use_are_remarked_on(job: Callable[[str], TrainingJob]) -> None:
    assert rehearse(job("own:OneColumn")) == ["the model does not use d"]


def test_a_model_that_returns_probabilities_is_remarked_on(job: Callable[[str], TrainingJob]) -> None:
    (remark,) = rehearse(job("own:Probabilities"))
    assert "seems to return probabilities; return logits" in remark


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("own:Column", "returned a float32 tensor of shape [4, 1] for 4 samples; expected one logit a sample"),
        ("own:Squeezed", "returned a float32 tensor of shape [] for 1 samples"),
        ("own:Doubles", "returned a float64 tensor of shape [4]"),
        ("own:Detached", "no embedding gets a gradient"),
        ("own:Frozen", "no embedding gets a gradient"),
        ("own:Normalised", "the module keeps norm.num_batches_tracked, norm.running_mean, norm.running_var"),
        ("own:Empty", "the module has no parameters"),
        ("own:Double", "the parameter linear.weight is a float64 tensor"),
        ("own:Lazy", "the parameter linear.weight has no shape yet; expected layers with sizes, such as nn.Linear"),
        ("own:number", "the factory returned an object of type int; expected a torch.nn.Module"),
        ("own:text", "text is an object of type str"),
        ("own:absent", "has no absent; what can be called there: Good, OneColumn"),
        ("absent:model", "there is no module absent"),
        ("absent.deeper:model", "there is no module absent"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(
    job: Callable[[str], TrainingJob], entrypoint: str, words: str
) -> None:
    with pytest.raises(EntrypointError) as refused:
        rehearse(job(entrypoint))
    assert words in refused.value.problem
    assert refused.value.frames == ""


@pytest.mark.parametrize(
    ("entrypoint", "last_frame", "words"),
    [
        ("own:Raises", "in look_up", "embeddings {c: [B, 3], d: [B, 3]} raised KeyError: 'price'"),
        ("own:Mismatched", "in forward", "with dense [B, 2] and embeddings"),
        ("own:fails", "in fails", "the factory raised RuntimeError: out of luck"),
        ("own:leaves", "in leaves", "the factory raised SystemExit: bye"),
        ("imports_what_is_not_there:model", "in <module>", "No module named 'no_such_module'"),
    ],
)
def test_what_they_raise_is_shown_with_their_own_frames_only(
    job: Callable[[str], TrainingJob], entrypoint: str, last_frame: str, words: str
) -> None:
    with pytest.raises(EntrypointError) as refused:
        rehearse(job(entrypoint))
    assert words in refused.value.problem
    frames = [line for line in refused.value.frames.splitlines() if line.startswith("  File")]
    assert last_frame in frames[-1]
    folder = str(Path.cwd())
    assert all(folder in frame for frame in frames)


def test_a_syntax_error_is_shown_where_it_is(job: Callable[[str], TrainingJob]) -> None:
    with pytest.raises(EntrypointError) as refused:
        rehearse(job("no_python:model"))
    assert "no_python.py" in refused.value.frames
    assert "SyntaxError" in refused.value.problem
