"""`snapmla bench kernels`, `snapmla bench stages` and `snapmla bench throughput`.

From a source tree that is not installed: ``python -m stage3_dataflow.bench_command bench kernels``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stage0_reference.cli import OneLineParser, resolve_device


def register(commands: Any) -> None:
    """Add `bench` to the command line; found through the entry-point group snapmla.commands."""
    bench = commands.add_parser(
        "bench",
        help="measure the kernels, and the engine's tokens per second",
        description="Benchmarks of the fused kernels. Progress goes to stderr.",
    )
    parts = bench.add_subparsers(dest="bench", metavar="BENCHMARK", required=True)
    _add_kernels(parts)
    _add_stages(parts)
    _add_throughput(parts)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report here; it grows as it goes"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json and table.txt here; plots too, of kernels and throughput",
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: auto)"
    )
    parser.add_argument(
        "--page-size", type=int, default=64, metavar="N", help="tokens per cache page (64)"
    )


def _add_shapes(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        metavar="B,H,L[,S]",
        help="requests, heads, cached tokens and query tokens (1); may be given again; "
        f"default: {default}",
    )


def _add_kernels(parts: Any) -> None:
    parser = parts.add_parser(
        "kernels",
        help="every kernel by shape, beside BF16 and other libraries",
        description="Check every kernel against float64, then time it: microseconds, TFLOP/s, "
        "GB/s, shares of what this device copies and multiplies at best, and the speed-up over "
        "BF16 and over FlashInfer and FlashMLA where they are installed. On a CPU small shapes "
        "show that everything runs, without rates.",
    )
    _add_shapes(parser, "eight shapes from 128,128,8192 to 1,128,65536")
    parser.add_argument(
        "--sweep", action="store_true", help="also time lengths from 512 to 65536, for the plot"
    )
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="also 64 requests with log-uniform lengths up to 131072, and as many tokens in "
        "equal lengths",
    )
    parser.add_argument(
        "--peers", choices=("auto", "none"), default="auto", help="other libraries (default: auto)"
    )
    parser.add_argument(
        "--flashmla-ops",
        type=Path,
        metavar="DIR",
        help="folder of vLLM's _flashmla_C and _flashmla_extension_C; default: installed vllm's",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="only rows whose name starts with NAME, such as 'fp8' or k-append; may be given again",
    )
    parser.add_argument(
        "--repeats", type=int, default=50, metavar="N", help="timed replays of each call (50)"
    )
    parser.add_argument(
        "--flush",
        choices=("read", "write"),
        default="read",
        help="how the GPU's L2 cache is emptied before each replay: a buffer is read, or written, "
        "and its lines are then written back during the call (read)",
    )
    _add_output(parser)
    parser.set_defaults(run=run_kernels)


def _add_stages(parts: Any) -> None:
    parser = parts.add_parser(
        "stages",
        help="one layer's attention through every stage's backend",
        description="Time attention as each stage of the course computes it, issued from Python, "
        "and its distance to exact attention. On a CPU a small shape, by the wall clock.",
    )
    _add_shapes(parser, "32,16,8192 and 32,128,8192")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed calls (10)")
    _add_output(parser)
    parser.set_defaults(run=run_stages)


def _add_throughput(parts: Any) -> None:
    parser = parts.add_parser(
        "throughput",
        help="tokens per second of the engine, BF16 cache against FP8 cache",
        description="The engine on two caches of as many bytes: decode steps with every row live, "
        "and whole runs from random prompts to the last token.",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint; default: the shipped model"
    )
    model.add_argument(
        "--geometry",
        choices=("v2-lite",),
        help="DeepSeek-V2-Lite's shape with random weights, 31 GB",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="of --geometry's model, instead of all"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096],
        metavar="N",
        help="tokens of a request at its longest (default: 1024 2048 4096)",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        default=["memory"],
        metavar="N",
        help="most requests at once; 'memory': as many as fit and a graph serves (default: memory)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="generated in whole runs (64)"
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="of each cache; default: 16 requests of the longest context in BF16",
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="timed decode steps (20)"
    )
    parser.add_argument(
        "--prefill-chunk", type=int, default=512, metavar="N", help="of the engine (512)"
    )
    parser.add_argument("--no-whole", action="store_true", help="decode steps only")
    _add_output(parser)
    parser.set_defaults(run=run_throughput)


class _Progress:
    """Lines on stderr, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, text: str) -> None:
        seconds = time.perf_counter() - self._started
        print(f"[{seconds:5.1f} s] {text}", file=sys.stderr, flush=True)


