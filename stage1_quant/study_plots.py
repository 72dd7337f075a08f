"""Pictures of the sensitivity study. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")

LATENT_COLOUR, ROPE_COLOUR = "#2f6fb3", "#c8552b"

Table = Sequence[dict[str, Any]]


def plot_value_ranges(ranges: Table, path: Path) -> None:
    """Draw the largest magnitude of every channel, sorted, one panel a layer."""
    layers = sorted({row["layer"] for row in ranges})
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(3.4 * columns, 2.5 * rows), sharey=True, squeeze=False
    )
    for panel, layer in zip(panels.flat, layers, strict=False):
        for part, colour, label in (
            ("c_kv", LATENT_COLOUR, "latent"),
            ("k_rope", ROPE_COLOUR, "rope"),
        ):
            row = next(r for r in ranges if r["layer"] == layer and r["part"] == part)
            sizes = sorted(row["channel_amax"], reverse=True)
            place = [index / (len(sizes) - 1) for index in range(len(sizes))]
            panel.plot(place, sizes, color=colour, label=label, linewidth=2)
        panel.set_title(f"layer {layer}", fontsize=10)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(layers) :]:
        panel.set_visible(False)
    panels[0][0].legend(fontsize=9)
    figure.supxlabel("channels, largest first (fraction of the part's channels)", fontsize=10)
    figure.supylabel("largest magnitude over all tokens", fontsize=10)
    _save(figure, path)


def plot_format_errors(shipped: Table, synthetic: Table, path: Path) -> None:
    """Draw each format's signal-to-noise ratio on both parts and its output error."""
    names = [row["format"] for row in shipped if row["format"] != "bf16"]
    places = range(len(names))
    figure, panels = plt.subplots(1, 3, figsize=(11, 4.2), sharey=True)
    measures = (
        ("latent_sqnr_db", "latent: SQNR, dB\n(longer is better)", False),
        ("rope_sqnr_db", "rope: SQNR, dB\n(longer is better)", False),
        ("output_error", "attention output:\nrelative error (shorter is better)", True),
    )
    for panel, (measure, title, logarithmic) in zip(panels, measures, strict=True):
        for table, offset, colour, label in (
            (shipped, -0.2, LATENT_COLOUR, "shipped model's cache"),
            (synthetic, 0.2, ROPE_COLOUR, "synthetic cache, rope outliers to 1000"),
        ):
            values = {row["format"]: row[measure] for row in table}
            exact = [values[name] == float("inf") for name in names]
            panel.barh(
                [place + offset for place in places],
                [0.0 if skip else values[name] for name, skip in zip(names, exact, strict=True)],
                height=0.38,
                color=colour,
                label=label,
            )
            for place in (place for place, skip in zip(places, exact, strict=True) if skip):
                panel.text(1, place + offset, "exact", va="center", fontsize=8, color=colour)
        panel.set_title(title, fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        if logarithmic:
            panel.set_xscale("log")
    panels[0].set_yticks(list(places), names)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=9, frameon=False)
    _save(figure, path, bottom=0.07)


def plot_loss(table: Table, path: Path) -> None:
    """Draw what each format adds to the held-out loss, by context, with its standard error."""
    names = list(dict.fromkeys(row["format"] for row in table))[1:]  # all but the baseline
    contexts = sorted({row["context"] for row in table})
    figure, panels = plt.subplots(
        1,
        len(contexts),
        figsize=(2.4 + 2.6 * len(contexts), 1.4 + 0.3 * len(names)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for panel, context in zip(panels[0], contexts, strict=True):
        rows = {row["format"]: row for row in table if row["context"] == context}
        panel.barh(
            names,
            [1e3 * rows[name]["added"] for name in names],
            xerr=[2e3 * rows[name]["added_standard_error"] for name in names],
            color=LATENT_COLOUR,
            ecolor="#555555",
        )
        panel.axvline(0, color="#555555", linewidth=1)
        panel.set_title(f"context {context}", fontsize=10)
        panel.tick_params(axis="x", labelsize=8)
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.supxlabel(
        "added loss, thousandths of a nat per byte (whiskers: two standard errors)", fontsize=10
    )
    _save(figure, path)


def _save(figure: Any, path: Path, *, bottom: float = 0.0) -> None:
    figure.set_layout_engine("tight", rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)
