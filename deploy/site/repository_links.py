"""A mkdocs hook: links from a page to files of the repository outside `docs/` become their paths.

The site has no copy of these files. A link to a file that is missing fails the build.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the page's text with such links replaced. Raises PluginError for a file that is missing."""
    docs = Path(config["docs_dir"]).resolve()

    def path_of(link: re.Match[str]) -> str:
        file = (docs / page.file.src_uri).parent.joinpath(link["target"]).resolve()
        if file.is_relative_to(docs):
            return link[0]
        if not file.exists():
            raise PluginError(f"{page.file.src_uri}: {link['target']} is missing")
        path = f"`{file.relative_to(docs.parent)}`"
        return path if link["text"].strip("`") in path else f"{link['text']} ({path})"

    return _LINK.sub(path_of, markdown)
