"""Compiles every kernel into Numba's cache, so that the processes of a first job need not, all at once.

python -m emberscale_trainer.compile_kernels
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from emberscale_api.rpc.master_pb2 import DataFile
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.records import empty_columns
from emberscale_trainer.table import warm_up

_COMPILED_WHEN_IMPORTED = (
    "emberscale_trainer.models.interaction",
    "emberscale_trainer.worker.keys",
    "emberscale_trainer.worker.rows",
)


def main() -> None:
    """Imports or runs each kernel once."""
    warm_up()
    for module in _COMPILED_WHEN_IMPORTED:
        import_module(module)
    _read_a_record()


def _read_a_record() -> None:
    reader = CriteoTSV()
    with TemporaryDirectory() as folder:
        path = Path(folder, "record.tsv")
        path.write_text("\t".join(["1", *["0"] * reader.dense_columns, *["0"] * reader.categorical_columns]) + "\n")
        file = DataFile(uri=str(path), bytes=path.stat().st_size)
        (block,) = reader.index_file(file, 0, 1)
        columns = empty_columns(1, reader.dense_columns, reader.categorical_columns)
        reader.read_block(file, block).read(np.zeros(1, dtype=np.int64), columns)


if __name__ == "__main__":
    main()
