"""Bounds the size of a manifest: it is copied into a ConfigMap, and its sections on pods into each pod.

A TrainingJob may have 1.5 MiB, a ConfigMap 1 MiB. Filled-in defaults and the copies in each pod add to what a person
wrote. So a job that would be refused later, piece by piece, is refused at once, naming the field.
"""

import json
from collections.abc import Mapping
from typing import Any

from emberscale_api.job import TrainingJobSpec
from emberscale_api.readable import bytes_text

MOST_MANIFEST_BYTES = 768 << 10
MOST_TEMPLATE_BYTES = 96 << 10
"""The limit of one role: an environment variable may have 128 KiB, and all annotations together 256 KiB."""


def too_large(spec: TrainingJobSpec, text: str) -> str | None:
    """Returns which field makes a job too large, in words; None of one that can run.

    `text` is the manifest that its processes read, with all defaults and without templates of pods.
    """
    for role, part in spec.roles.items():
        template = part.template.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        size = _size(template)
        if size > MOST_TEMPLATE_BYTES:
            path = _largest(template, f"spec.{role}.template")
            return (
                f"{path}: is too large: the pod template has {bytes_text(size)} and may have "
                f"{bytes_text(MOST_TEMPLATE_BYTES)}; shorten this field, its largest"
            )
    size = len(text.encode())
    if size <= MOST_MANIFEST_BYTES:
        return None
    path = _largest(json.loads(text)["spec"], "spec")
    return (
        f"{path}: is too large: the manifest has {bytes_text(size)} and may have "
        f"{bytes_text(MOST_MANIFEST_BYTES)}; shorten this field, its largest"
    )


def _largest(part: Any, path: str) -> str:
    """Returns the path of the smallest part that makes up most of this one."""
    while isinstance(part, Mapping | list) and part:
        children = part.items() if isinstance(part, Mapping) else enumerate(part)
        key, child = max(children, key=lambda item: _size(item[1]))
        if 2 * _size(child) <= _size(part):
            break
        part, path = child, f"{path}.{key}"
    return path


def _size(part: Any) -> int:
    return len(json.dumps(part).encode())
