"""The help of the command line."""

from collections.abc import Iterator

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from emberscale._cli import app


def helps(group: TyperGroup, name: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the help of every command in a group, and of the group."""
    yield name, group.help or ""
    for below, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from helps(command, f"{name} {below}")
        else:
            yield f"{name} {below}", command.help or ""


def all_helps() -> dict[str, str]:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    return dict(helps(root, "emberscale"))


@pytest.mark.parametrize("name", all_helps())
def test_a_paragraph_of_the_help_breaks_only_where_the_terminal_ends(name: str) -> None:
    paragraphs = all_helps()[name].strip().split("\n\n")
    assert all(paragraphs), "it has no help"
    assert [paragraph for paragraph in paragraphs if "\n" in paragraph] == []


@pytest.mark.parametrize("name", all_helps())
def test_a_terminal_of_80_columns_shows_the_whole_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*name.split()[1:], "--help"]).stdout
    assert "Usage: " in shown
    assert "…" not in shown
