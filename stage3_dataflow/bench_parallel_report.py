"""What the benchmark of several ranks says: tables of 80 columns, and what was found wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stage3_dataflow.bench_report import heading, wrap

Row = dict[str, Any]


def failed_checks(report: Mapping[str, Any]) -> list[str]:
    """Name what is wrong: checks that failed, and sections that did not end."""
    wrong = []
    for name, section in report["sections"].items():
        for number, row in enumerate(section["rows"], start=1):
            wrong += [
                f"{name}, row {number}: {check}"
                for check, passed in row.get("checks", {}).items()
                if not passed
            ]
        if section["status"] != "done":
            wrong.append(f"{name}: {section.get('error', section['status'])}")
    return wrong


def text_of(report: Mapping[str, Any]) -> str:
    """Lay the report out in 80 columns."""
    ranks = report["ranks"]
    connection = report["connection"]
    lines = heading(dict(report)) + wrap(
        f"ranks: {ranks}, by {connection['backend']} {connection.get('nccl', '')}".rstrip()
        + ": "
        + ", ".join(report["devices"])
    )
    for kind, text in report["method"].items():
        lines += wrap(f"{kind}: {text}")
    for name, section in report["sections"].items():
        seconds = f", {section['seconds']:.0f} s" if "seconds" in section else ""
        title, columns = _LAYOUTS.get(name, (name, {}))
        lines += ["", *wrap(f"{title.format(ranks=ranks)} ({section['status']}{seconds})")]
        if "error" in section:
            lines += wrap(section["error"])
        titles = [column.format(ranks=ranks) for column in columns]
        measured = [row for row in section["rows"] if "skipped" not in row]
        lines += _aligned([titles, *([cell(row) for cell in columns.values()] for row in measured)])
        reasons = {row["skipped"] for row in section["rows"] if "skipped" in row}
        for reason in sorted(reasons):
            lines += wrap(f"not measured: {reason}")
    checks = sum(len(r.get("checks", ())) for s in report["sections"].values() for r in s["rows"])
    wrong = failed_checks(report)
    lines += ["", f"{checks} checks" + ("" if wrong else ", all passed")]
    for text in wrong:
        lines += wrap(f"WRONG {text}")
    return "\n".join(lines) + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns to the right, the first to the left; nothing if there is only a heading."""
    if len(rows) < 2 or not rows[0]:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _number(key: str, layout: str) -> Callable[[Row], str]:
    """Give a row's number, or the time under a key; a dash if there is none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        value = value["us"] if isinstance(value, dict) else value
        is_number = value is not None and math.isfinite(value)
        return format(value, layout) if is_number else "-"

    return cell


_LAYOUTS: dict[str, tuple[str, dict[str, Callable[[Row], str]]]] = {
    "messages": (
        "What ranks tell each other, microseconds",
        {
            "": lambda row: row["content"],
            "bytes": _number("bytes", ",d"),
            "gather": _number("gather", ".1f"),
            "and sum": _number("sum_over_ranks", ".1f"),
            "all-reduce": _number("all_reduce", ".1f"),
        },
    ),
    "context": (
        "Context parallel: one request, one layer's attention over the FP8 cache, microseconds. "
        "MB: cache of a rank and layer; own: a rank's pages alone, not merged; errors: relative "
        "L2, against float64",
        {
            "heads": _number("heads", "d"),
            "tokens": _number("tokens", ",d"),
            "MB": lambda row: f"{row['cache_bytes_on_a_rank'] / 1e6:.0f}",
            "1 rank": _number("one_rank", ".0f"),
            "own": _number("own_pages", ".0f"),
            "{ranks} ranks": _number("ranks", ".0f"),
            "gain": _number("speedup", ".2f"),
            "err 1": _number("error_one_rank", ".4f"),
            "err {ranks}": _number("error_ranks", ".4f"),
            "bound": _number("bound", ".3f"),
        },
    ),
    "tensor": (
        "Tensor parallel: largest errors of logits against float64; greedy tokens that agree",
        {
            "model": lambda row: row["model"],
            "heads": _number("heads", "d"),
            "dtype": lambda row: row["dtype"],
            "1 rank": _number("error_one_rank", ".1e"),
            "{ranks} ranks": _number("error_ranks", ".1e"),
            "bound": _number("bound", ".1e"),
            "tokens": lambda row: f"{row['equal_tokens']}/{row['tokens']}",
            "caches": lambda row: "equal" if row["checks"]["same cache on all ranks"] else "DIFFER",
        },
    ),
    "attention": (
        "Heads split over {ranks} ranks: one layer's attention, microseconds, no communication",
        {
            "batch": _number("batch", "d"),
            "tokens": _number("tokens", ",d"),
            "all heads": _number("one_rank", ".1f"),
            "a rank's": _number("ranks", ".1f"),
            "gain": _number("speedup", ".2f"),
        },
    ),
    "decode": (
        "Tensor parallel: a decode step, milliseconds",
        {
            "model": lambda row: row["model"],
            "layers": _number("layers", "d"),
            "context": _number("context", ",d"),
            "batch": _number("batch", "d"),
            "step": lambda row: row["mode"],
            "ranks": _number("ranks", "d"),
            "ms": _number("ms", ".2f"),
            "tokens/s": _number("tokens_per_second", ",.0f"),
            "gain": _number("speedup", ".2f"),
        },
    ),
}
