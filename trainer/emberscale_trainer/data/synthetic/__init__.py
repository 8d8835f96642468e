"""Synthetic data in the Criteo format, with a hidden teacher, reproducible by seed."""

from emberscale_trainer.data.synthetic.dataset import DatasetSpec, SynthesisResult, write_dataset
from emberscale_trainer.data.synthetic.population import Population

__all__ = ["DatasetSpec", "Population", "SynthesisResult", "write_dataset"]
