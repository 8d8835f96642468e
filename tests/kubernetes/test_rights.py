"""Compares the operator's rights with its requests, as recorded by the API servers of all parts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import AUDIT_LOG, kubectl, setting
from installation import SYSTEM

pytestmark = [pytest.mark.timeout(120), pytest.mark.after_all]

OPERATOR_ACCOUNT = f"system:serviceaccount:{SYSTEM}:emberscale-operator"
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def granted() -> set[Right]:
    documents = [json.loads(kubectl("get", "clusterrole", "emberscale-operator", "-o", "json"))]
    documents += json.loads(kubectl("get", "roles", "-n", SYSTEM, "-o", "json"))["items"]
    return {
        (group, resource, verb)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def seen() -> Iterator[tuple[Right, int]]:
    """Yields each right that the operator used, and the status of the response."""
    logs = [Path(path).read_text() for path in setting(AUDIT_LOG).split(os.pathsep)]
    for line in (line for log in logs for line in log.splitlines(keepends=True) if line.endswith("\n")):
        entry: dict[str, Any] = json.loads(line)
        reference = entry.get("objectRef")
        if entry["user"]["username"] != OPERATOR_ACCOUNT or not reference or "resource" not in reference:
            continue
        resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
        status = (entry.get("responseStatus") or {}).get("code", 0)
        yield (reference.get("apiGroup", ""), resource, entry["verb"]), status


def test_the_operator_has_exactly_the_rights_that_it_uses(installed: str) -> None:
    """Only meaningful after all other parts, which together make the operator do everything that it does."""
    if not setting(AUDIT_LOG):
        pytest.skip(f"NOT RUN: {AUDIT_LOG} is not set: nobody saw what the operator asked for")
    everything = list(seen())
    used = {right for right, _ in everything}
    rights = granted()
    assert not [right for right in rights if "*" in right]
    assert rights - used == set(), "granted and never used"
    assert {right for right, status in everything if status == 403 and right not in rights} == set(), "wanted in vain"
