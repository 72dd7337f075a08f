"""Every chapter runs from top to bottom, and its notebook says what its script says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A machine that only runs kernels need not have these; `make test` installs them.
jupytext = pytest.importorskip("jupytext", reason="jupytext comes with the extra test")
nbformat = pytest.importorskip("nbformat", reason="nbformat comes with jupytext")
yaml = pytest.importorskip("yaml", reason="yaml comes with jupytext")

DOCS = Path(__file__).parents[2] / "docs"
CHAPTERS = sorted(DOCS.glob("[0-9][0-9]_*.py"))
SECONDS = 30
"""Of processor time for one chapter on a machine like CI's (two cores)."""


def test_every_chapter_is_there():
    assert [path.name[:2] for path in CHAPTERS] == "00 10 20 30 40 50 60 70".split()
    assert {path.stem for path in CHAPTERS} == {path.stem for path in DOCS.glob("*.ipynb")}


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs_and_its_assertions_hold(chapter, tmp_path):
    """Run as a script: the cells in order, in a fresh process, as a reader would from docs/."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)  # a chapter chooses for itself
    started = os.times()
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", chapter.name],
        cwd=DOCS,
        env=environment | {"PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    ended = os.times()
    used = ended.children_user - started.children_user
    used += ended.children_system - started.children_system
    assert used < SECONDS, f"{chapter.name} took {used:.0f} s of processor time"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_script_and_notebook_are_in_step(chapter):
    """`make notebooks` writes the notebook anew; the hook in .pre-commit-config.yaml does too."""
    notebook = nbformat.read(chapter.with_suffix(".ipynb"), as_version=4)
    script = jupytext.read(chapter)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_notebooks_carry_no_output(chapter):
    notebook = nbformat.read(chapter.with_suffix(".ipynb"), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)
    assert chapter.with_suffix(".ipynb").stat().st_size < 60_000


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_asserts_what_it_says(chapter):
    cells = [cell.source for cell in jupytext.read(chapter).cells if cell.cell_type == "code"]
    asserting = [source for source in cells if "assert" in source]
    assert len(asserting) >= 3
    assert not any(line.startswith("class ") for source in cells for line in source.splitlines())


def test_the_hook_that_keeps_them_in_step_sees_chapters_and_nothing_else():
    config = yaml.safe_load((DOCS.parent / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert "jupytext --sync" in hooks["jupytext"]["entry"]
    paths = [str(path.relative_to(DOCS.parent)) for path in DOCS.rglob("*") if path.is_file()]
    seen = {path for path in paths if re.search(hooks["jupytext"]["files"], path)}
    expected = {f"docs/{path.stem}{kind}" for path in CHAPTERS for kind in (".py", ".ipynb")}
    assert seen == expected