def _command_line(arguments: argparse.Namespace) -> str:
    """Say the options that shape the results, as they could be typed again."""
    words = ["snapmla", arguments.command, arguments.bench]
    for name, value in sorted(vars(arguments).items()):
        if name in ("command", "bench", "run", "json", "out") or value in (None, False):
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif name in ("shape", "only"):
            words += [word for one in value for word in (option, one)]
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return shlex.join(words)


def _checked_device(arguments: argparse.Namespace) -> Any:
    from stage3_dataflow.execution_path import which_path

    if arguments.page_size < 1:
        raise ValueError(f"--page-size must be at least 1; got {arguments.page_size}")
    device = resolve_device(arguments.device)
    which_path(device)  # refuse a GPU that the kernels cannot serve
    return device


def _can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def run_kernels(arguments: argparse.Namespace) -> int:
    """`snapmla bench kernels`: 1 if a kernel is wrong or fails."""
    from stage3_dataflow.bench_cases import parse_shape, ragged_shapes
    from stage3_dataflow.bench_kernels import (
        CPU_SHAPES,
        DEFAULT_SHAPES,
        KernelBenchmark,
        add_speedups,
        failures,
        sweep_shapes,
    )
    from stage3_dataflow.bench_peers import all_peers
    from stage3_dataflow.bench_report import (
        ResultFiles,
        comparison_tables,
        kernel_heading,
        kernel_text,
        shape_table,
        sweep_table,
    )

    device = _checked_device(arguments)
    on_gpu = device.type == "cuda"
    if not on_gpu and (arguments.sweep or arguments.ragged):
        raise ValueError("--sweep and --ragged need a CUDA device; this is a CPU")
    shapes = [parse_shape(text) for text in arguments.shape or ()]
    groups: dict[str, Any] = {"shapes": shapes or (DEFAULT_SHAPES if on_gpu else CPU_SHAPES)}
    if arguments.ragged:
        groups["ragged"] = ragged_shapes(64, 128)
    if arguments.sweep:
        groups["sweep"] = sweep_shapes()
    tables = [name for name in groups if name != "sweep"]
    files = ResultFiles(arguments.json, arguments.out)
    command = _command_line(arguments)
    benchmark = KernelBenchmark(
        device,
        repeats=arguments.repeats if on_gpu else min(arguments.repeats, 3),
        page_size=arguments.page_size,
        peers=all_peers(arguments.flashmla_ops) if arguments.peers == "auto" else [],
        flush=arguments.flush,
        only=tuple(arguments.only or ("",)),
        say=_Progress(),
    )

    printed = 0

    def observe(report: dict[str, Any]) -> None:
        """Keep what there is: in files, and on stdout line by line."""
        nonlocal printed
        report["command"] = command
        add_speedups(report, list(groups))
        text = kernel_text(report, tables)
        files.write(report, text)
        if printed == 0:
            print("\n".join(kernel_heading(report)), flush=True)
        done = [shape for name in tables for shape in report[name]]
        for shape in done[max(printed - 1, 0) :]:
            print("\n".join(["", *shape_table(shape)]), flush=True)
        printed = 1 + len(done)

    report = benchmark.run(groups, observe)
    print("\n".join(comparison_tables(report, tables)))
    if report.get("sweep"):
        print("\n".join(sweep_table(report["sweep"])))
    if arguments.out is not None and on_gpu and _can_plot():
        from stage3_dataflow.bench_plots import plot_kernels

        plot_kernels(report, list(groups), arguments.out)
    wrong = failures(report, list(groups))
    for text in wrong:
        print(f"snapmla bench kernels: {text}", file=sys.stderr)
    return 1 if wrong else 0


