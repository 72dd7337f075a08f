"""Pictures of the course, drawn by code in colours that read on white and on black.

Everything that is not data (text, axes, grid) is drawn in `INK`, which the finished SVG gives to
the page: ``currentColor`` is dark on a light page and light on a dark one. Data colours keep a
contrast of 3 to 1 against both (`tests/docs/test_figures.py`). Nothing is computed here but
positions: numbers come from the stages, or from recorded results.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#7b7b7c"
"""Stands for the page's text colour until the SVG is written."""

BLUE, ORANGE, GREEN, PURPLE, RED = "#3b82c4", "#c7711f", "#2f9467", "#9a63c2", "#d4555b"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED)
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#131416"

WIDTH = 5.6
"""Inches. Scaled to a phone's 340 pixels, text of 10 points is still 8 pixels high."""

STYLE: Any = {
    "font.size": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "snapmla",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.constrained_layout.use": True,
}

matplotlib.rcParams.update(STYLE)  # also what is drawn in a chapter itself


class Picture:
    """A finished drawing: shows itself in a notebook, and writes itself to a file.

    Parameters
    ----------
    figure
        What was drawn. It is rendered at once.
    description
        What the picture shows, for readers who cannot see it.
    """

    def __init__(self, figure: Figure, description: str) -> None:
        self.description = description
        self._figure = figure
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
        # matplotlib paints text and markers black where it names no colour.
        label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        opening = f'<svg role="img" aria-label="{label}" fill="currentColor" '
        self.svg = re.sub(r"<svg ", opening, svg, count=1)

    def _repr_html_(self) -> str:
        style = f"max-width: {96 * WIDTH:.0f}px; margin: 1rem auto"
        sized = re.sub(r' height="[^"]*pt"', "", self.svg, count=1)
        sized = re.sub(r' width="[^"]*pt"', ' width="100%"', sized, count=1)
        return f'<figure style="{style}">{sized}</figure>'

    def save(self, path: str | Path, page: str = LIGHT_PAGE) -> None:
        """Write a PNG on a page's background, or the SVG as it is."""
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.svg)
            return
        ink = "#202124" if page == LIGHT_PAGE else "#d0d2d6"
        for artist in self._figure.findobj():
            for name in ("color", "edgecolor", "facecolor"):
                getter, setter = f"get_{name}", f"set_{name}"
                if hasattr(artist, getter) and hasattr(artist, setter):
                    value = getattr(artist, getter)()
                    if _is_ink(value):
                        getattr(artist, setter)(ink)
        self._figure.savefig(path, dpi=110, facecolor=page)


def _is_ink(value: Any) -> bool:
    try:
        return matplotlib.colors.to_hex(value) == INK
    except (ValueError, TypeError):
        return False


def _canvas(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _bare(panel: Axes) -> None:
    """Take away axes and grid: the panel is a drawing, not a graph."""
    panel.set_axis_off()
    panel.grid(False)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    description: str,
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    height: float = 3.0,
) -> Picture:
    """Plot one line a name; `log` names the logarithmic axes, "x", "y" or "xy"."""
    figure, panel = _canvas(height)
    for (name, (x, y)), colour in zip(series.items(), PALETTE, strict=False):
        panel.plot(x, y, color=colour, label=name, linewidth=2, marker="o", markersize=3)
    if "x" in log:
        panel.set_xscale("log", base=2)
    if "y" in log:
        panel.set_yscale("log")
    panel.set_xlabel(xlabel)
    panel.set_ylabel(ylabel)
    figure.legend(loc="outside upper center", fontsize=9, ncols=2)
    return Picture(figure, description)


def byte_layout(rows: Mapping[str, Sequence[tuple[str, int]]], description: str) -> Picture:
    """Draw each cache row as a bar of its fields: (name, bytes) in order."""
    figure, panel = _canvas(0.75 * len(rows) + 0.5)
    _bare(panel)
    widest = max(sum(size for _, size in fields) for fields in rows.values())
    for place, (name, fields) in enumerate(rows.items()):
        start = 0
        for (field, size), colour in zip(fields, (BLUE, PURPLE, ORANGE), strict=False):
            panel.barh(-place, size, left=start, height=0.42, color=colour)
            if size > widest / 5:
                text = f"{field}: {size:,}"
                panel.text(start + size / 2, -place, text, ha="center", va="center", color="white")
            else:
                panel.annotate(
                    f"{field}: {size:,}",
                    (start + size / 2, -place - 0.21),
                    (start + size / 2 - (widest / 40 if size < 64 else 0), -place - 0.42),
                    ha="right" if size < 64 else "center", va="center", fontsize=9, color=INK,
                    arrowprops={"arrowstyle": "-", "color": INK},
                )  # fmt: skip
            start += size
        panel.text(0, -place + 0.26, f"{name}, {start:,} bytes", va="bottom", color=INK)
    panel.set_xlim(0, widest)
    panel.set_ylim(-len(rows) + 0.35, 0.55)
    return Picture(figure, description)


