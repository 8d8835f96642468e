"""Decides which keys get rows: the tables of sketches, which count pushes of keys without a row.

A table with admission has a second table beside it. Its rows are sketches, one for each bucket in which a key without a
row was pushed: the "weights" of a sketch are its counters, and its key is a key of that bucket. All code that handles
rows therefore handles sketches: they move with their bucket, and are in snapshots, change sets and checkpoints.

A sketch is a count-min sketch (Cormode and Muthukrishnan 2005) with one array for its three hash functions, updated
conservatively, so it never undercounts a key between two halvings. It is halved after so many pushes that a
counter is a quarter of `min_count` high on average, times three. The sketch thus forgets: to be counted together, the
pushes of a key must come within about `min_count * 2^19` pushes of keys without rows, over the table.
"""

from collections.abc import Sequence

from emberscale_api.job import InitializerSpec, InitializerType, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.table.rows import SKETCH_COUNTERS


def sketches_of(spec: TableSpec) -> TableSpec:
    """Returns the specification of a table's sketches. Its number is negative, since requests do not name it."""
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
    """Returns the tables of a store: those of the sketches first, then `specs`, in the order of requests."""
    return (*(sketches_of(spec) for spec in specs if spec.admission.min_count > 1), *specs)
