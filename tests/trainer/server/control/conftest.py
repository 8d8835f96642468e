"""The only parameter server of a job and the master's calls to it, with the messages of gRPC."""

from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from emberscale_api.job import TrainingJob, resolve_model
from emberscale_api.routing import BUCKETS, DENSE_PIECES, piece_length
from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.server.control import ParameterServerControl
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.saves import FlashStore
from emberscale_trainer.server.state import ServerState
from training_jobs import training_job

SECONDS = 60.0
COLUMNS = {"label": "y", "dense": ["a"], "categorical": ["user", "item/id"]}


class RefusedError(Exception):
    """A call was answered with an error."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Context:
    """The part of a gRPC context that the methods use."""

    def __init__(self) -> None:
        self.metadata: dict[str, bytes] = {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.metadata = dict(metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedError(code, details)


CONTEXT: Any = Context()


def make_job() -> TrainingJob:
    return training_job(
        data={"train": ["x"], "format": "Parquet", "columns": COLUMNS},
        model={"architecture": "DCNv2", "embeddings": {"dimension": 4}},
    )


class Server:
    """The only parameter server of a job, and the master's calls to it."""

    def __init__(self, flash: FlashStore | None = None) -> None:
        self.job = make_job()
        self.state = ServerState()
        self.mover = RowMover(self.state, "secret")
        metrics = ServerMetrics(self.state, self.mover.protection, CollectorRegistry())
        self.memory_left: int | None = None
        self.control = ParameterServerControl(0, "i", self.state, self.mover, metrics, flash, lambda: self.memory_left)
        resolved = resolve_model(self.job.spec)
        parameters = len(flat_copy(build_model(self.job.spec.model, resolved, 0)))
        self.length = piece_length(parameters)

    def assign(self, generation: int = 1, checkpoint: str = "", wait: float = SECONDS) -> master_pb2.AssignReply:
        request = master_pb2.AssignRequest(
            routing=self.routing(generation, generation),
            manifest_json=self.job.to_json(),
            checkpoint_uri=checkpoint,
            wait_seconds=wait,
        )
        return self.control.Assign(request, CONTEXT)

    @staticmethod
    def routing(generation: int, version: int) -> master_pb2.Routing:
        return master_pb2.Routing(
            generation=generation,
            version=version,
            servers=[master_pb2.PsEndpoint(index=0, incarnation="i")],
            bucket_owners=[0] * BUCKETS,
            piece_owners=[0] * DENSE_PIECES,
        )

    def push(self, batch: int, generation: int = 1) -> Status:
        keys = np.array([batch, 1000 + batch, 5], np.int64)
        header = Header(Kind.PUSH, generation=generation, version=generation, batch=batch, tables=3)
        status = self.state.push(0, header, np.ones(3, np.uint32), keys, np.ones(8 + self.length, np.float32))
        self.state.complete(0, header)
        return status

    def hold(self, number: int = 1, generation: int = 1) -> list[list[int]]:
        return ranges(
            self.control.Hold(master_pb2.HoldRequest(barrier=barrier(number, generation), version=generation), CONTEXT)
        )

    def settle(self, number: int = 1, batches: tuple[int, ...] = (), wait: float = 0, generation: int = 1) -> Any:
        request = master_pb2.SettleRequest(barrier=barrier(number, generation), wait_seconds=wait)
        for batch in batches:
            request.settle.add(epoch=0, ranges=[batch, batch + 1])
        return ranges(self.control.Settle(request, CONTEXT))

    def snapshot(
        self, uri: Path | str, number: int = 1, generation: int = 1, bytes_per_second: int = 0
    ) -> master_pb2.SnapshotReply:
        request = master_pb2.SnapshotRequest(
            barrier=barrier(number, generation), uri=str(uri), bytes_per_second=bytes_per_second
        )
        return self.control.Snapshot(request, CONTEXT)

    def saved(
        self, number: int = 1, wait: float = SECONDS, generation: int = 1, *, at_full_speed: bool = False
    ) -> master_pb2.GetSavedReply:
        request = master_pb2.GetSavedRequest(
            generation=generation, barrier=number, wait_seconds=wait, incarnation="i", at_full_speed=at_full_speed
        )
        return self.control.GetSaved(request, CONTEXT)


def barrier(number: int, generation: int = 1, meant: str = "i") -> master_pb2.Barrier:
    return master_pb2.Barrier(generation=generation, number=number, hold_seconds=SECONDS, incarnation=meant)


def ranges(reply: Any) -> list[list[int]]:
    return [list(epoch.ranges) for epoch in reply.applied]


@pytest.fixture
def server() -> Server:
    return Server()
