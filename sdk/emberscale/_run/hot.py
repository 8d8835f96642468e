"""A run's report on rounds of batches: from its master while it is under way, from its summary afterwards."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc

from emberscale._run.master import open_master, status_of
from emberscale._run.record import RunPaths
from emberscale._run.scaling import folder_under_way
from emberscale_api.errors import InvalidError
from emberscale_api.job.rounds import decisions_in_words
from emberscale_api.job.running import JobStatus
from emberscale_api.readable import bytes_text
from emberscale_api.rpc.master_pb2_grpc import MasterStub

_CALL_SECONDS = 5.0


def hot_document(status: JobStatus) -> dict[str, Any]:
    """Returns rounds in plain types: the `decision` in words, that of each of the `workers`, and the measurements.

    `hit_ratio` is the share of the rows of batches in rounds that an earlier batch of the round had pulled;
    `bytes_ratio` is the bytes of rounds relative to those of their batches one by one, None without rounds.
    """
    traffic, decisions = status.traffic, status.rounds
    if not decisions:
        return {}
    return {
        "decision": decisions_in_words(tuple(decisions.values())),
        "workers": {worker: asdict(decision) for worker, decision in decisions.items()},
        "round_batches": traffic.round_batches,
        "single_batches": traffic.single_batches,
        "hit_ratio": traffic.hit_ratio,
        "bytes_ratio": traffic.round_bytes / traffic.single_bytes if traffic.single_bytes else None,
        "saved_bytes": traffic.saved_bytes,
    }


def hot_in_words(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the lines of a `hot_document`: the decision, and the measurements."""
    if not document:
        return ()
    in_rounds, saved = document["round_batches"], document["saved_bytes"]
    if not in_rounds:
        return (document["decision"],)
    of = f"{in_rounds:,} of {in_rounds + document['single_batches']:,} batches"
    amount = f"{bytes_text(abs(saved))} {'saved' if saved >= 0 else 'more than one by one'}"
    measured = f"{of} in rounds, {document['hit_ratio']:.0%} of their rows were there already, {amount}"
    return document["decision"], measured


def hot_of_run(root: Path) -> Mapping[str, Any]:
    """Returns the `hot_document` of the run in this folder; empty if it disables hot embeddings or has none yet."""
    try:
        with open_master(root, folder_under_way(root)) as channel:
            return hot_document(status_of(MasterStub(channel), _CALL_SECONDS))
    except (InvalidError, grpc.RpcError):  # the run has ended, or is about to
        return _of_summary(RunPaths(root).summary)


def _of_summary(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8")).get("hot_embeddings")
    except (OSError, ValueError, AttributeError):
        return {}
    return document if isinstance(document, dict) else {}
