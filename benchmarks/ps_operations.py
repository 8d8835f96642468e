"""What a parameter server's work costs: rows pulled and pushed, and bytes moved.

* Rows: pull + push of the same distinct ids (26 tables, dimension 16, power-law ids of batches of 2048, row-wise
  Adagrad) by two tables' stores in two threads, as two servers divide them, against one process of PyTorch on two
  threads that reads by `index_select` and steps by a row-wise Adagrad written by hand, and against
  `torch.optim.Adagrad` on sparse gradients. The references have all tables in one matrix, which is their fastest form,
  and are given row numbers; ours finds the rows by 64-bit ids in hash tables.
* Bytes: 1 MiB there and a short answer back, over our frames on a Unix socket, over grpc.aio, and over a bare Unix
  socket; the other end is a process of its own.
"""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.pictures import BLUE, CRIMSON
from emberscale_api.readable import bytes_text, rate_text
from emberscale_api.routing import BUCKETS, mix64
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.table import TableStore
from emberscale_trainer.transport import Connection, connect, listen
from reporting import Ratio, arguments, report, say

TABLES, DIMENSION, BATCH = 26, 16, 2048
IDS_A_TABLE = 40_000
LEARNING_RATE, EPSILON = 0.02, 1e-10
SERVERS = 2
MESSAGE = 1 << 20
MESSAGES = 200


