"""The `snapmla` command: generate text, measure held-out loss, show the stages side by side.

Results go to stdout, everything else to stderr, so that `--json` can be piped. A later stage adds a
subcommand by naming, in the entry-point group ``snapmla.commands``, a function that takes the
subparsers and registers itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

COMMANDS_GROUP = "snapmla.commands"
"""Entry-point group of functions that register further subcommands."""

DEMO_PROMPT = '''"""Small helpers for files of settings."""

import json
import math
import os


class Settings:
    """Read and write a dictionary of settings as JSON."""

    def __init__(self, path):
        self.path = path
        self.values = {}

    def load(self):
'''
DEMO_CONTEXTS = (512, 2048)
"""At 4096, stages 2 and 3 take minutes on two CPU cores: they walk 64-token blocks in Python."""


def _version() -> str:
    try:
        return version("snapmla")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Assemble the command line, with the subcommands of installed later stages."""
    parser = OneLineParser(
        prog="snapmla",
        description="Run a Multi-head Latent Attention decoder on text, one technique a stage.",
        epilog="Start with: snapmla generate 'def fibonacci(n):'",
    )
    parser.add_argument("--version", action="version", version=f"snapmla {_version()}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    _add_generate(commands)
    _add_eval(commands)
    _add_demo(commands)
    for entry in entry_points(group=COMMANDS_GROUP):
        entry.load()(commands)
    return parser


@functools.cache  # several subcommands show it
def _describe_stages() -> str:
    from stage0_reference.attention_backend import available_stages, load_backend

    return "; ".join(f"{stage}: {load_backend(stage).description}" for stage in available_stages())


def add_model_arguments(
    parser: argparse.ArgumentParser, *, stage: bool = True, model: bool = True
) -> None:
    """Add the arguments of subcommands that run a model; `stage` and `model` can be left out."""
    group = parser.add_argument_group("model")
    if model:
        group.add_argument(
            "--model",
            type=Path,
            metavar="DIR",
            help="checkpoint directory as on the Hugging Face hub (config.json, *.safetensors, "
            "tokenizer.json); default: the small Python model that ships with the package",
        )
    if stage:
        group.add_argument(
            "--stage",
            type=int,
            default=0,
            metavar="K",
            help=f"how attention is computed; {_describe_stages()} (default: 0)",
        )
    group.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one (default: auto)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32", "float64"),
        help="of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU, where "
        "it is faster. The cache keeps its stage's own format (default: auto)",
    )
    if model:
        group.add_argument(
            "--page-size",
            type=int,
            default=64,
            metavar="N",
            help="tokens per cache page (default: 64)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue PROMPT. The text streams to stdout; a summary follows on stderr.",
        epilog="examples: snapmla generate 'import os' --max-new-tokens 200 ; "
        "snapmla generate --json 'class Stack:' ; cat file.py | snapmla generate -",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads stdin")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="at most N tokens (128)"
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (default); 0.6 to 1 varies",
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all"
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens that make up P of the probability (default: 1, all)",
    )
    sampling.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random draws (default: 0)"
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end-of-text token"
    )
    add_model_arguments(parser)
    parser.set_defaults(run=run_generate)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure held-out loss at a context length",
        description="Mean loss (nats per token) of held-out text when the model may look back at "
        "most N tokens, through the stage's own cache. The scored tokens are the same for every "
        "N up to --longest-context, so two runs differ only by context or stage.",
    )
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="tokens of context (default: 4096)"
    )
    parser.add_argument(
        "--longest-context",
        type=int,
        default=4096,
        metavar="N",
        help="score only places that have this much context (default: 4096)",
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=32,
        metavar="N",
        help="windows of 256 scored tokens each; 0 takes all (default: 32)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="score this file instead of the shipped held-out files; may be given again",
    )
    add_model_arguments(parser)
    parser.set_defaults(run=run_eval)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run the shipped model through every installed stage",
        description="A prompt, its continuation, speed, cache bytes and held-out loss: one column "
        "per installed stage.",
    )
    parser.add_argument(
        "--windows", type=int, default=2, metavar="N", help="held-out windows (default: 2)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=240, metavar="N", help="to generate (default: 240)"
    )
    add_model_arguments(parser, stage=False)
    # Sampled: greedy text of a small model soon repeats itself. The seed is fixed.
    parser.set_defaults(run=run_demo, temperature=0.8, seed=1)


