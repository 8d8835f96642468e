"""What TLS costs: the same job, and the same frames, over TCP on loopback with certificates and without.

* Training: whole runs of a DLRM with 2 PS and 2 workers of one core each, on two cores. On one machine the data plane
  uses Unix sockets, which stay plain, so these runs are given TCP.
  All encryption and decryption then takes the time of the cores that train.
* Bytes: 1 MiB there and a short answer back, to a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emberscale_api.certificates import read_certificates
from emberscale_api.environment import TLS_FOLDER
from emberscale_api.readable import bytes_text, rate_text
from emberscale_api.wire import Header, Status
from emberscale_operator.kubernetes.certificate import self_signed
from emberscale_trainer.transport import accept_connection, listen, open_connection
from over_tcp import OVER_TCP
from ps_operations import MESSAGE, MESSAGES, exchange, seconds
from reporting import Ratio, arguments, report, say
from whole_run import manifest, run, synthesise

BATCH = 2048
SECONDS = 5.0


def write_certificates(folder: Path) -> Path:
    """Writes certificates as the operator mounts them; returns the folder."""
    folder.mkdir()
    pair = self_signed()
    for name, content in (("ca.crt", pair.certificate), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (folder / name).write_bytes(content)
    return folder


def samples_per_second(job: Mapping[str, Any], tls: Path | None) -> float:
    """Returns the rate of one whole run."""
    variables = {**os.environ, TLS_FOLDER: str(tls or "")}
    return float(run(job, OVER_TCP, variables)["samples_per_second"])


def measure_training(folder: Path, tls: Path, samples: int, pairs: int) -> Ratio:
    """Measures pairs of samples/s with TLS and without."""
    synthesise(folder / "data", samples, "--evaluation-fraction", "0")
    limits = {"limits": {"cpu": 1}}
    spec: dict[str, Any] = {
        "data": {"train": [str(folder / "data" / "train-*.tsv")]},
        "model": {"embeddings": {"dimension": 16}, "bottomMlp": [64, 32], "topMlp": [64, 32]},
        "training": {"batchSize": BATCH, "stalenessWarmup": 0},
        "sharding": {"heartbeatInterval": "200ms"},
        "ps": {"replicas": 2, "resources": limits},
        "worker": {"replicas": 2, "resources": limits},
    }
    job = manifest("encryption", spec)
    measured = []
    for pair in range(pairs):
        order = (tls, None) if pair % 2 else (None, tls)
        rates = {given: samples_per_second(job, given) for given in order}
        measured.append((rates[tls], rates[None]))
        say(f"pair {pair}: {rate_text(rates[tls])} with TLS, {rate_text(rates[None])} without")
    return Ratio(measured, 0.8, "min")


def answer(tls: str) -> None:
    """Runs the server: prints its address, and answers every frame of one connection."""
    listener, address = listen("tcp://127.0.0.1:0")
    context = read_certificates(Path(tls)).server_context if tls else None
    print(address, flush=True)
    connection = accept_connection(listener.accept()[0], context)
    connection.trust()
    while True:
        connection.receive()
        connection.send(Header(Status.OK))


def sender(address: str, tls: Path | None) -> Callable[[], None]:
    """Connects; returns a function that sends MESSAGES messages."""
    context = read_certificates(tls).client_context if tls is not None else None
    return exchange(open_connection(address, context, SECONDS))


def measure_bytes(tls: Path, pairs: int) -> Ratio:
    """Measures pairs of bytes/s with TLS and without."""
    servers, runs = [], []
    try:
        for given in (tls, None):
            command = [sys.executable, __file__, "--answer", str(given or "")]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            servers.append(server)
            assert server.stdout is not None
            runs.append(sender(server.stdout.readline().strip(), given))
            runs[-1]()
        measured = [
            (MESSAGES * MESSAGE / seconds(runs[0]), MESSAGES * MESSAGE / seconds(runs[1])) for _ in range(pairs)
        ]
    finally:
        for server in servers:
            server.kill()
            server.wait()
    for label, rates in zip(("with TLS", "without"), zip(*measured, strict=True), strict=True):
        say(f"{label:10} {bytes_text(float(np.median(rates))):>8}/s at 1 MiB")
    return Ratio(measured, 0.2, "min")


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__, plot=False)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--answer", metavar="FOLDER", help="be the other end of a connection")
    options = parser.parse_args()
    if options.answer is not None:
        answer(options.answer)
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        tls = write_certificates(folder / "tls")
        ratios = {
            "bytes/s at 1 MiB, with TLS / without": measure_bytes(tls, options.pairs),
            "samples/s, with TLS / without": measure_training(
                folder, tls, 150_000 if options.quick else 400_000, options.pairs
            ),
        }
    report("encryption", ratios, options.output)


if __name__ == "__main__":
    main()