def block_table(table: Sequence[Sequence[int]], num_pages: int, description: str) -> Picture:
    """Draw which physical page holds which request's tokens; -1 in the table is nothing."""
    figure, panel = _canvas(0.55 * len(table) + 1.5)
    _bare(panel)
    for request, (pages, colour) in enumerate(zip(table, PALETTE, strict=False)):
        panel.text(-0.7, -request, f"request {request}", ha="right", va="center", color=INK)
        for column, page in enumerate(pages):
            if page >= 0:
                _box(panel, column, -request, colour, str(page))
    pool = -len(table) - 0.7
    owner = {
        page: (request, column)
        for request, pages in enumerate(table)
        for column, page in enumerate(pages)
        if page >= 0
    }
    panel.text(-0.7, pool, "pool of pages", ha="right", va="center", color=INK)
    for page in range(num_pages):
        holder = owner.get(page)
        fill = None if holder is None else PALETTE[holder[0]]
        _box(panel, page, pool, fill, "" if holder is None else f"{holder[0]}.{holder[1]}")
        panel.text(page, pool - 0.6, str(page), ha="center", va="center", fontsize=8, color=INK)
    panel.set_xlim(-3.0, num_pages - 0.4)
    panel.set_ylim(pool - 0.9, 0.5)
    return Picture(figure, description)


def _box(panel: Axes, x: float, y: float, colour: str | None, text: str) -> None:
    box = matplotlib.patches.Rectangle(
        (x - 0.45, y - 0.36), 0.9, 0.72, facecolor=colour or "none", edgecolor=colour or INK
    )
    panel.add_patch(box)
    panel.text(x, y, text, ha="center", va="center", fontsize=9, color="white")


def channel_ranges(
    layers: Mapping[str, Mapping[str, Sequence[float]]], description: str
) -> Picture:
    """Draw the largest magnitude of every channel, largest first, a panel a layer."""
    figure, panels = _canvas(2.7, 1, len(layers), sharey=True, squeeze=False)
    for panel, (layer, parts) in zip(panels[0], layers.items(), strict=True):
        for (part, values), colour in zip(parts.items(), (BLUE, ORANGE), strict=True):
            sizes = sorted(values, reverse=True)
            share = [index / (len(sizes) - 1) for index in range(len(sizes))]
            panel.plot(share, sizes, color=colour, label=part, linewidth=2)
        panel.set_title(layer, color=INK)
        panel.set_yscale("log")
        panel.set_xticks([0, 0.5, 1])
    panels[0][0].set_ylabel("largest magnitude")
    panels[0][0].legend(fontsize=9)
    figure.supxlabel("share of the channels, largest first", fontsize=10, color=INK)
    return Picture(figure, description)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    description: str,
    *,
    xlabel: str,
    log: bool = False,
    number: str = "{:.3g}",
) -> Picture:
    """Draw horizontal bars: for every name of the inner mappings, one bar a group."""
    names = list(next(iter(groups.values())))
    figure, panel = _canvas(0.22 * len(names) * len(groups) + 1.2)
    thickness = 0.8 / len(groups)
    for index, ((group, values), colour) in enumerate(zip(groups.items(), PALETTE, strict=False)):
        places = [
            place + (index - (len(groups) - 1) / 2) * thickness for place in range(len(names))
        ]
        sizes = [values[name] for name in names]
        panel.barh(places, sizes, height=thickness * 0.9, color=colour, label=group)
        for place, size in zip(places, sizes, strict=True):
            panel.text(size, place, " " + number.format(size), va="center", fontsize=8, color=INK)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.grid(False, axis="y")
    if log:
        panel.set_xscale("log")
    panel.set_xlabel(xlabel)
    panel.margins(x=0.18)
    if len(groups) > 1:
        figure.legend(loc="outside upper center", ncols=len(groups), fontsize=9)
    return Picture(figure, description)


def probabilities(steps: Mapping[str, Sequence[float]], floors: Mapping[str, float]) -> Picture:
    """Draw a row of P after each step, a panel a step; what fell to zero sits on the floor.

    `floors` names the smallest size that a panel's format keeps, where it has one.
    """
    figure, panels = _canvas(1.45 * len(steps) + 0.4, len(steps), 1, sharex=True, squeeze=False)
    for panel, (name, values), colour in zip(panels[:, 0], steps.items(), PALETTE, strict=False):
        live = [(token, value) for token, value in enumerate(values) if value > 0]
        dead = [token for token, value in enumerate(values) if value == 0]
        panel.plot(*zip(*live, strict=True), ".", color=colour, markersize=4)
        panel.set_yscale("log")
        low = min(value for _, value in live) / 4
        if name in floors:
            panel.axhline(floors[name], color=INK, linewidth=1, linestyle="--")
            low = min(low, floors[name] / 2)
        if dead:
            panel.plot(dead, [low] * len(dead), "x", color=RED, markersize=4)
            panel.set_title(f"{len(dead)} tokens became 0", loc="right", color=RED, fontsize=9)
        panel.set_ylim(low / 1.5, max(values) * 4)
        panel.set_title(name, loc="left", color=INK, fontsize=9)
    panels[-1, 0].set_xlabel("token")
    return Picture(
        figure, "A row of P, step by step: " + ", ".join(steps) + "; crosses are tokens lost"
    )