def run_stages(arguments: argparse.Namespace) -> int:
    """`snapmla bench stages`: 1 if some stage's output is not finite."""
    from stage3_dataflow.bench_cases import parse_shape
    from stage3_dataflow.bench_report import ResultFiles, stages_text
    from stage3_dataflow.bench_stages import CPU_SHAPES, DEFAULT_SHAPES, measure_stages

    device = _checked_device(arguments)
    on_gpu = device.type == "cuda"
    shapes = [parse_shape(text) for text in arguments.shape or ()]
    files = ResultFiles(arguments.json, arguments.out)
    command = _command_line(arguments)

    def observe(report: dict[str, Any]) -> None:
        report["command"] = command
        files.write(report, stages_text(report))

    report = measure_stages(
        shapes or (DEFAULT_SHAPES if on_gpu else CPU_SHAPES),
        device,
        repeats=arguments.repeats,
        page_size=arguments.page_size,
        observe=observe,
        say=_Progress(),
    )
    print(stages_text(report), end="")
    rows = [row for shape in report["shapes"] for row in shape["rows"]]
    wrong = [row["stage"] for row in rows if not math.isfinite(row["error"])]
    for stage in wrong:
        print(f"snapmla bench stages: {stage}: the output is not finite", file=sys.stderr)
    return 1 if wrong else 0


def run_throughput(arguments: argparse.Namespace) -> int:
    """`snapmla bench throughput`."""
    from stage3_dataflow.bench_report import ResultFiles, throughput_text
    from stage3_dataflow.bench_throughput import (
        Setting,
        ThroughputBenchmark,
        default_memory,
    )
    from stage3_dataflow.execution_path import which_path

    device = _checked_device(arguments)
    if which_path(device).name == "interpreter":
        raise ValueError(
            "throughput would measure Triton's interpreter; unset TRITON_INTERPRET to run the "
            "PyTorch twins"
        )
    most = [None if word == "memory" else _whole_number("--batches", word) for word in
            arguments.batches]  # fmt: skip
    settings = [
        Setting(context, min(arguments.new_tokens, context - 1), batch)
        for context in sorted(arguments.contexts)
        for batch in most
    ]
    say = _Progress()
    decoder = _load_decoder(arguments, device, say)
    longest = decoder.config.max_position_embeddings
    if max(arguments.contexts) > longest:
        raise ValueError(
            f"--contexts must be at most the model's {longest} positions; "
            f"got {max(arguments.contexts)}"
        )
    memory = (
        default_memory(decoder, max(arguments.contexts), arguments.page_size)
        if arguments.memory_gb is None
        else round(arguments.memory_gb * 1e9)
    )
    files = ResultFiles(arguments.json, arguments.out)
    command = _command_line(arguments)
    benchmark = ThroughputBenchmark(
        decoder,
        memory,
        page_size=arguments.page_size,
        steps=arguments.steps,
        prefill_chunk=arguments.prefill_chunk,
        say=say,
    )

    def observe(report: dict[str, Any]) -> None:
        report["command"] = command
        files.write(report, throughput_text(report))
        row = (report["whole"] or report["steady"])[-1]
        rate = row.get("tokens_per_second")
        say(row["failure"] if rate is None else f"{row['running']} at once, {rate:.1f} tokens/s")

    report = benchmark.run(settings, observe, whole_runs=not arguments.no_whole)
    print(throughput_text(report), end="")
    if arguments.out is not None and _can_plot():
        from stage3_dataflow.bench_plots import plot_throughput

        plot_throughput(report, arguments.out / "throughput.png")
    return 0


def _whole_number(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{option} must be whole numbers or 'memory'; got {word!r}") from None


def _load_decoder(arguments: argparse.Namespace, device: Any, say: Any) -> Any:
    """Load the model, or draw one."""
    import torch

    if arguments.geometry is None:
        from stage0_reference.pretrained import load_model

        if arguments.layers is not None:
            raise ValueError("--layers belongs to --geometry")
        say("loading the model")
        dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        return load_model(arguments.model, dtype=dtype, device=device).decoder
    from stage0_reference.decode_benchmark import V2_LITE, random_decoder
    from stage0_reference.model_config import ModelConfig

    if device.type != "cuda":
        raise ValueError("--geometry v2-lite needs a CUDA device with 40 GB or more")
    if arguments.layers is not None and arguments.layers < 1:
        raise ValueError(f"--layers must be at least 1; got {arguments.layers}")
    layers = V2_LITE["num_hidden_layers"] if arguments.layers is None else arguments.layers
    say(f"drawing {layers} layers of DeepSeek-V2-Lite's shape")
    config = ModelConfig.from_dict(V2_LITE | {"num_hidden_layers": layers})
    dtype = torch.bfloat16 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    return random_decoder(config, device, dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run without the installed command: 0, 1 for a wrong kernel, 2 for a refusal."""
    parser = OneLineParser(prog="python -m stage3_dataflow.bench_command")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    register(commands)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except (ValueError, NotImplementedError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
