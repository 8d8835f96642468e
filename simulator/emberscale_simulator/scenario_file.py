"""Reads a Scenario from a YAML file, with errors that name the file, the line and the column."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from emberscale_api.errors import InvalidError, read_text
from emberscale_simulator.scenario import Scenario


def load_scenario(path: Path) -> Scenario:
    """Reads and checks a scenario. Raises InvalidError."""
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise InvalidError(f"{where}: is not valid YAML: {error.problem}") from error
    if root is None or not isinstance(document, dict):
        raise InvalidError(f"{path}:1:1: holds no scenario: expected a mapping with name, cluster, workload, ...")
    if "apiVersion" in document and "kind" in document:
        raise InvalidError(
            f"{path}:1:1: holds a {document['kind']} and no scenario; `emberscale run` runs a TrainingJob, and "
            "deploy/examples/scenarios has scenarios"
        )
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise InvalidError("\n".join(_problems(path, root, error))) from error


def _problems(path: Path, root: yaml.Node, error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        node, field = _locate(root, problem["loc"])
        where = f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        if problem["type"] == "extra_forbidden":
            text = "unknown field"
        elif problem["type"] == "missing":
            text = "is required"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = problem["input"]
            shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
            text = f"{message[0].lower()}{message[1:]}{shown}"
        lines.append(f"{where}: {field}: {text}")
    return lines


def _locate(root: yaml.Node, location: Sequence[int | str]) -> tuple[yaml.Node, str]:
    """Returns the node that a problem is about, or the closest enclosing one, and the field's path as written.

    A part of the location that is not in the file is the tag of a union or, as the last part, a missing field.
    """
    node, path = root, []
    for depth, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                if depth == len(location) - 1:
                    path.append(str(part))
                continue
            key, value = found
            path.append(str(part))
            node = value if isinstance(value, yaml.CollectionNode) and depth < len(location) - 1 else key
            if depth == len(location) - 1 and isinstance(value, yaml.ScalarNode):
                node = value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            path.append(str(part))
    return node, ".".join(path) or "scenario"