def resolve_device(name: str) -> Any:
    """Turn `--device` into a torch device.

    Raises
    ------
    ValueError
        Not a device that this machine has.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be auto, cpu or cuda[:N]; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda[:N]; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name} is not on this machine ({torch.cuda.device_count()} CUDA devices)"
        )
    return device


def load_from_arguments(arguments: argparse.Namespace) -> Any:
    """Load the model that `add_model_arguments` described."""
    import torch

    from stage0_reference.attention_backend import load_backend
    from stage0_reference.pretrained import load_model

    device = resolve_device(arguments.device)
    if getattr(arguments, "page_size", 1) < 1:
        raise ValueError(f"--page-size must be at least 1; got {arguments.page_size}")
    load_backend(getattr(arguments, "stage", 0))  # refuse before a large model loads
    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    directory = getattr(arguments, "model", None)
    return load_model(directory, dtype=dtype, device=device, progress=directory is not None)


def _describe(decoder: Any, backend: Any) -> dict[str, Any]:
    return {
        "stage": backend.stage,
        "attention": backend.description,
        "device": str(decoder.device),
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }


def generate_report(
    model: Any, arguments: argparse.Namespace, prompt: str, *, stage: int, stream_text: bool
) -> dict[str, Any]:
    """Generate from `prompt` and say what came out and how fast.

    Returns
    -------
    dict
        text, token_ids, finish_reason, tokens_per_second (decode), prefill_tokens_per_second,
        cache_bytes_per_token (all layers), cache_bytes_per_token_per_layer and what ran.
    """
    from stage0_reference.attention_backend import load_backend
    from stage0_reference.generation import TextGenerator, pages_needed

    decoder, tokenizer = model
    backend = load_backend(stage)
    ignore_eos = getattr(arguments, "ignore_eos", False)
    params = sampling_params(arguments, () if ignore_eos else tokenizer.eos_token_ids)
    prompt_ids = tokenizer.encode(prompt)
    longest = min(len(prompt_ids) + params.max_new_tokens, decoder.config.max_position_embeddings)
    generator = TextGenerator(
        decoder,
        backend,
        num_pages=max(1, pages_needed([longest], arguments.page_size)),
        page_size=arguments.page_size,
        decode_rows=1,
    )
    text = tokenizer.stream()
    for token in prompt_ids:  # a word's leading space may depend on what stands before it
        text.push(token)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if stream_text:
            print(piece, end="", flush=True)

    steps = generator.stream([prompt_ids], params)  # refuses before anything is printed
    if stream_text:
        print(prompt, end="", flush=True)
    token_ids: list[int] = []
    finish_reason = None
    for step in steps:
        if step.token_id is not None:
            token_ids.append(step.token_id)
            show(text.push(step.token_id))
        finish_reason = step.finish_reason
    show(text.flush())
    if stream_text:
        print()
    times = generator.times
    return {
        **_describe(decoder, backend),
        "prompt_tokens": len(prompt_ids),
        "text": "".join(pieces),
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "tokens_per_second": (
            round(times.decode_tokens / times.decode_seconds, 2) if times.decode_tokens else None
        ),
        "prefill_tokens_per_second": round(
            times.prefill_tokens / max(times.prefill_seconds, 1e-9), 2
        ),
        "cache_bytes_per_token": generator.cache_bytes_per_token,
        "cache_bytes_per_token_per_layer": generator.cache_bytes_per_token
        // decoder.config.num_hidden_layers,
    }


def sampling_params(arguments: argparse.Namespace, stop_token_ids: Sequence[int]) -> Any:
    """Read the sampling arguments; `demo` fixes temperature and seed and has no filters."""
    from stage0_reference.sampling import SamplingParams

    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=getattr(arguments, "temperature", 0.0),
        top_k=getattr(arguments, "top_k", 0),
        top_p=getattr(arguments, "top_p", 1.0),
        seed=getattr(arguments, "seed", 0),
        stop_token_ids=tuple(stop_token_ids),
    )


def print_json(report: Any) -> None:
    """Print one line of strict JSON: a number that is not finite becomes null."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [strict(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(strict(report), allow_nan=False))


def _rate(report: dict[str, Any]) -> str:
    rate = report["tokens_per_second"]
    return "-" if rate is None else f"{rate:.1f}"


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin must be UTF-8 text: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} must be UTF-8 text: {error}") from error


def _unit(tokenizer: Any) -> str:
    """Name what a token is: the shipped model's are bytes."""
    from stage0_reference.tokenizer import ByteTokenizer

    return "byte" if isinstance(tokenizer, ByteTokenizer) else "token"


def run_generate(arguments: argparse.Namespace) -> int:
    """`snapmla generate`."""
    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise ValueError("PROMPT must not be empty")
    sampling_params(arguments, ())  # refuse what can be refused before a large model loads
    model = load_from_arguments(arguments)
    report = generate_report(
        model, arguments, prompt, stage=arguments.stage, stream_text=not arguments.json
    )
    if arguments.json:
        print_json(report)
    else:
        print(
            f"[stage {report['stage']}: {report['attention']}; {report['device']}, "
            f"{report['dtype']}]\n"
            f"[{len(report['token_ids'])} tokens ({report['finish_reason']}), "
            f"{_rate(report)} tokens/s; cache "
            f"{report['cache_bytes_per_token_per_layer']} bytes per token and layer]",
            file=sys.stderr,
        )
    return 0


