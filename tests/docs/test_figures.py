"""Pictures read on a light and on a dark page."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "docs" / "figures.py"


@pytest.fixture(scope="module")
def figures():
    """The module of the chapters, which sits beside them and in no package path."""
    spec = importlib.util.spec_from_file_location("course_figures", FIGURES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def picture(figures):
    series = {f"line {index}": ([1, 2, 4], [index + 1, 2, 3]) for index in range(5)}
    return figures.lines(series, 'five "lines" & a < b', xlabel="x", ylabel="y", log="xy")


def test_data_colours_keep_their_contrast_on_both_pages(figures):
    for colour in figures.PALETTE:
        for page in (figures.LIGHT_PAGE, figures.DARK_PAGE):
            # 3 is what the Web Content Accessibility Guidelines ask of graphics (1.4.11).
            assert figures.contrast(colour, page) >= 3, (colour, page)


def test_contrast_is_that_of_the_guidelines(figures):
    assert figures.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert figures.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_text_and_axes_take_the_pages_colour(figures, picture):
    assert figures.INK not in picture.svg and "currentColor" in picture.svg
    known = {colour.lower() for colour in figures.PALETTE}
    fixed = {word[:7] for part in picture.svg.split("fill: ")[1:] for word in [part[:7]]}
    fixed |= {part[:7] for part in picture.svg.split("stroke: ")[1:]}
    assert {colour for colour in fixed if colour.startswith("#")} <= known


def test_a_picture_says_what_it_shows(picture):
    assert 'aria-label="five &quot;lines&quot; &amp; a &lt; b"' in picture.svg
    assert 'width="100%"' in picture._repr_html_()


def test_a_picture_is_the_same_every_time(figures):
    def draw():
        return figures.byte_layout({"row": [("codes", 512), ("scale", 4)]}, "a row").svg

    assert draw() == draw()


def test_png_takes_either_page(figures, tmp_path):
    for page in (figures.LIGHT_PAGE, figures.DARK_PAGE):
        path = tmp_path / f"{page[1:]}.png"
        figures.byte_layout({"row": [("codes", 512)]}, "a row").save(path, page)
        assert path.stat().st_size > 1000
