"""Tries everything that a job's pods and the `edit` role can read; a pod runs this file as text.

The argument is a JSON document: `redis` URLs and `tokens` that were found, `brain`, the uids `victim` and `own`, and
`masters`, addresses by owner. The result goes to the termination message, of which Kubernetes keeps 4 KiB.
"""

import json
import sys
from typing import Any

import grpc

from emberscale_api.rpc import brain_pb2, brain_pb2_grpc, master_pb2, master_pb2_grpc
from emberscale_api.rpc.token import open_channel
from redis_attacker import outcomes, refused

_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")


def answer(call: Any, request: Any) -> str:
    try:
        call(request, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def tried(given: dict[str, Any]) -> dict[str, dict[str, str]]:
    said: dict[str, dict[str, str]] = {}
    for number, url in enumerate(given["redis"]):
        said[f"redis {number}"] = outcomes(url, given["victim"], given["own"])
    for number, token in enumerate(given["tokens"]):
        with open_channel(given["brain"], token) as channel:
            brain = brain_pb2_grpc.BrainStub(channel)
            for whose in ("victim", "own"):
                uid = given[whose]
                said[f"brain {number} {whose}"] = {
                    "plan": answer(brain.GetPlan, brain_pb2.GetPlanRequest(job_uid=uid)),
                    "end": answer(brain.ReportOutcome, brain_pb2.ReportOutcomeRequest(job_uid=uid, phase="Running")),
                    "explain": answer(brain.ExplainPlan, brain_pb2.ExplainPlanRequest(job_uid=uid)),
                }
        for whose, address in given["masters"].items():
            with open_channel(address, token) as channel:
                master = master_pb2_grpc.MasterStub(channel)
                said[f"master {number} {whose}"] = {
                    "status": answer(master.GetStatus, master_pb2.GetStatusRequest()),
                }
    return said


def judged(given: dict[str, Any]) -> dict[str, Any]:
    """`tried` counts attempts, `open` names those not refused, and `own` those that reached the holder's own job."""
    tally: dict[str, Any] = {"tried": 0, "open": [], "own": []}
    for what, attempts in tried(given).items():
        for attempt, outcome in attempts.items():
            if what.endswith(" own"):
                tally["own"] += [f"{what}: {attempt}"] if outcome == "OK" else []
                continue
            tally["tried"] += 1
            if not (refused(outcome) if what.startswith("redis") else outcome in _REFUSALS):
                tally["open"].append(f"{what}: {attempt}: {outcome[:100]}")
    return tally


if __name__ == "__main__":
    with open("/dev/termination-log", "w") as log:
        json.dump(judged(json.loads(sys.argv[1])), log)
