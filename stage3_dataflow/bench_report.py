"""What the benchmarks say: tables of 80 columns, and JSON files that survive an interruption."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stage3_dataflow.bench_kernels import BASELINE, FIXED

COLUMNS = 80
NOT_MEASURED = "-"


class ResultFiles:
    """Where a report goes, rewritten as a whole each time it has grown.

    Parameters
    ----------
    json_file
        Gets the report; None writes none.
    out
        A folder that gets ``results.json`` and ``table.txt``; None writes none.
    """

    def __init__(self, json_file: Path | None = None, out: Path | None = None) -> None:
        self.json_files = [] if json_file is None else [json_file]
        self.out = out
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self.json_files.append(out / "results.json")
        for path in self.json_files:
            if not path.parent.is_dir():
                raise ValueError(f"--json must be in a folder that exists; got {path}")

    def write(self, report: dict[str, Any], table: str) -> None:
        """Replace the files: whoever reads one finds the old report or the new one, never half."""
        text = json.dumps(_strict(report), indent=1, allow_nan=False) + "\n"
        for path in self.json_files:
            _replace(path, text)
        if self.out is not None:
            _replace(self.out / "table.txt", table)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)


def _strict(value: Any) -> Any:
    """Make JSON of it: a number that is not finite becomes null, others keep six digits."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def wrap(text: str, indent: str = "  ") -> list[str]:
    """Break a line at spaces so that it fits; later lines are indented."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False) or [""]


def heading(report: dict[str, Any]) -> list[str]:
    """Say what ran where."""
    machine = report["machine"]
    lines = wrap(report["command"])
    parts = [machine["device"]]
    for key, text in (
        ("power_limit_w", "power limit {} W"),
        ("sm_clock_mhz", "SM clock under load {} MHz"),
        ("max_sm_clock_mhz", "of at most {}"),
        ("memory_clock_mhz", "memory {} MHz"),
        ("driver", "driver {}"),
    ):
        if machine.get(key):
            parts.append(text.format(machine[key]))
    lines += wrap(", ".join(parts))
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton") if machine[name]]
    commit = [f"commit {machine['commit']}"] if machine["commit"] else []
    return lines + wrap(", ".join([*versions, *commit, machine["date"]]))


def kernel_heading(report: dict[str, Any]) -> list[str]:
    """`heading`, the ceilings, how times were taken, and which peers are there."""
    lines = heading(report)
    ceilings = report["ceilings"]
    if ceilings is not None:
        lines += wrap(
            f"measured here: copy {ceilings['copy'] / 1e12:.2f} TB/s, BF16 matrix product "
            f"{ceilings['matrix'] / 1e12:.0f} TFLOP/s (8192^3), a graph of one trivial kernel "
            f"{ceilings['empty_us']:.1f} us"
        )
    lines += wrap(
        f"times: {report['method']}, median of {report['repeats']}; host: microseconds of Python "
        "for a call without a graph"
        if ceilings is not None
        else f"times: {report['method']}, which says nothing about a GPU; median of "
        f"{report['repeats']}"
    )
    rule = report["fixed_rule"]
    lines += wrap(
        f"splits: chosen for the batch; 'fixed' is the default rule (a split from "
        f"{rule['min_tokens']} tokens, at most {rule['max_splits']}), under which no request's "
        "bits depend on its batch"
    )
    for name, status in report["peers"].items():
        if status != "ready":
            lines += wrap(f"{name}: {status}")
    return lines


def _number(value: float | None, digits: int = 0) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def _microseconds(value: float | None) -> str:
    return _number(value, 0 if value is not None and value >= 1e5 else 1)


def _percent(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.0f}"


def _row(cells: Sequence[str]) -> str:
    """One line: a name, then right-aligned columns."""
    widths = (29, 7, 9, 9, 7, 6, 6, 7)
    first, *others = cells
    padded = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
    return f"{first:<{widths[0]}}" + "".join(padded)


def shape_table(shape: dict[str, Any]) -> list[str]:
    """Lay out the rows of one shape."""
    rule = shape["suggested_rule"]
    low, high = shape["lengths"]
    length = f"{low}" if low == high else f"{low} to {high}"
    asks = f"batch {shape['batch']}, heads {shape['heads']}, tokens {length}, s_q {shape['s_q']}"
    lines = [
        *wrap(
            f"{shape['name']}: {asks}; the fastest kernel's splits have at least "
            f"{rule['min_tokens']} tokens, at most {rule['max_splits']} a request"
        ),
        _row(["", "splits", "us", "TFLOP/s", "GB/s", "%copy", "%BF16", "host"]),
    ]
    for row in shape["rows"]:
        name = f"  {row['kernel']}"
        if "microseconds" in row:
            lines.append(
                _row(
                    [
                        name,
                        NOT_MEASURED if row["splits"] is None else str(row["splits"]),
                        _microseconds(row["microseconds"]),
                        _number(row["tflops"]),
                        _number(row["gbs"]),
                        _percent(row["copy_share"]),
                        _percent(row["matrix_share"]),
                        _number(row["host_microseconds"]),
                    ]
                )
            )
        if row["failure"] is not None:
            lines += wrap(f"{name.strip()}: {row['failure']}", "    ")
    return lines


def comparison_tables(report: dict[str, Any], groups: Sequence[str]) -> list[str]:
    """Lay out speed-ups and errors; absent peers keep their column."""
    shapes = [shape for name in groups for shape in report.get(name, [])]
    lines = ["", *error_table(shapes)]
    if report["ceilings"] is None:
        return lines
    columns = {"here BF16": BASELINE} | {name: name for name in report["peers"]}
    width = (COLUMNS - 15 - 8) // len(columns)
    titles = [name.split(maxsplit=1) for name in columns]
    lines += [
        "",
        *wrap(
            "speed-up of FP8 decode over BF16 decode of this library and over others: of a query "
            "quantised before / with the query's quantisation (splits chosen for the batch)"
        ),
        " " * 23 + "".join(f"{library:>{width}}" for library, _ in titles),
        f"{'':<15}{'FP8 us':>8}" + "".join(f"{cache:>{width}}" for _, cache in titles),
    ]
    absent = False
    for shape in shapes:
        rows = {row["kernel"]: row for row in shape["rows"]}
        decode = next((r for n, r in rows.items() if _is_decode(n) and "speedup_over" in r), None)
        whole = rows.get("fp8 with q-quant", {})
        cells = []
        for name in columns.values():
            if report["peers"].get(name, "ready") != "ready":
                cells.append("absent*")
                absent = True
            elif decode is None or name not in decode["speedup_over"]:
                cells.append(NOT_MEASURED)
            else:
                both = decode["speedup_over"][name], whole.get("speedup_over", {}).get(name)
                cells.append(" / ".join(_number(value, 2) for value in both))
        time = _microseconds(None if decode is None else decode["microseconds"])
        lines.append(f"{shape['name']:<15}{time:>8}" + "".join(f"{c:>{width}}" for c in cells))
    if absent:
        lines += wrap("* not there, or failing; the reason is in the heading")
    return lines


def error_table(shapes: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out each kernel's largest error."""
    errors: dict[str, list[float]] = {}
    for shape in shapes:
        for row in shape["rows"]:
            if row.get("error") is not None:
                errors.setdefault(row["kernel"], []).append(row["error"])
    return [
        "largest relative error (L2) against float64 on the operands that were read",
        *(f"  {name:<28}{max(values):>9.1e}" for name, values in errors.items()),
    ]


