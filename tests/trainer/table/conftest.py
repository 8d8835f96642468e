"""Fixtures for the tests of the embedding tables."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import mix64
from emberscale_trainer.table import Reader, TableStore
from snapshots import records_of

GAMMA = 0x9E3779B97F4A7C15


MakeSpec = Callable[..., TableSpec]


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    def make(
        number: int = 0,
        dimension: int = 4,
        optimizer: OptimizerType = OptimizerType.SGD,
        initializer: InitializerType = InitializerType.UNIFORM,
        scale: float = 0.05,
        seed: int = 7,
        **parameters: Any,
    ) -> TableSpec:
        return TableSpec(
            number=number,
            name=f"C{number + 1}",
            column=number,
            dimension=dimension,
            optimizer=OptimizerSpec(type=optimizer, **parameters),
            initializer=InitializerSpec(type=initializer, scale=scale),
            seed=seed,
        )

    return make


@pytest.fixture(scope="session")
def pull() -> Callable[..., NDArray[np.float32]]:
    """Pulls keys of a store, one list per table; returns the weights as one vector."""

    def call(store: TableStore, *keys: Sequence[int]) -> NDArray[np.float32]:
        counts = np.array([len(table) for table in keys], np.uint32)
        out = np.full(store.values_per_request(counts), np.nan, np.float32)
        store.pull(counts, np.concatenate([np.array(table, np.int64) for table in keys]), out)
        return out

    return call


@pytest.fixture(scope="session")
def push() -> Callable[..., None]:
    """Pushes gradients for keys of a store, one pair (keys, gradients) per table."""

    def call(store: TableStore, *tables: tuple[Sequence[int], Any]) -> None:
        counts = np.array([len(keys) for keys, _ in tables], np.uint32)
        keys = np.concatenate([np.array(keys, np.int64) for keys, _ in tables])
        store.push(counts, keys, np.concatenate([np.asarray(gradients, np.float32).ravel() for _, gradients in tables]))

    return call


@pytest.fixture(scope="session")
def initial_weights() -> Callable[[TableSpec, int], NDArray[np.float32]]:
    """Computes the initial weights of a row in plain Python, from the definition."""

    def compute(spec: TableSpec, key: int) -> NDArray[np.float32]:
        stream = mix64(mix64(key) ^ mix64(mix64(spec.seed * GAMMA) + spec.number * GAMMA))
        scale, weights = spec.initializer.scale, []
        for pair in range((spec.dimension + 1) // 2):
            bits = mix64(stream + (pair + 1) * GAMMA)
            low, high = bits & 0xFFFFFFFF, bits >> 32
            if spec.initializer.type is InitializerType.UNIFORM:
                weights += [((half + 0.5) * 2.0**-31 - 1.0) * scale for half in (low, high)]
            elif spec.initializer.type is InitializerType.NORMAL:
                radius = math.sqrt(-2.0 * math.log((low + 1.0) * 2.0**-32)) * scale
                angle = high * (2.0 * math.pi * 2.0**-32)
                weights += [radius * math.cos(angle), radius * math.sin(angle)]
            else:
                weights += [0.0, 0.0]
        return np.array(weights[: spec.dimension], np.float32)

    return compute


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]]]:
    """Returns all rows of one table: key -> (weights, state, pushes)."""

    def read(store: TableStore, table: int = 0) -> dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]]:
        records = records_of(store.readers.snapshot(Reader.FLASH, nullcontext()), table)
        fields = [store.layouts[table].fields(np.frombuffer(record, np.uint8)[None]) for record in records.values()]
        return {int(f["key"][0]): (f["weights"][0], f["state"][0], int(f["pushes"][0])) for f in fields}

    return read
