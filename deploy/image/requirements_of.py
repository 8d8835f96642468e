"""Prints what the package needs with some of its extras, a requirement a line: `requirements_of.py operator,brain`.

pip knows the extras of a package only once the package is there; this file lets an image's layer of libraries change
with pyproject.toml alone.
"""

import re
import sys
import tomllib

_OF_THE_PACKAGE = re.compile(r"emberscale\[([\w,-]+)\]")


def requirements_of(extras: list[str], optional: dict[str, list[str]]) -> list[str]:
    """Requirements of extras, in order, those of the extras that they include in their place."""
    found = []
    for extra in extras:
        if extra not in optional:
            sys.exit(f"EXTRAS names {extra!r}; there are {', '.join(sorted(optional))}")
        for requirement in optional[extra]:
            included = _OF_THE_PACKAGE.fullmatch(requirement)
            found += requirements_of(included[1].split(","), optional) if included else [requirement]
    return found


if __name__ == "__main__":
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    chosen = requirements_of(sys.argv[1].split(","), project["optional-dependencies"])
    print(*dict.fromkeys([*project["dependencies"], *chosen]), sep="\n")  # noqa: T201 -- its output is its purpose
