"""Bias of O by length under three promotion policies, from the accumulator model.

    python -m stage2_pv_pipeline.drift_study --out drift

writes ``drift.csv`` and ``drift.png``. Arithmetic only: no GPU is involved.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from stage2_pv_pipeline.tensor_core_accumulator import KINDS, Drift, drift

POLICIES: tuple[int | None, ...] = (None, 1024, 256, 64)
"""Tokens between promotions; None keeps O in the accumulator for the whole sequence."""

LENGTHS = (1024, 4096, 8192, 32768, 131072)


def measure_drift(
    lengths: Sequence[int] = LENGTHS, policies: Sequence[int | None] = POLICIES
) -> list[Drift]:
    """Run the model for every kind of row, length and policy."""
    return [
        drift(kind, tokens, promote_every)
        for kind in KINDS
        for tokens in lengths
        for promote_every in policies
    ]


def policy_name(promote_every: int | None) -> str:
    """Name a policy for tables and legends."""
    return "never promoted" if promote_every is None else f"every {promote_every} tokens"


def write_drift(rows: Sequence[Drift], out: Path) -> None:
    """Write the table and its picture (needs matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    with open(out / "drift.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", "tokens", "promoted", "relative bias of O"])
        for row in rows:
            writer.writerow(
                [row.kind, row.tokens, policy_name(row.promote_every), f"{row.bias:.3e}"]
            )

    kinds = list(dict.fromkeys(row.kind for row in rows))
    policies = list(dict.fromkeys(row.promote_every for row in rows))
    colours = ("#c8552b", "#d9a441", "#5a9e6f", "#2f6fb3")
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(3.1 * len(kinds), 3.4), sharey=True, squeeze=False
    )
    for panel, kind in zip(panels[0], kinds, strict=True):
        for policy, colour in zip(policies, colours, strict=False):
            mine = [row for row in rows if row.kind == kind and row.promote_every == policy]
            panel.plot(
                [row.tokens for row in mine],
                [max(abs(row.bias), 1e-7) for row in mine],
                marker="o",
                color=colour,
                label=policy_name(policy),
            )
        panel.set_title(kind, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("relative loss of O (1e-7: none)", fontsize=10)
    figure.supxlabel("tokens", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(policies), frameon=False)
    figure.set_layout_engine("tight", rect=(0, 0, 1, 0.92))
    figure.savefig(out / "drift.png", dpi=130, facecolor="white")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m stage2_pv_pipeline.drift_study", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N", help="in tokens"
    )
    parsed = parser.parse_args(arguments)
    rows = measure_drift(parsed.lengths)
    write_drift(rows, parsed.out)
    print(f"{'':<26}{'tokens':>8}" + "".join(f"{policy_name(p):>19}" for p in (None, 64)))
    for kind in KINDS:
        for tokens in parsed.lengths:
            cells = {r.promote_every: r.bias for r in rows if (r.kind, r.tokens) == (kind, tokens)}
            print(f"{kind:<26}{tokens:>8}{cells[None]:>19.2%}{cells[64]:>19.1e}")


if __name__ == "__main__":
    main()
