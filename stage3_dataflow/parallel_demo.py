"""Generate from one prompt on several ranks, and show what each of them holds.

    torchrun --nproc-per-node 2 -m stage3_dataflow.parallel_demo tensor 'def main():'
    torchrun --nproc-per-node 2 -m stage3_dataflow.parallel_demo context --stage 3 'def main():'

Every rank runs this file from top to bottom, with the same arguments; the first one prints. Without
torchrun it runs on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stage0_reference.attention_backend import LayerCache, load_backend
from stage0_reference.cli import OneLineParser
from stage0_reference.decoder import Decoder
from stage0_reference.generation import TextGenerator
from stage0_reference.latent_cache import as_bytes
from stage0_reference.page_allocator import pages_for
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from stage0_reference.tokenizer import load_tokenizer
from stage3_dataflow.context_parallel import ContextParallelBackend
from stage3_dataflow.rank_group import Ranks, StepGuard, connected, require_same, same_bytes
from stage3_dataflow.tensor_parallel import TensorParallelDecoder, load_tensor_parallel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module docstring."""
    options = _parser().parse_intermixed_args(arguments)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # for one rank without torchrun
    os.environ.setdefault("MASTER_PORT", "0")
    with connected(options.device, timeout_seconds=options.timeout) as ranks:
        report = run(options, ranks)
        if ranks.rank == 0:
            print(json.dumps(report) if options.json else _text(report), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="parallel_demo", description="Generate from one prompt on several ranks."
    )
    parser.add_argument(
        "way",
        choices=("tensor", "context"),
        help="tensor: heads, inner widths and experts are split; context: the cache's pages are",
    )
    parser.add_argument("prompt", nargs="?", default="import os\n", help="text to continue")
    parser.add_argument("--model", type=Path, default=shipped_checkpoint(), metavar="DIR")
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="attention (default: 0)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N")
    parser.add_argument("--page-size", type=int, default=64, metavar="N")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: by device")
    parser.add_argument("--device", metavar="NAME", help="default: a GPU for each rank, or the CPU")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for other ranks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Generate on this rank, in step with the others, and report.

    Raises
    ------
    RuntimeError
        Ranks that should agree do not.
    """
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    tokenizer = load_tokenizer(options.model)
    backend = load_backend(options.stage)
    decoder: Decoder
    if options.way == "tensor":
        decoder = load_tensor_parallel(options.model, ranks, dtype=dtype)
    else:
        decoder = load_decoder(options.model, dtype=dtype, device=ranks.device)
        StepGuard(decoder, ranks)
        backend = ContextParallelBackend(backend, ranks)

    prompt = tokenizer.encode(options.prompt)
    num_pages = pages_for(len(prompt) + options.max_new_tokens, options.page_size)
    generator = TextGenerator(decoder, backend, num_pages=num_pages, page_size=options.page_size)
    clear(generator.cache)
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens, stop_token_ids=tokenizer.eos_token_ids
    )
    (completion,) = generator.generate([prompt], params)
    require_same(ranks, {"token_ids": completion.token_ids})
    report = {
        "way": options.way,
        "ranks": ranks.size,
        "device": ranks.device.type,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "attention": backend.description,
        "parameters_on_a_rank": sum(p.numel() for p in decoder.parameters()),
        "heads_on_a_rank": decoder.config.num_attention_heads,
        "pages_on_a_rank": generator.cache[0][0].shape[0],
        "pages": num_pages,
        "tokens_per_second": generator.times.decode_tokens / (generator.times.decode_seconds or 1),
        "prompt": options.prompt,
        "text": tokenizer.decode(completion.token_ids),
        "token_ids": completion.token_ids,
    }
    if isinstance(decoder, TensorParallelDecoder):
        report["heads"] = decoder.whole_config.num_attention_heads
        report["cache_same_on_all_ranks"] = same_bytes(
            ranks, [plane for layer in generator.cache for plane in layer]
        )
        if not report["cache_same_on_all_ranks"]:
            raise RuntimeError("the ranks' caches differ: are their GPUs of one kind?")
    return report


def clear(cache: Sequence[LayerCache]) -> None:
    """Zero a cache's planes, so that slots nobody writes can be compared too."""
    for layer in cache:
        for plane in layer:
            as_bytes(plane).zero_()


def _text(report: dict[str, Any]) -> str:
    held = (
        f"{report['heads_on_a_rank']} of {report['heads']} heads; the cache has the same bytes on "
        "all ranks"
        if report["way"] == "tensor"
        else f"{report['pages_on_a_rank']} of {report['pages']} pages of the cache"
    )
    return "\n".join(
        [
            f"{report['way']} parallel, ranks: {report['ranks']} ({report['device']}, "
            f"{report['dtype']}); attention: {report['attention']}",
            f"on a rank: {report['parameters_on_a_rank'] / 1e6:.2f} million parameters, {held}",
            f"{report['tokens_per_second']:.1f} tokens/s",
            "",
            report["prompt"] + report["text"],
        ]
    )


if __name__ == "__main__":
    main()
