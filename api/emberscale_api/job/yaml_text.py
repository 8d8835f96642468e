"""Text in YAML.

Only who reads some imports it: the processes of a job read its manifest in JSON, and need no parser of YAML.
"""

from pathlib import Path
from typing import Any

import yaml

from emberscale_api.errors import InvalidError, read_text


class _Loader(yaml.SafeLoader):
    """Refuses keys that are not scalars, and duplicate keys: YAML would silently drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "a field's name is a brace or bracket: render the template first, and quote text",
                    key_node.start_mark,
                )
            key = key_node.value
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} appears twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Returns the document in a file. Raises InvalidError, which names the file and the line."""
    try:
        return yaml.load(read_text(path), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise InvalidError(f"{where}: is not valid YAML: {_yaml_problem(error)}") from error


def parse_yaml(text: str) -> Any:
    """Returns a value. Raises InvalidError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidError("is not valid YAML") from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    return " ".join(part for part in (context, problem) if part) or str(error)
