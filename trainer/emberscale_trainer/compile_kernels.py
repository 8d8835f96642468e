"""Compiles the kernels that read and train into Numba's cache, so that a first job's processes need not, all at once.

python -m emberscale_trainer.compile_kernels
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emberscale_api.dataset import DataFile
from emberscale_api.job import ColumnMapping, DenseTransform, ListColumn
from emberscale_api.job.resolved import CRITEO_CATEGORICAL, CRITEO_DENSE
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.csv_text import CSV
from emberscale_trainer.data.parquet import Parquet
from emberscale_trainer.data.records import empty_columns
from emberscale_trainer.jit import warm_up

_HOLDING_KERNELS = (
    "emberscale_trainer.models.cin",
    "emberscale_trainer.models.dot_products",
    "emberscale_trainer.models.loss",
    "emberscale_trainer.models.mlp",
    "emberscale_trainer.table",
    "emberscale_trainer.worker.keys",
    "emberscale_trainer.worker.local_rows",
    "emberscale_trainer.worker.rows",
    "emberscale_trainer.worker.statistics",
)


def main() -> None:
    """Imports all modules with entries and typed kernels, and runs the kernels that read records."""
    for module in _HOLDING_KERNELS:
        import_module(module)
    warm_up()
    _read_records()


def _read_records() -> None:
    """A record of every format; one without and one with quotes, and with each type of dense features."""
    columns = ColumnMapping(
        label="y", dense=("int64", "int32", "float64", "float32"), categorical=("u",), lists=(ListColumn(name="h"),)
    )
    names = [columns.label, *columns.dense, *columns.id_columns]
    table = pa.table(
        {
            "y": [1, None],
            **{name: pa.array([0, None], getattr(pa, name)()) for name in columns.dense},
            "u": ["text", None],
            "h": [[1, 2], []],
        }
    )
    logged = columns.model_copy(update={"dense_transform": DenseTransform.LOG1P})
    with TemporaryDirectory() as folder:
        tsv, plain, quoted, parquet = (Path(folder, name) for name in ("a.tsv", "a.csv", "b.csv", "a.parquet"))
        tsv.write_text("\t".join(["1", *["0"] * len(CRITEO_DENSE), *["0"] * len(CRITEO_CATEGORICAL)]) + "\n")
        plain.write_text(",".join(names) + "\n1,0,0,0,0,text,1|2\n")
        quoted.write_text(",".join(names) + '\n1,0,0,0,0,"text",1|2\n')
        pq.write_table(table, parquet)
        for raw in (False, True):
            for reader, path in (
                (CriteoTSV(raw), tsv),
                (CSV(columns, raw=raw), plain),
                (CSV(columns, raw=raw), quoted),
                (Parquet(columns, raw), parquet),
                (Parquet(logged, raw), parquet),
            ):
                file = DataFile(uri=str(path), bytes=path.stat().st_size)
                (block,) = reader.index_file(file, 0, 2)
                room = empty_columns(block.records, reader.columns, raw)
                reader.read_block(file, block).read(np.arange(block.records), room)


if __name__ == "__main__":
    main()
