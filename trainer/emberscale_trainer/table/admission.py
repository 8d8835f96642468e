"""Which keys get rows: the tables of sketches in which pushes of keys without a row are counted.

A table with admission has a second table beside it. Its rows are sketches, one for each bucket in which a key without a
row was pushed: the "weights" of a sketch are its counters, and its key is one of that bucket. So sketches are rows to
all that follows rows: they move with their bucket, and are in snapshots, change sets and checkpoints.

A sketch is a count-min sketch (Cormode and Muthukrishnan 2005) with one array for its three hash functions, updated
conservatively, so it never counts a key too rarely between two halvings. It is halved after so many pushes that a
counter is a quarter of `min_count` high on average, times three. So it forgets, and the pushes of a key must come
within some `min_count * 2^19` pushes of keys without rows, over the table, to be counted together.
"""

from collections.abc import Sequence

from emberscale_api.job import InitializerSpec, InitializerType, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.table.rows import SKETCH_COUNTERS


def sketches_of(spec: TableSpec) -> TableSpec:
    """The table of a table's sketches. Its number is negative: requests do not name it."""
    return TableSpec(
        number=-1 - spec.number,
        name=f"{spec.name}.sketches",
        column=spec.column,
        dimension=SKETCH_COUNTERS // FLOAT_BYTES,
        optimizer=OptimizerSpec(type=OptimizerType.SGD),
        initializer=InitializerSpec(type=InitializerType.ZEROS),
        seed=0,
    )


def holds_sketches(spec: TableSpec) -> bool:
    """Whether the rows of a table are sketches."""
    return spec.number < 0


def with_sketches(specs: Sequence[TableSpec]) -> tuple[TableSpec, ...]:
    """The tables of a store: those of the sketches first, then `specs`, in the order of requests."""
    return (*(sketches_of(spec) for spec in specs if spec.admission.min_count > 1), *specs)