def _is_decode(name: str) -> bool:
    return name.startswith("fp8 ") and not name.endswith(FIXED) and name != "fp8 with q-quant"


def sweep_table(shapes: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out the curves: one row a shape, the FP8 decode beside the BF16 decode."""
    titles = [title for cache in ("FP8", "BF16") for title in (f"{cache} us", "TFLOP/s", "GB/s")]
    lines = ["", "by length", f"{'':<16}" + "".join(f"{title:>10}" for title in titles)]
    for shape in shapes:
        rows = {row["kernel"]: row for row in shape["rows"] if "microseconds" in row}
        fp8: dict[str, Any] = next((row for name, row in rows.items() if _is_decode(name)), {})
        cells = []
        for row in (fp8, rows.get(BASELINE, {})):
            cells.append(_microseconds(row.get("microseconds")))
            cells += [_number(row.get(rate)) for rate in ("tflops", "gbs")]
        lines.append(f"{shape['name']:<16}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def kernel_text(report: dict[str, Any], groups: Sequence[str]) -> str:
    """Everything as text."""
    lines = kernel_heading(report)
    for name in groups:
        for shape in report.get(name, []):
            lines += ["", *shape_table(shape)]
    lines += comparison_tables(report, groups)
    if report.get("sweep"):
        lines += sweep_table(report["sweep"])
    return "\n".join(lines) + "\n"


def stages_text(report: dict[str, Any]) -> str:
    """Lay out one layer's attention by stage."""
    lines = heading(report)
    lines += wrap(
        f"one layer's attention, times {report['method']}, median of {report['repeats']}, pages of "
        f"{report['page_size']} tokens; path: {report['machine']['path']}; error: relative L2 "
        "distance to exact attention over unquantised rows, first request"
    )
    for shape in report["shapes"]:
        lines += ["", f"{shape['name']} (requests, heads, cached tokens[, query tokens])"]
        lines.append(f"{'':24}{'ms':>10}{'quartiles':>22}{'error':>12}")
        for row in shape["rows"]:
            low, high = (f"{value:.3f}" for value in row["quartiles"])
            lines.append(
                f"{row['stage']:<24}{row['milliseconds']:>10.3f}{low + ' to ' + high:>22}"
                f"{row['error']:>12.1e}"
            )
    return "\n".join(lines) + "\n"


def throughput_text(report: dict[str, Any]) -> str:
    """Lay out both measurements, the two caches one below the other."""
    model = report["model"]
    lines = heading(report)
    lines += wrap(
        f"model: {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, "
        f"{model['heads']} heads, {model['dtype']}; cache: {report['cache_bytes'] / 1e9:.3f} GB "
        f"for either format, pages of {report['page_size']} tokens; path: "
        f"{report['machine']['path']}"
        + ("" if report["machine"]["path"] == "triton" else ", which says nothing about a GPU")
    )
    for kind, title in (
        ("steady", "Decode, every row live"),
        ("whole", "Whole runs, prefill included"),
    ):
        if report[kind]:
            lines += ["", title, _throughput_row(_THROUGHPUT_TITLES)]
            lines += _throughput_rows(report[kind])
    reasons = {row["why_eager"] for kind in ("steady", "whole") for row in report[kind]
               if row.get("why_eager")}  # fmt: skip
    for reason in sorted(reasons):
        lines += wrap(f"eager: {reason}")
    return "\n".join(lines) + "\n"


_THROUGHPUT_TITLES = ("context", "batch", "cache", "running", "ms/step", "tokens/s", "", "step")


def _throughput_row(cells: Sequence[str]) -> str:
    widths = (9, 7, 7, 9, 11, 13, 14, 8)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _throughput_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    rates = {
        (row["context"], row["most"], row["cache"]): row["tokens_per_second"]
        for row in rows
        if "tokens_per_second" in row
    }
    for row in rows:
        first = [str(row["context"]), "memory" if row["most"] is None else str(row["most"])]
        if "failure" in row:
            lines += wrap(f"{first[0]:>9}{first[1]:>7}{row['cache']:>7}  {row['failure']}", "    ")
            continue
        baseline = rates.get((row["context"], row["most"], "bf16"))
        gain = ""
        if row["cache"] != "bf16" and baseline is not None:
            gain = f"{row['tokens_per_second'] / baseline:.2f} x BF16"
        lines.append(
            _throughput_row(
                [
                    *first,
                    row["cache"],
                    str(row["running"]),
                    f"{row['ms_per_step']:.2f}",
                    f"{row['tokens_per_second']:.1f}",
                    gain,
                    row["decode"],
                ]
            )
        )
    return lines