def block_order(results: Mapping[str, Sequence[tuple[str, str]]], description: str) -> Picture:
    """Draw two workers' tiles in time, a panel an order: (worker and block, what O becomes)."""
    figure, panels = _canvas(1.5 * len(results), len(results), 1, squeeze=False)
    for panel, (order, steps) in zip(panels[:, 0], results.items(), strict=True):
        _bare(panel)
        panel.set_title(order, loc="left", color=INK, fontsize=9)
        for place, (block, outcome) in enumerate(steps):
            colour = PALETTE[int(block.split()[-1]) % len(PALETTE)] if block[-1].isdigit() else INK
            box = matplotlib.patches.FancyBboxPatch(
                (place + 0.06, 0.15), 0.8, 0.7, boxstyle="round,pad=0,rounding_size=0.06",
                facecolor="none", edgecolor=colour, linewidth=2,
            )  # fmt: skip
            panel.add_patch(box)
            panel.text(place + 0.46, 0.64, block, ha="center", va="center", color=colour)
            panel.text(place + 0.46, 0.36, outcome, ha="center", va="center", fontsize=9, color=INK)
            if place:
                panel.annotate(
                    "", (place + 0.06, 0.5), (place - 0.14, 0.5),
                    arrowprops={"arrowstyle": "->", "color": INK},
                )  # fmt: skip
        panel.set_xlim(0, max(len(steps) for steps in results.values()))
        panel.set_ylim(0, 1)
    return Picture(figure, description)


def splits(
    requests: Mapping[str, Sequence[tuple[int, int]]],
    weights: Mapping[str, Sequence[float]],
    description: str,
) -> Picture:
    """Draw each request's splits as a bar over its tokens, with the weight a merge gives them."""
    figure, panel = _canvas(0.72 * len(requests) + 0.9)
    for place, (name, parts) in enumerate(requests.items()):
        for index, (start, stop) in enumerate(parts):
            colour = PALETTE[index % len(PALETTE)]
            panel.barh(-place, stop - start, left=start, height=0.4, color=colour)
            weight = weights[name][index]
            panel.text(
                (start + stop) / 2, -place + 0.23, f"{weight:.2f}", ha="center", va="bottom",
                fontsize=9, color=INK,
            )  # fmt: skip
    panel.set_yticks([-place for place in range(len(requests))], list(requests))
    panel.set_ylim(-len(requests) + 0.6, 0.6)
    panel.grid(False, axis="y")
    panel.set_xlabel("token; above each split: its weight in the merge")
    return Picture(figure, description)


def roofline(
    roofs: Mapping[str, tuple[float, float]],
    points: Mapping[str, tuple[float, float]],
    marks: Mapping[str, float],
    description: str,
) -> Picture:
    """Draw what memory and arithmetic allow, and what was reached.

    Parameters
    ----------
    roofs
        Per name: bytes per second and operations per second.
    points
        Per name: operations per byte of the least that must move, and operations per second.
    marks
        Per name: operations per byte of a stage for which nothing was measured; a line.
    description
        For readers who cannot see it.
    """
    figure, panel = _canvas(4.4)
    intensities = [2.0 ** (power / 8) for power in range(0, 91)]
    for (name, (bandwidth, peak)), style in zip(roofs.items(), ("-", "--"), strict=False):
        reachable = [min(bandwidth * x, peak) / 1e12 for x in intensities]
        panel.plot(intensities, reachable, color=INK, linestyle=style, linewidth=1.5, label=name)
    for name, x in marks.items():
        panel.axvline(x, color=INK, linestyle=":", linewidth=1)
        panel.text(x * 0.97, 1.2, name, rotation=90, ha="right", va="bottom", fontsize=8, color=INK)
    markers = "osD^vP*X"
    for index, (name, (x, rate)) in enumerate(points.items()):
        panel.plot(
            x, rate / 1e12, markers[index % len(markers)], markersize=8, linestyle="none",
            color=PALETTE[index % len(PALETTE)], label=name,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlim(8, 1024)
    panel.set_ylim(1, 2000)
    panel.set_xticks([8, 16, 32, 64, 128, 256, 512, 1024], [8, 16, 32, 64, 128, 256, 512, 1024])
    panel.set_xlabel("operations per byte that must move")
    panel.set_ylabel("TFLOP/s")
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    return Picture(figure, description)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21, as the Web Content Accessibility Guidelines count."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = matplotlib.colors.to_rgb(colour)
    linear = [
        value / 12.92 if value <= 0.04045 else math.pow((value + 0.055) / 1.055, 2.4)
        for value in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