def eval_report(
    model: Any, arguments: argparse.Namespace, *, stage: int, context: int, longest_context: int
) -> dict[str, Any]:
    """Held-out loss as a dictionary: loss, standard_error, tokens, windows, and what ran."""
    from tqdm import tqdm

    from stage0_reference.attention_backend import load_backend
    from stage0_reference.evaluation import choose_windows, heldout_loss
    from stage0_reference.training.corpus import load_heldout

    decoder, tokenizer = model
    backend = load_backend(stage)
    if context > decoder.config.max_position_embeddings:
        raise ValueError(
            f"--context must be at most the model's {decoder.config.max_position_embeddings} "
            f"positions; got {context}"
        )
    files = getattr(arguments, "text", None)
    texts = (
        [_read_text(path) for path in files]
        if files
        else [data.decode("utf-8") for _, data in load_heldout()]
    )
    windows = choose_windows(
        [tokenizer.encode(text) for text in texts],
        context,
        longest_context=max(context, longest_context),
        max_windows=arguments.windows or None,
    )
    with tqdm(
        total=len(windows), desc=f"stage {stage}, context {context}", unit="window", disable=None
    ) as bar:
        result = heldout_loss(
            decoder,
            backend,
            windows,
            page_size=arguments.page_size,
            progress=lambda done: bar.update(done - bar.n) and None,
        )
    return {
        **_describe(decoder, backend),
        "context": context,
        "loss": round(result.loss, 6),
        "standard_error": round(result.standard_error, 6),
        "tokens": result.tokens,
        "windows": result.windows,
    }


def _check_windows(arguments: argparse.Namespace) -> None:
    if arguments.windows < 0:
        raise ValueError(f"--windows must be at least 0 (0 takes all); got {arguments.windows}")


def run_eval(arguments: argparse.Namespace) -> int:
    """`snapmla eval`."""
    _check_windows(arguments)
    model = load_from_arguments(arguments)
    report = eval_report(
        model,
        arguments,
        stage=arguments.stage,
        context=arguments.context,
        longest_context=arguments.longest_context,
    )
    if arguments.json:
        print_json(report)
    else:
        print(
            f"loss {report['loss']:.4f} nats/{_unit(model.tokenizer)} (standard error "
            f"{report['standard_error']:.4f} over {report['windows']} windows, "
            f"{report['tokens']} tokens)\n"
            f"context {report['context']}, stage {report['stage']}: {report['attention']}; "
            f"{report['device']}, {report['dtype']}"
        )
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """`snapmla demo`: every installed stage on the shipped model (or `--model`)."""
    from stage0_reference.attention_backend import available_stages

    _check_windows(arguments)
    sampling_params(arguments, ())
    model = load_from_arguments(arguments)
    stages = available_stages()
    longest = model.decoder.config.max_position_embeddings
    contexts = sorted({min(context, longest) for context in DEMO_CONTEXTS})
    columns = []
    for stage in stages:
        show = stage == stages[0] and not arguments.json
        report = generate_report(model, arguments, DEMO_PROMPT, stage=stage, stream_text=show)
        report["heldout_loss"] = {
            context: eval_report(
                model, arguments, stage=stage, context=context, longest_context=max(contexts)
            )
            for context in contexts
        }
        columns.append(report)
    if arguments.json:
        print_json({"stages": columns})
        return 0
    first = columns[0]
    rows: list[tuple[str, list[str]]] = [
        ("tokens/s", [_rate(c) for c in columns]),
        (
            "cache bytes per token and layer",
            [str(c["cache_bytes_per_token_per_layer"]) for c in columns],
        ),
    ]
    unit = _unit(model.tokenizer)
    for context in contexts:
        rows.append(
            (
                f"held-out nats/{unit}, context {context}",
                [f"{c['heldout_loss'][context]['loss']:.4f}" for c in columns],
            )
        )
    rows.append(
        (
            "generated tokens like stage 0's",
            [str(_common_length(c["token_ids"], first["token_ids"])) for c in columns],
        )
    )
    width = max(len(label) for label, _ in rows)
    print(f"\n{'':{width}}" + "".join(f"{f'stage {c}':>11}" for c in stages))
    for label, cells in rows:
        print(f"{label:{width}}" + "".join(f"{cell:>11}" for cell in cells))
    tokens = first["heldout_loss"][contexts[0]]["tokens"]
    print(
        f"\n{first['device']}, {first['dtype']}; {len(first['token_ids'])} tokens generated, "
        f"loss over {tokens} held-out {unit}s"
    )
    return 0


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens agree before the first that differs."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 2 with one line on stderr for anything the caller can put right."""
    parsed = None
    try:
        parsed = build_parser().parse_args(arguments)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away (`| head`); a second flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if parsed is None or not _is_refusal(error):
            raise
        # A checkpoint's faults are many lines; the summary has the first of each kind.
        text = " ".join(getattr(error, "summary", str(error)).split())
        print(f"snapmla {parsed.command}: error: {text}", file=sys.stderr)
        return 2
    return status


def _is_refusal(error: Exception) -> bool:
    """Tell a refusal that names its remedy from a bug, whose traceback is wanted."""
    import torch

    from stage0_reference.page_allocator import OutOfPages

    refusals = (ValueError, OSError, NotImplementedError, OutOfPages, torch.OutOfMemoryError)
    # On a CPU torch has no error of its own for memory that is not to be had.
    return isinstance(error, refusals) or "allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
