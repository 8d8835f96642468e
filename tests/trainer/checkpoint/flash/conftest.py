"""A Redis for the flash checkpoints of a module."""

from collections.abc import Iterator

import pytest

from redis_process import FlashServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlashServer]:
    with FlashServer(tmp_path_factory.mktemp("flash")) as server:
        yield server
