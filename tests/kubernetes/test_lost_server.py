"""A parameter server's pod dies and the job does not roll back: parity rebuilds its rows, or batches are forgotten."""

import json
import subprocess
from functools import partial
from typing import Any

import pytest

from cluster import (
    COMMAND,
    ENDLESS,
    EVALUATION_RECORDS,
    Job,
    Place,
    assert_exact,
    assert_exact_so_far,
    audit,
    eventually,
    manifest,
    most_pods,
    submit,
)
from faults import ProcessKiller

pytestmark = pytest.mark.timeout(1500)

LAGGING = {"strategy": "ErasureCoding", "parity": 1, "durability": "Async"}
"""The jobs of test_node_loss.py keep parity that does not lag."""
INCREMENTS = {"interval": "4s", "incremental": "Consecutive", "quantization": 8, "keep": 100}


def protected(job: Job) -> bool | None:
    return ((condition := job.condition("Protected")) is not None and condition["status"] == "True") or None


def reasons(job: Job) -> list[str]:
    return [event["reason"] for event in job.events()]


def newest(job: Job) -> str:
    """Returns the id of the job's newest checkpoint; empty if there is none."""
    return str((job.status().get("progress") or {}).get("checkpoint", ""))


def rested(job: Job, place: Place) -> Any:
    """Suspends a job that has trained on, and returns its progress; the job must be exact and never rolled back."""
    job.wait_for_samples(job.samples() + 1)
    assert_exact_so_far(job, place)
    progress = job.status()["progress"]
    assert progress.get("recoveries", 0) == 0
    return progress


def test_a_drill_shows_that_a_server_is_rebuilt_from_parity(place: Place) -> None:
    document = manifest("coded", place, epochs=ENDLESS, faultTolerance=LAGGING)
    document["spec"]["ps"]["replicas"] = 3
    document["spec"]["checkpoint"]["interval"] = "1h"
    job = submit(document, place)
    job.until("all rows are protected", lambda _: protected(job), seconds=300)
    job.wait_for_samples(2_000)
    told = rehearsed_loss(job)
    assert told["passed"]
    assert told["rebuilt"]
    assert told["rebuild_bytes"] > 0
    assert not told["rolled_back"]
    assert {"Degraded", "Recovered"} <= set(reasons(job))
    job.until("all rows are protected again", lambda _: protected(job), seconds=300)
    eventually(lambda: names_sharers(job), "the condition names servers that share a node", seconds=180)
    rested(job, place)


def test_other_servers_adopt_the_rows_of_one_that_has_no_place(place: Place, killer: ProcessKiller) -> None:
    document = manifest("placeless", place, epochs=ENDLESS, faultTolerance={"strategy": "ErasureCoding", "parity": 1})
    document["spec"]["ps"]["replicas"] = 3
    document["spec"]["checkpoint"]["interval"] = "1h"
    job = submit(document, place)
    job.until("all rows are protected", lambda _: protected(job), seconds=300)
    job.wait_for_samples(2_000)
    with most_pods(place, 1):
        killer.kill(job.member("ps", 1))
        job.until("others have its rows", lambda _: told(job, "rows of ps-1 are on ps-0 and ps-2"), seconds=300)
        job.wait_for_samples(job.samples() + 1)
        assert len(job.running("ps")) == 2
        job.until("two servers protect each other", lambda _: protected(job), seconds=300)
    job.until("its successor has a share", lambda _: told(job, "rows are on 3 parameter servers"), seconds=300)
    rested(job, place)


def told(job: Job, message: str) -> bool | None:
    """Whether an Event of the job says this."""
    return any(message in event["message"] for event in job.events()) or None


def rehearsed_loss(job: Job) -> dict[str, Any]:
    """Returns the report of a drill that lost a server: one of so few rows may give them away before it ends."""
    for _ in range(6):
        job.until("all rows are protected", lambda _: protected(job), seconds=300)
        told = drill(job, "ps-1")
        if not told["moved_away"]:
            return told
    raise AssertionError("each of six drills found its server without rows before it ended")


def drill(job: Job, server: str) -> dict[str, Any]:
    """Runs a drill, and returns its report."""
    options = ("--before", "5", "--timeout", "300", "--output", "json", "--namespace", job.namespace)
    command = [str(COMMAND), "drill", job.name, "--kill", server, *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900)
    assert ended.stdout, f"exit code {ended.returncode}"
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def names_sharers(job: Job) -> bool | None:
    """Whether the condition names shared nodes, as it must exactly if three servers run on fewer than three nodes."""
    condition, nodes = job.condition("Protected"), {pod["spec"]["nodeName"] for pod in job.running("ps")}
    assert condition is not None
    return (condition["reason"] == "SharedNodes") is (len(nodes) < 3) or None


def test_a_server_goes_back_alone_to_an_increment_from_which_another_job_starts(
    place: Place, killer: ProcessKiller
) -> None:
    partial = {"strategy": "PartialRecovery", "targetPLS": 1.0, "priority": "SSU"}
    document = manifest("partial", place, epochs=ENDLESS, faultTolerance=partial)
    document["spec"]["ps"]["replicas"] = 2
    document["spec"]["checkpoint"] |= INCREMENTS
    job = submit(document, place)
    job.wait_for_samples(1)
    job.until("a checkpoint of all rows", lambda _: newest(job), seconds=300)
    first = int(newest(job))
    # the next checkpoint may have begun before there were samples
    job.until("an increment that has samples", lambda _: int(newest(job)) > first + 1 or None, seconds=240)
    increment = newest(job)
    lose_batches(job, killer)
    assert 0 < rested(job, place)["pls"] <= 1
    assert audit(job, place)["forgotten"] > 0
    start_from(job, increment, place)


def lose_batches(job: Job, killer: ProcessKiller) -> None:
    """Kills a server until batches are forgotten; a death right after a checkpoint forgets none."""
    for kills in range(1, 4):
        killer.kill(job.member("ps", 0))
        job.until("its rows are back", partial(has_gone_back, job, kills), seconds=300)
        if job.status()["progress"].get("pls", 0):
            return


def has_gone_back(job: Job, times: int, status: Any) -> bool:
    """Whether Events report at least this many partial recoveries."""
    counts = [event.get("count") or 1 for event in job.events() if event["reason"] == "RecoveredPartially"]
    return sum(counts) >= times


def start_from(job: Job, checkpoint: str, place: Place) -> None:
    """Starts another job from the suspended job's checkpoint, with another number of servers and other data."""
    origins = job.read()["spec"]
    document = manifest("warm", place, model=origins["model"], data={"train": ["/shared/criteo/evaluation.tsv"]})
    uri = origins["checkpoint"]["uri"]
    document["spec"]["checkpoint"] |= {"interval": "1h", "initialFrom": {"uri": uri, "id": checkpoint}}
    warm = submit(document, place)
    warm.wait_complete()
    assert_exact(warm, place, EVALUATION_RECORDS)
    origin = audit(warm, place)["origin"]
    assert (origin["checkpoint"], origin["job"], origin["continuation"]) == (f"{uri}/{checkpoint}", job.name, "Fresh")
    assert 0 < origin["samples"] < job.samples()
    assert any(checkpoint in event["message"] for event in warm.events())
