"""What the written pages point at exists: tests, files, names in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = PAGES + sorted(DOCS.glob("[0-9][0-9]_*.py"))


def functions_of(path: Path) -> set[str]:
    """Names of all functions in a file, methods of state machines included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: path.name)
def test_every_test_that_a_page_names_exists(page):
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or test in functions_of(ROOT / path), f"{path}::{test}"


def test_troubleshooting_names_a_test_for_most_symptoms():
    entries = (DOCS / "troubleshooting.md").read_text().split("\n- **")[1:]
    assert len(entries) > 25
    assert sum("`tests/" in entry for entry in entries) >= len(entries) - 1
    assert sum("](https://github.com/" in entry for entry in entries) >= len(entries) - 1


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_names_in_the_table_of_symbols_are_the_codes():
    words = set()
    for path in ROOT.glob("stage[0-9]_*/**/*.py"):
        words.update(re.findall(r"\w+", path.read_text()))
    table = (DOCS / "symbols.md").read_text()
    for section in table.split("\n## ")[1:]:
        header, *rows = [line for line in section.splitlines() if line.startswith("|")]
        column = [cell.strip() for cell in header.split("|")].index("here")
        for row in rows[1:]:
            for name in re.findall(r"`([\w.]+)`", row.split("|")[column]):
                assert set(name.split(".")) <= words, f"{name} is in no stage"
