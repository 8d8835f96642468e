"""The entry points of workers and parameter servers that nothing is forked for, such as those in pods.

Importing PyTorch and the kernels takes most of their start; without garbage collection, it takes a seventh less.
"""

from typing import NoReturn

from emberscale_api.start import without_collection


def serve_rows() -> NoReturn:
    """Starts a parameter server."""
    with without_collection():
        from emberscale_trainer.server.__main__ import main
    main()


def work() -> NoReturn:
    """Starts a worker."""
    with without_collection():
        from emberscale_trainer.worker.__main__ import main
    main()
