"""What the columns look like: modelled on those of the public Criteo display advertising data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """floor(exp(mean + deviation * z)) - shift, with z roughly standard normal; `missing` is a ratio."""

    mean: float
    deviation: float
    missing: float
    shift: int = 0


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """Ids whose popularity falls with their rank as rank ** -exponent, up to rank `cardinality`.

    `effect` is how much an id says by itself about the label, next to the other columns; ids of columns that
    `interact` also say something together. With `arrival`, a new id becomes the most popular one every so many rows and
    all others fall by a rank.
    """

    cardinality: int
    exponent: float
    missing: float
    effect: float
    interacts: bool = False
    arrival: int = 0


DENSE = (
    DenseColumn(0.8, 1.2, 0.45),
    DenseColumn(2.2, 1.9, 0.0, shift=3),
    DenseColumn(1.9, 1.3, 0.21),
    DenseColumn(1.6, 0.9, 0.22),
    DenseColumn(7.9, 1.9, 0.03),
    DenseColumn(3.5, 1.6, 0.22),
    DenseColumn(1.4, 1.5, 0.04),
    DenseColumn(2.1, 0.9, 0.0),
    DenseColumn(3.7, 1.5, 0.04),
    DenseColumn(0.2, 0.5, 0.45),
    DenseColumn(0.7, 0.9, 0.04),
    DenseColumn(0.1, 0.8, 0.76),
    DenseColumn(1.5, 1.0, 0.22),
)

CATEGORICAL = (
    CategoricalColumn(1_460, 1.2, 0.0, 1.2, interacts=True),
    CategoricalColumn(583, 1.1, 0.0, 1.2, interacts=True),
    CategoricalColumn(10_131_227, 1.1, 0.034, 0.5),
    CategoricalColumn(2_202_608, 1.1, 0.034, 0.5, arrival=2_000),
    CategoricalColumn(305, 1.3, 0.0, 1.2),
    CategoricalColumn(24, 1.2, 0.12, 1.0),
    CategoricalColumn(12_517, 1.1, 0.0, 0.7, interacts=True),
    CategoricalColumn(633, 1.3, 0.0, 1.2),
    CategoricalColumn(3, 1.5, 0.0, 0.7),
    CategoricalColumn(93_145, 1.1, 0.0, 0.7),
    CategoricalColumn(5_683, 1.1, 0.0, 1.2, interacts=True),
    CategoricalColumn(8_351_593, 1.1, 0.034, 0.5),
    CategoricalColumn(3_194, 1.15, 0.0, 1.2),
    CategoricalColumn(27, 1.2, 0.0, 1.0, interacts=True),
    CategoricalColumn(14_992, 1.1, 0.0, 0.7),
    CategoricalColumn(5_461_306, 1.1, 0.034, 0.5),
    CategoricalColumn(10, 1.2, 0.0, 1.0),
    CategoricalColumn(5_652, 1.15, 0.0, 1.2),
    CategoricalColumn(2_173, 1.2, 0.44, 1.2),
    CategoricalColumn(4, 1.2, 0.44, 0.7),
    CategoricalColumn(7_046_547, 1.1, 0.034, 0.5, arrival=5_000),
    CategoricalColumn(18, 1.3, 0.76, 1.0),
    CategoricalColumn(15, 1.3, 0.0, 1.0, interacts=True),
    CategoricalColumn(286_181, 1.1, 0.034, 0.5),
    CategoricalColumn(105, 1.2, 0.44, 1.2),
    CategoricalColumn(142_572, 1.1, 0.44, 0.5),
)

POSITIVE_RATE = 0.25
TEACHER_AUC = 0.80
"""What the teacher is calibrated to: no model can be expected to do better."""
