"""Draws the state diagrams of docs/architecture.md from the tables in the code.

    .venv/bin/python deploy/site/state_diagrams.py

It writes what is between `<!-- states: NAME -->` and `<!-- end of states -->`; `make test` fails where that is not what
the tables say.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from emberscale_jobmaster.transitions import CHECKPOINTING, JOB, MOVE, REBUILD, RELOAD, RESTORE, Transition

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

_TABLES = {
    "job": JOB,
    "restore": RESTORE,
    "reload": RELOAD,
    "checkpoint": CHECKPOINTING,
    "move": MOVE,
    "rebuild": REBUILD,
}
_DIAGRAM = re.compile(r"(<!-- states: (?P<name>\w+) -->\n).*?(<!-- end of states -->)", re.DOTALL)


def diagram(table: Sequence[Transition]) -> str:
    """A table as a Mermaid state diagram."""
    lines = [
        f"    {step.before or '[*]'} --> {step.after or '[*]'}" + (f": {step.why}" if step.why else "")
        for step in table
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def drawn(page: str) -> str:
    """A page with its diagrams as the tables say. Raises KeyError for a diagram that has no table."""
    return _DIAGRAM.sub(lambda found: f"{found[1]}{diagram(_TABLES[found['name']])}\n{found[3]}", page)


def main() -> int:
    """Writes the page anew."""
    PAGE.write_text(drawn(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
