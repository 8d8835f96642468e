"""A job whose rows grow by training alone: one epoch touches all, and the dimension sets how many bytes they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLES = 1_000_000
ROWS = 1_330_000
"""About the number of rows that these samples touch."""

GB = 1_000_000_000
_ROW_HEADER = 12
"""The bytes of a row besides its weights and its optimizer state."""
_FLOATS_BYTES = 2 * 4
"""The bytes of a weight, and of Adagrad's state for it."""


def dimension_of(size: float) -> int:
    """Returns the dimension at which all rows together have about `size` GB."""
    return max(4, round((size * GB / ROWS - _ROW_HEADER) / _FLOATS_BYTES / 4) * 4)


def bytes_of(rows: int, dimension: int) -> int:
    """Returns the bytes of so many rows, optimizer state included."""
    return rows * (_ROW_HEADER + _FLOATS_BYTES * dimension)


def growing(data: Path, dimension: int) -> Mapping[str, Any]:
    """Returns the part of a job's spec that makes it train on `data` for as long as it is let."""
    return {
        "data": {"train": [str(data / "train-*.tsv")]},
        "model": {"embeddings": {"dimension": dimension}, "bottomMlp": [64], "topMlp": [64]},
        "optimizers": {
            "sparse": {"type": "Adagrad", "learningRate": 0.02},
            "dense": {"type": "Adagrad", "learningRate": 0.01},
        },
        "training": {"batchSize": 1024, "epochs": 1000, "stalenessWarmup": 0},
        "sharding": {"heartbeatInterval": "200ms"},
    }
