"""Compares the status of TrainingJobs with their pods once a second, while something else goes on."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from api_objects import get
from faults import is_live
from installation import RELEASE, SYSTEM

PATIENCE_SECONDS = 10.0
_ROLES = ("master", "ps", "worker")


class StatusWatch:
    """Observations of the jobs in one namespace.

    `contradictions` maps each contradiction that lasted longer than PATIENCE_SECONDS to its duration in seconds. Time
    without a leading operator does not count, since tests also kill the operator. `duplicates` has each role and index
    that two live pods had at once, `phases` each phase that a job had.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._since: dict[str, float] = {}
        self.contradictions: dict[str, float] = {}
        self.longest = 0.0
        self.without_operator = 0.0
        self.duplicates: set[str] = set()
        self.phases: set[str] = set()

    def look(self, seconds: float) -> None:
        """Looks once; `seconds` have passed since the last look."""
        if not self._operator_leads():
            self._since.clear()
            self.without_operator += seconds
            return
        jobs, pods = (get(kind, namespace=self._namespace) for kind in ("trainingjobs", "pods"))
        now, found = time.monotonic(), set[str]()
        for job in jobs:
            name = job["metadata"]["name"]
            self.phases.add((job.get("status") or {}).get("phase", ""))
            mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get("emberscale.io/job-name") == name]
            found |= {f"{name}: {text}" for text in contradictions(job.get("status") or {}, mine)}
            self.duplicates |= {f"{name}/{slot}" for slot in duplicates(mine)}
        self._since = {text: self._since.get(text, now) for text in found}
        for text, since in self._since.items():
            self.longest = max(self.longest, now - since)
            if now - since > PATIENCE_SECONDS:
                self.contradictions[text] = now - since

    def _operator_leads(self) -> bool:
        """Whether the holder of the lease is a running operator."""
        holder = get("lease", f"{RELEASE}-operator", SYSTEM)["spec"].get("holderIdentity")
        pods = get("pods", namespace=SYSTEM)
        return any(pod["metadata"]["name"] == holder and is_live(pod) and _ready(pod) for pod in pods)


def contradictions(status: Any, pods: list[Any]) -> Iterator[str]:
    """Yields the ways in which a status contradicts the pods of its job."""
    run = {pod["metadata"]["name"] for pod in pods if is_live(pod) and pod["status"].get("phase") == "Running"}
    said = {member["pod"] for member in status.get("members", ()) if member.get("state") == "Running"}
    yield from (f"{pod} is said to run, and does not" for pod in said - run)
    yield from (f"{pod} runs, and is not said to" for pod in run - said)
    for role in _ROLES:
        ready = sum(is_live(pod) and _ready(pod) and slot_of(pod).startswith(role) for pod in pods)
        claimed = (status.get(role) or {}).get("ready", 0)
        if claimed > ready:
            yield f"{claimed} {role} are said to be ready, and {ready} are"


def duplicates(pods: list[Any]) -> set[str]:
    """Returns each role and index that two live pods of one job share."""
    slots = Counter(slot_of(pod) for pod in pods if is_live(pod))
    return {slot for slot, count in slots.items() if count > 1}


def slot_of(pod: Any) -> str:
    """Returns role and index of a job's pod, such as `ps-1`."""
    labels = pod["metadata"]["labels"]
    return f"{labels['emberscale.io/role']}-{labels['emberscale.io/index']}"


@contextmanager
def watched_status(namespace: str) -> Iterator[StatusWatch]:
    """Looks once a second while the body runs."""
    watch, ended = StatusWatch(namespace), threading.Event()

    def keep_looking() -> None:
        last = time.monotonic()
        while not ended.wait(1.0):
            now = time.monotonic()
            try:
                watch.look(now - last)
            except (ApiException, HTTPError):
                continue
            finally:
                last = now

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join(30)


def _ready(pod: Any) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
