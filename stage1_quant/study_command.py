"""`snapmla study quant`: run the sensitivity study and write tables and pictures."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import io
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stage0_reference.cli import add_model_arguments, load_from_arguments, print_json
from stage0_reference.evaluation import SCORED_TOKENS


def register(commands: Any) -> None:
    """Add `study` to the command line; found through the entry-point group snapmla.commands."""
    study = commands.add_parser(
        "study",
        help="measure what a technique costs in accuracy",
        description="Studies of accuracy, on the shipped model and on synthetic data.",
    )
    parts = study.add_subparsers(dest="study", metavar="STUDY", required=True)
    parser = parts.add_parser(
        "quant",
        help="formats of the FP8 cache, side by side",
        description="Value ranges, error and held-out loss of every cache format. Writes CSV, "
        "text and PNG files into DIR. The small setting (the default) takes some minutes on two "
        "CPU cores; the committed results took --windows 48 --samples 4 --contexts 512 1024 2048 "
        "4096 --dtype float32 on a GPU.",
    )
    _add_loss_arguments(parser)
    parser.add_argument(
        "--samples",
        type=int,
        default=2,
        metavar="N",
        help="windows and synthetic caches for ranges and errors (default: 2)",
    )
    parser.set_defaults(run=run_study_quant)

    parser = parts.add_parser(
        "stages",
        help="held-out loss of every installed stage, side by side",
        description="Held-out loss of every installed stage by context length, on the same "
        "windows. Writes CSV, text and PNG files into DIR.",
    )
    _add_loss_arguments(parser)
    parser.set_defaults(run=run_study_stages)


def _add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--windows", type=int, default=2, metavar="N", help="held-out windows per loss (default 2)"
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 2048],
        metavar="N",
        help="context lengths in tokens (default: 512 2048)",
    )
    add_model_arguments(parser, stage=False, model=False)


def study_quant(
    model: Any, *, windows: int, contexts: Sequence[int], samples: int
) -> dict[str, Any]:
    """Measure the accuracy of cache formats on the shipped model and on synthetic caches.

    Returns
    -------
    dict
        `ranges`, `errors_shipped`, `errors_synthetic` and `loss`: lists of rows as
        `stage1_quant.sensitivity_study` gives them.
    """
    from stage0_reference.evaluation import choose_windows
    from stage0_reference.training.corpus import load_heldout
    from stage1_quant.sensitivity_study import (
        format_backends,
        format_errors,
        loss_by_context,
        record_layers,
        synthetic_sample,
        value_ranges,
    )

    decoder, tokenizer = model
    documents = [tokenizer.encode(data.decode()) for _, data in load_heldout()]
    longest = max(contexts)
    _say(f"recording {samples} windows of {longest} tokens")
    recorded = record_layers(
        decoder,
        choose_windows(documents, longest, longest_context=longest, max_windows=samples),
    )
    _say("errors of every format")
    shipped = [sample for window in recorded for sample in window]
    synthetic = [
        synthetic_sample(tokens=longest, seed=seed, device=decoder.device)
        for seed in range(samples)
    ]
    return {
        "ranges": value_ranges(recorded),
        "errors_shipped": format_errors(shipped),
        "errors_synthetic": format_errors(synthetic),
        "loss": loss_by_context(
            decoder,
            documents,
            format_backends(),
            contexts=contexts,
            windows=windows,
            progress=_say,
        ),
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _load_for_study(arguments: argparse.Namespace) -> Any:
    """Refuse what the arguments get wrong, and load the model."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("study needs matplotlib for its plots: pip install 'snapmla[plots]'")
    for name, least in (("windows", 2), ("samples", 1)):  # one window has no standard error
        if getattr(arguments, name, least) < least:
            raise ValueError(f"--{name} must be at least {least}; got {getattr(arguments, name)}")
    if min(arguments.contexts) <= SCORED_TOKENS:
        raise ValueError(
            f"--contexts must be above {SCORED_TOKENS}, the scored tokens of a window; "
            f"got {min(arguments.contexts)}"
        )
    model = load_from_arguments(arguments)
    if max(arguments.contexts) > model.decoder.config.max_position_embeddings:
        raise ValueError(
            f"--contexts must be at most the model's "
            f"{model.decoder.config.max_position_embeddings} positions; "
            f"got {max(arguments.contexts)}"
        )
    return model


