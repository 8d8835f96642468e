"""Synthetic data in the Criteo format, with a hidden teacher, reproducible by seed."""

from emberscale_trainer.data.synthetic.dataset import METADATA, DatasetSpec, SynthesisResult, write_dataset
from emberscale_trainer.data.synthetic.population import Population, Rows

__all__ = ["METADATA", "DatasetSpec", "Population", "Rows", "SynthesisResult", "write_dataset"]
