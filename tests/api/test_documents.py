"""Links in documents outside the documentation site, and the code that these name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import emberscale

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)\)")
_NAME = re.compile(r"`(\w+)`")


def links() -> Iterator[tuple[str, str, str]]:
    for document in DOCUMENTS:
        for link in _LINK.finditer((ROOT / document).read_text()):
            if "://" not in link["target"]:
                yield document, link["text"], link["target"]


@pytest.mark.parametrize(("document", "text", "target"), list(links()))
def test_a_link_leads_to_a_file_that_defines_what_it_names(document: str, text: str, target: str) -> None:
    file = ROOT / target
    assert file.exists(), f"{document} links to {target}"
    name = _NAME.fullmatch(text)
    if name is not None and file.suffix == ".py":
        assert re.search(rf"^\s*(?:async )?(?:def|class) {name[1]}\b", file.read_text(), re.MULTILINE), (
            f"{document}: {target} does not define {name[1]}"
        )


def test_each_tour_has_at_most_ten_stops_and_each_stop_is_a_link_to_a_name() -> None:
    _, _, text = (ROOT / "CONTRIBUTING.md").read_text().partition("## A tour\n")
    tours = re.split(r"^Follow one ", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    stops = {tour.split()[0].strip(":,"): re.findall(r"^\d+\. (.*)", tour, re.MULTILINE) for tour in tours}
    assert list(stops) == ["batch", "TrainingJob", "profile"]
    for tour, found in stops.items():
        assert 1 < len(found) <= 10, tour
        assert [stop for stop in found if not re.match(r"\[`\w+`\]\([\w/]+\.py\)", stop)] == [], tour


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in emberscale.__all__ if not re.search(rf"\bemberscale\.{name}\b", page)] == []


def test_the_navigation_of_the_site_has_every_page() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == pages