def run_study_quant(arguments: argparse.Namespace) -> int:
    """Run the study of cache formats and write its files."""
    model = _load_for_study(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables = study_quant(
        model,
        windows=arguments.windows,
        contexts=sorted(arguments.contexts),
        samples=arguments.samples,
    )
    facts = _facts(model, arguments)
    write_results(tables, facts, arguments.out)
    _show(facts | tables, arguments)
    return 0


def run_study_stages(arguments: argparse.Namespace) -> int:
    """Compare the losses of all installed stages and write the files."""
    from stage0_reference.training.corpus import load_heldout
    from stage1_quant.sensitivity_study import loss_by_context, stage_backends
    from stage1_quant.study_plots import plot_loss

    model = _load_for_study(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    loss = loss_by_context(
        model.decoder,
        [model.tokenizer.encode(data.decode()) for _, data in load_heldout()],
        stage_backends(),
        contexts=sorted(arguments.contexts),
        windows=arguments.windows,
        progress=_say,
    )
    facts = _facts(model, arguments)
    (arguments.out / "loss.csv").write_text(_csv(loss))
    (arguments.out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = "\n".join([*_heading(facts), *_loss_table(loss, "Loss added to stage 0's")]) + "\n"
    (arguments.out / "summary.txt").write_text(text)
    plot_loss(loss, arguments.out / "loss.png")
    _show(facts | {"loss": loss}, arguments)
    return 0


def _show(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(report)
    else:
        print((arguments.out / "summary.txt").read_text(), end="")


def _facts(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    device = model.decoder.device
    samples = f" --samples {arguments.samples}" if hasattr(arguments, "samples") else ""
    contexts = " ".join(map(str, arguments.contexts))
    return {
        "command": f"snapmla study {arguments.study} --windows {arguments.windows}{samples} "
        f"--contexts {contexts} --dtype {arguments.dtype}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "dtype": str(model.decoder.dtype).removeprefix("torch."),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_results(tables: dict[str, Any], facts: dict[str, Any], out: Path) -> None:
    """Write tables as CSV, a summary as text, what was run as JSON, and three plots."""
    from stage1_quant.study_plots import plot_format_errors, plot_loss, plot_value_ranges

    ranges = [
        {key: value for key, value in row.items() if key != "channel_amax"}
        for row in tables["ranges"]
    ]
    channels = [
        {"layer": row["layer"], "part": row["part"], "channel": channel, "max": size}
        for row in tables["ranges"]
        for channel, size in enumerate(row["channel_amax"])
    ]
    for name, rows in (
        ("value_ranges", ranges),
        ("value_ranges_by_channel", channels),
        ("errors_shipped", tables["errors_shipped"]),
        ("errors_synthetic", tables["errors_synthetic"]),
        ("loss", tables["loss"]),
    ):
        (out / f"{name}.csv").write_text(_csv(rows))
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "summary.txt").write_text(summary(tables, facts))
    plot_value_ranges(tables["ranges"], out / "value_ranges.png")
    plot_format_errors(
        tables["errors_shipped"], tables["errors_synthetic"], out / "format_errors.png"
    )
    plot_loss(tables["loss"], out / "loss.png")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def summary(tables: dict[str, Any], facts: dict[str, Any]) -> str:
    """Lay the tables out as text, 80 columns wide."""
    from stage1_quant.alternatives import FORMATS

    lines = [
        *_heading(facts),
        "",
        "Value ranges, shipped model on held-out text",
        f"{'layer':>6}{'part':>8}{'rms':>9}{'p99.9':>9}{'max':>9}{'token amax':>20}",
    ]
    for row in tables["ranges"]:
        span = f"{row['token_amax_min']:.2f} to {row['token_amax_max']:.2f}"
        lines.append(
            f"{row['layer']:>6}{row['part']:>8}{row['rms']:>9.3f}{row['p99.9']:>9.2f}"
            f"{row['max']:>9.2f}{span:>20}"
        )
    for name, title in (
        ("errors_shipped", "shipped model's cache on held-out text"),
        ("errors_synthetic", "synthetic cache: latents within 10, rope outliers to 1000"),
    ):
        lines += [
            "",
            f"Errors, {title}",
            f"{'format':<16}{'bytes':>7}{'latent dB':>11}{'rope dB':>9}{'latent max':>12}"
            f"{'rope max':>10}{'output':>10}",
        ]
        sizes = {f.name: f.bytes_per_token for f in FORMATS}
        for row in tables[name]:
            lines.append(
                f"{row['format']:<16}{sizes[row['format']]:>7.0f}{row['latent_sqnr_db']:>11.1f}"
                f"{row['rope_sqnr_db']:>9.1f}{row['latent_max_error']:>12.1e}"
                f"{row['rope_max_error']:>10.1e}{row['output_error']:>10.1e}"
            )
    lines += _loss_table(tables["loss"], "Held-out loss added to BF16's")
    return "\n".join(lines) + "\n"


def _heading(facts: dict[str, Any]) -> list[str]:
    return [
        facts["command"],
        f"{facts['device']}, {facts['dtype']}, torch {facts['torch']}, {facts['date']}",
    ]


def _loss_table(loss: Sequence[dict[str, Any]], title: str) -> list[str]:
    """Nats of the first row, thousandths of a nat added by the others."""
    contexts = sorted({row["context"] for row in loss})
    names = list(dict.fromkeys(row["format"] for row in loss))
    lines = ["", f"{title}, thousandths of a nat per byte (standard error)"]
    lines.append(f"{'':<16}" + "".join(f"{f'context {c}':>16}" for c in contexts))
    for name in names:
        rows = {row["context"]: row for row in loss if row["format"] == name}
        cells = (
            f"{rows[c]['loss']:.4f} nats"
            if name == names[0]
            else f"{rows[c]['added'] * 1e3:+.2f} ({rows[c]['added_standard_error'] * 1e3:.2f})"
            for c in contexts
        )
        lines.append(f"{name:<16}" + "".join(f"{cell:>16}" for cell in cells))
    return lines