def distinct_ids(random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Draws the distinct row numbers of a batch in each table, by Zipf's law with exponent 1.05 over IDS_A_TABLE."""
    weights = 1.0 / np.arange(1, IDS_A_TABLE + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    return [np.unique(np.minimum(np.searchsorted(edges, random.random(BATCH)), IDS_A_TABLE - 1)) for _ in range(TABLES)]


def table_specs() -> list[TableSpec]:
    """Returns the tables, with row-wise Adagrad."""
    optimizer = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=LEARNING_RATE, epsilon=EPSILON)
    return [
        TableSpec(number, f"C{number}", number, DIMENSION, optimizer, InitializerSpec(), seed=1)
        for number in range(TABLES)
    ]


class OurServers:
    """Two stores, each with half of the buckets and its own thread."""

    def __init__(self, batches: list[list[NDArray[np.int64]]], random: np.random.Generator) -> None:
        names = random.integers(-(1 << 63), 1 << 63, (TABLES, IDS_A_TABLE), np.int64)
        owners = np.array(
            [[(mix64(int(name)) % BUCKETS) * SERVERS // BUCKETS for name in table] for table in names], np.int64
        )
        self._stores = [TableStore(table_specs()) for _ in range(SERVERS)]
        self._requests = [
            [self._request(batch, names, owners, server) for batch in batches] for server in range(SERVERS)
        ]
        self._threads = ThreadPoolExecutor(SERVERS)
        self._work = list(zip(self._stores, self._requests, strict=True))

    @staticmethod
    def _request(
        batch: list[NDArray[np.int64]], names: NDArray[np.int64], owners: NDArray[np.int64], server: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        keys = [names[table, ids[owners[table, ids] == server]] for table, ids in enumerate(batch)]
        counts = np.array([len(table) for table in keys], np.uint32)
        values = int(counts.sum()) * DIMENSION
        return counts, np.concatenate(keys), np.empty(values, np.float32), np.full(values, 0.01, np.float32)

    def run(self) -> None:
        """All batches once."""
        list(self._threads.map(lambda work: self._serve(*work), self._work))

    @staticmethod
    def _serve(
        store: TableStore,
        requests: list[tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]],
    ) -> None:
        for counts, keys, answer, gradients in requests:
            store.pull(counts, keys, answer)
            store.push(counts, keys, gradients)


class HandWritten:
    """`index_select`, and row-wise Adagrad in a few tensor operations, on all tables end to end in one."""

    def __init__(self, batches: list[NDArray[np.int64]]) -> None:
        self._weights = torch.rand(TABLES * IDS_A_TABLE, DIMENSION)
        self._accumulator = torch.zeros(TABLES * IDS_A_TABLE)
        self._batches = [torch.from_numpy(ids) for ids in batches]
        self._gradients = [torch.full((len(ids), DIMENSION), 0.01) for ids in batches]

    @torch.no_grad()
    def run(self) -> None:
        """All batches once."""
        for ids, gradient in zip(self._batches, self._gradients, strict=True):
            self._weights.index_select(0, ids)
            sums = self._accumulator.index_select(0, ids).add_(gradient.square().mean(dim=1))
            self._accumulator.index_copy_(0, ids, sums)
            step = gradient / sums.sqrt_().add_(EPSILON).unsqueeze_(1)
            self._weights.index_add_(0, ids, step, alpha=-LEARNING_RATE)


class TorchOptim:
    """`index_select`, and torch.optim.Adagrad on sparse gradients, on all tables end to end in one."""

    def __init__(self, batches: list[NDArray[np.int64]]) -> None:
        self._weights = torch.rand(TABLES * IDS_A_TABLE, DIMENSION, requires_grad=True)
        self._optimizer = torch.optim.Adagrad([self._weights], lr=LEARNING_RATE, eps=EPSILON)
        self._batches = [torch.from_numpy(ids) for ids in batches]
        self._gradients = [
            torch.sparse_coo_tensor(
                ids.unsqueeze(0),
                torch.full((len(ids), DIMENSION), 0.01),
                self._weights.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            for ids in self._batches
        ]

    def run(self) -> None:
        """All batches once."""
        for ids, gradient in zip(self._batches, self._gradients, strict=True):
            with torch.no_grad():
                self._weights.index_select(0, ids)
            self._weights.grad = gradient
            self._optimizer.step()


def seconds(work: Callable[[], None]) -> float:
    """Returns the wall-clock time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_rows(pairs: int) -> dict[str, Ratio]:
    """Measures our rates over those of the references."""
    torch.set_num_threads(SERVERS)
    random = np.random.default_rng(0)
    batches = [distinct_ids(random) for _ in range(20)]
    rows = sum(len(ids) for batch in batches for ids in batch)
    numbers = [np.concatenate([ids + IDS_A_TABLE * table for table, ids in enumerate(batch)]) for batch in batches]
    ours, by_hand, optim = OurServers(batches, random), HandWritten(numbers), TorchOptim(numbers)
    for contender in (ours, by_hand, optim):
        contender.run()  # creates rows, and touches memory
    measured = [(seconds(ours.run), seconds(by_hand.run), seconds(optim.run)) for _ in range(pairs)]
    for name, column in zip(
        ("ours", "index_select + row-wise Adagrad by hand", "torch.optim.Adagrad"),
        zip(*measured, strict=True),
        strict=True,
    ):
        say(f"{name:42} {rate_text(rows / float(np.median(column)), 'rows'):>18}, pulled and pushed")
    return {
        "rows/s of pull + push / index_select + row-wise Adagrad by hand": Ratio(
            [(rows / mine, rows / theirs) for mine, theirs, _ in measured], 0.9, "min"
        ),
        "rows/s of pull + push / torch.optim sparse": Ratio(
            [(rows / mine, rows / theirs) for mine, _, theirs in measured], 2.0, "min"
        ),
    }


def serve(kind: str, address: str) -> None:
    """Runs the server: takes messages of MESSAGE bytes and answers each with a few bytes, until it is killed."""
    if kind == "grpc":
        asyncio.run(_serve_grpc(address))
        return
    listener, _ = listen(address)
    print("ready", flush=True)
    stream, _ = listener.accept()
    if kind == "frames":
        connection = Connection(stream)
        while True:
            connection.receive()
            connection.send(Header(Status.OK))
    buffer = memoryview(bytearray(MESSAGE))
    while True:
        received = 0
        while received < MESSAGE:
            count = stream.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
            if not count:
                return
            received += count
        stream.sendall(b"x")


async def _serve_grpc(address: str) -> None:
    async def take(_request: bytes, _context: object) -> bytes:
        return b"x"

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 4 * MESSAGE)])
    handler = grpc.unary_unary_rpc_method_handler(take)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Sink", {"Take": handler})])
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def send_frames(address: str) -> Callable[[], None]:
    """Connects; returns a function that sends MESSAGES messages as our frames."""
    return exchange(Connection(connect(address, 5.0)))


def exchange(connection: Connection) -> Callable[[], None]:
    """Returns a function that sends MESSAGES messages over a connection, and waits for each answer."""
    payload = np.ones(MESSAGE, np.uint8)
    header = Header(Kind.PUSH, payload_bytes=MESSAGE)

    def run() -> None:
        for _ in range(MESSAGES):
            connection.send(header, [payload])
            connection.receive_header()

    return run


def send_bare(address: str) -> Callable[[], None]:
    """Connects; returns a function that sends MESSAGES messages by sendall."""
    stream = connect(address, 5.0)
    payload = bytes(MESSAGE)

    def run() -> None:
        for _ in range(MESSAGES):
            stream.sendall(payload)
            stream.recv(1)

    return run


def send_grpc(address: str) -> Callable[[], None]:
    """Connects; returns a function that sends MESSAGES messages by grpc.aio, one after another, on one channel."""
    loop = asyncio.new_event_loop()
    payload = bytes(MESSAGE)

    async def open_call() -> Callable[[], object]:
        call = grpc.aio.insecure_channel(address).unary_unary("/bench.Sink/Take", None, None)
        return lambda: call(payload)

    call = loop.run_until_complete(open_call())

    async def send() -> None:
        for _ in range(MESSAGES):
            await call()  # type: ignore[misc]  # grpc.aio leaves its calls untyped

    return lambda: loop.run_until_complete(send())


def measure_bytes(pairs: int) -> dict[str, Ratio]:
    """Measures the rates of our frames over those of the references."""
    senders = {"frames": send_frames, "bare": send_bare, "grpc": send_grpc}
    servers = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            runs = {}
            for kind, sender in senders.items():
                address = f"unix://{folder}/{kind}.sock"
                server = subprocess.Popen(
                    [sys.executable, __file__, "--serve", kind, address], stdout=subprocess.PIPE, text=True
                )
                servers.append(server)
                if server.stdout is None or server.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the {kind} server did not start")
                runs[kind] = sender(address)
                runs[kind]()
            measured = [{kind: MESSAGES * MESSAGE / seconds(run) for kind, run in runs.items()} for _ in range(pairs)]
        finally:
            for server in servers:
                server.kill()
                server.wait()
    for kind in senders:
        say(f"{kind:42} {bytes_text(float(np.median([rates[kind] for rates in measured]))):>8}/s at 1 MiB")
    return {
        "bytes/s of frames / grpc.aio": Ratio([(rates["frames"], rates["grpc"]) for rates in measured], 2.5, "min"),
        "bytes/s of frames / a bare Unix socket": Ratio(
            [(rates["frames"], rates["bare"]) for rates in measured], 0.7, "min"
        ),
    }


def draw(path: Path, ratios: dict[str, Ratio]) -> None:
    """Draws every pair, and the targets."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    for number, (label, ratio) in enumerate(ratios.items()):
        quotients = [ours / theirs for ours, theirs in ratio.pairs]
        axis.barh(number, ratio.median, color=BLUE, alpha=0.6)
        axis.plot(quotients, [number] * len(quotients), "k.")
        axis.vlines(ratio.target, number - 0.4, number + 0.4, color=CRIMSON, label="" if number else "target")
        axis.text(0.05, number, label, va="center")
    axis.set_yticks([])
    axis.set_xlabel("ours / reference (median, and every pair)")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "ADDRESS"), help="be the other end of a connection")
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    pairs = 5 if options.quick else 15
    ratios = {**measure_rows(pairs), **measure_bytes(pairs)}
    if options.plot:
        draw(options.plot, ratios)
    report("ps_operations", ratios, options.output)


if __name__ == "__main__":
    main()
