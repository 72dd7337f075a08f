"""Pictures of the benchmarks. Nothing is computed here but ratios of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")

COLOURS = ("#2f6fb3", "#c8552b", "#5a9e6f", "#d9a441", "#7a5ea8", "#777777", "#3aa6a6")
FP8_COLOUR, BF16_COLOUR = COLOURS[:2]


def _caption(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return f"{machine['device']}, {machine['date']}, torch {machine['torch']}"


def _is_drawn(kernel: str) -> bool:
    """Whether a bar of its own helps: one for each kernel, with the splits chosen for the batch."""
    decodes = kernel.startswith(("fp8", "bf16", "Fl"))
    return decodes and not kernel.endswith(("fixed splits", "with q-quant"))


def plot_shapes(report: dict[str, Any], path: Path, *, group: str = "shapes") -> None:
    """Draw every decode's time by shape, relative to the BF16 decode of this library."""
    shapes = report[group]
    names = list(
        dict.fromkeys(
            row["kernel"]
            for shape in shapes
            for row in shape["rows"]
            if "microseconds" in row and _is_drawn(row["kernel"])
        )
    )
    figure, panel = plt.subplots(figsize=(9.5, 4.2))
    width = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        for at, shape in enumerate(shapes):
            times = {row["kernel"]: row.get("microseconds") for row in shape["rows"]}
            base, own = times.get("bf16 portable"), times.get(name)
            if base is None or own is None:
                continue
            panel.bar(
                at + (place - (len(names) - 1) / 2) * width,
                base / own,
                width=width,
                color=COLOURS[place % len(COLOURS)],
                label=name if at == 0 else None,
            )
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(shapes)), [s["name"] for s in shapes], rotation=20, fontsize=8)
    panel.set_xlabel("batch, heads, cached tokens (, query tokens)")
    panel.set_ylabel("speed-up over BF16 decode here\n(higher is better)")
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.06))
    _save(figure, path, _caption(report))


def plot_sweep(report: dict[str, Any], path: Path) -> None:
    """Draw TFLOP/s and GB/s against length, with the ceilings that were measured."""
    settings = list(dict.fromkeys((s["batch"], s["heads"]) for s in report["sweep"]))
    figure, panels = plt.subplots(
        2, len(settings), figsize=(3.6 * len(settings), 5.6), sharex=True, squeeze=False
    )
    ceilings = report["ceilings"]
    for column, setting in enumerate(settings):
        shapes = [s for s in report["sweep"] if (s["batch"], s["heads"]) == setting]
        names = list(dict.fromkeys(row["kernel"] for s in shapes for row in s["rows"]))
        for place, name in enumerate(names):
            points = [
                (shape["lengths"][1], row)
                for shape in shapes
                for row in shape["rows"]
                if row["kernel"] == name and row.get("gbs") is not None
            ]
            for panel, rate in zip(panels[:, column], ("tflops", "gbs"), strict=True):
                panel.plot(
                    [length for length, _ in points],
                    [row[rate] for _, row in points],
                    marker="o",
                    markersize=3,
                    color=COLOURS[place % len(COLOURS)],
                    label=name,
                )
        if ceilings is not None:
            panels[1][column].axhline(
                ceilings["copy"] / 1e9, color="black", linestyle=":", linewidth=1, label="copy"
            )
            panels[0][column].axhline(
                ceilings["matrix"] / 1e12,
                color="black",
                linestyle=":",
                linewidth=1,
                label="BF16 matrix product",
            )
        panels[0][column].set_title(f"batch {setting[0]}, {setting[1]} heads", fontsize=10)
        panels[1][column].set_xscale("log", base=2)
        for panel in panels[:, column]:
            panel.grid(alpha=0.3)
            panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("TFLOP/s")
    panels[1][0].set_ylabel("GB/s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 0.0)
    )
    figure.supxlabel("cached tokens of each request", fontsize=10)
    _save(figure, path, _caption(report))


def plot_throughput(report: dict[str, Any], path: Path) -> None:
    """Draw tokens per second and requests at once by context, as many requests as memory holds."""
    kinds = [kind for kind in ("steady", "whole") if report[kind]]
    titles = {"steady": "decode, every row live", "whole": "whole runs"}
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.8 * len(kinds), 3.8), squeeze=False)
    for panel, kind in zip(panels[0], kinds, strict=True):
        rows = [row for row in report[kind] if "failure" not in row]
        most = rows[-1]["most"] if rows else None
        contexts = list(dict.fromkeys(row["context"] for row in rows))
        for name, offset, colour in (("bf16", -0.2, BF16_COLOUR), ("fp8", 0.2, FP8_COLOUR)):
            chosen = {
                row["context"]: row for row in rows if (row["cache"], row["most"]) == (name, most)
            }
            places = [at for at, context in enumerate(contexts) if context in chosen]
            bars = panel.bar(
                [at + offset for at in places],
                [chosen[contexts[at]]["tokens_per_second"] for at in places],
                width=0.38,
                color=colour,
                label=f"{name} cache",
            )
            panel.bar_label(
                bars, [f"{chosen[contexts[at]]['running']} at once" for at in places], fontsize=7
            )
        panel.set_xticks(range(len(contexts)), list(map(str, contexts)))
        panel.set_xlabel("context, tokens")
        panel.set_title(titles[kind], fontsize=10)
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("tokens/s (higher is better)")
    panels[0][0].legend(fontsize=8)
    _save(figure, path, f"{report['cache_bytes'] / 1e9:.3f} GB of cache; {_caption(report)}")


def plot_kernels(report: dict[str, Any], groups: Sequence[str], out: Path) -> None:
    """Draw what a kernel report holds into a folder."""
    for group in groups:
        if group == "sweep":
            plot_sweep(report, out / "sweep.png")
        else:
            plot_shapes(report, out / f"{group}.png", group=group)


def _save(figure: Any, path: Path, caption: str) -> None:
    figure.set_layout_engine("tight")
    figure.text(0.995, 0.995, caption, ha="right", va="top", fontsize=6, color="#555555")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
