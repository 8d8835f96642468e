"""The blocks of code in README.md, CONTRIBUTING.md and docs/.

    .venv/bin/python tests/support/documented_code.py FOLDER

It writes each Python block to a file in FOLDER, on the lines that the block has in its page, so that a type checker's
message names the line to change. `make lint` checks these files like all others.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code; `line` is that of its first line, from 1."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> Iterator[Block]:
    """Yields all blocks of a language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            if found["language"] == language:
                yield Block(page, text.count("\n", 0, found.start("text")) + 1, found["text"])


def main() -> int:
    """Writes the Python blocks to a folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for block in blocks("python"):
        name = re.sub(r"\W", "_", f"{block.page.relative_to(ROOT).with_suffix('')}_line_{block.line}")
        (folder / f"{name}.py").write_text("\n" * (block.line - 1) + block.text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
