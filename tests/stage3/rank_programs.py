"""What the processes of a group run: ``python -m tests.stage3.rank_programs NAME DIR RANK SIZE``.

A program's result is written to ``DIR/NAME-RANK-of-SIZE.json``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stage0_reference.absorbed_backend import AbsorbedBackend
from stage0_reference.generation import TextGenerator
from stage0_reference.pretrained import load_decoder, shipped_checkpoint
from stage0_reference.sampling import SamplingParams
from stage3_dataflow.context_parallel import ContextParallelBackend
from stage3_dataflow.parallel_demo import clear
from stage3_dataflow.rank_group import (
    Ranks,
    StepGuard,
    connected,
    gather_text,
    same_bytes,
    sum_over_ranks,
)
from stage3_dataflow.tensor_parallel import load_tensor_parallel
from stage3_dataflow.triton_backend import FusedBackend

PROMPTS = [list(b"def main():\n    parser = "), list(b"import os\nimport re\n\n\nclass Token:\n")]
GREEDY = SamplingParams(max_new_tokens=6)
POOL: dict[str, Any] = {"num_pages": 16, "page_size": 8, "prefill_chunk": 16, "decode_rows": 2}
"""Small pages, so that a request has several on each rank."""


def generate(decoder: Any, backend: Any) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens of `PROMPTS`, and the cache."""
    generator = TextGenerator(decoder, backend, **POOL)
    clear(generator.cache)
    completions = generator.generate(PROMPTS, GREEDY)
    return [completion.token_ids for completion in completions], generator.cache


def exact() -> AbsorbedBackend:
    """Attention over a float64 cache: nothing rounds to a coarse format and so nothing can flip."""
    return AbsorbedBackend(torch.float64)


def agree(ranks: Ranks) -> dict[str, Any]:
    """Both ways to use several ranks, on the shipped checkpoint in float64."""
    result: dict[str, Any] = {}
    decoder = load_tensor_parallel(shipped_checkpoint(), ranks, dtype=torch.float64)
    tokens, cache = generate(decoder, exact())
    result["tensor"] = tokens
    result["tensor_caches_equal"] = same_bytes(ranks, [p for layer in cache for p in layer])
    result["parameters"] = sum(p.numel() for p in decoder.parameters())
    narrow = load_tensor_parallel(shipped_checkpoint(), ranks, dtype=torch.float32)
    _, cache = generate(narrow, FusedBackend())
    result["fp8_caches_equal"] = same_bytes(ranks, [p for layer in cache for p in layer])

    whole = load_decoder(shipped_checkpoint(), dtype=torch.float64)
    StepGuard(whole, ranks)
    result["context"], cache = generate(whole, ContextParallelBackend(exact(), ranks))
    result["pages"] = len(cache[0][0])
    written = int((cache[0].c_kv != 0.0).any(-1).sum())
    result["tokens_cached_here"] = written

    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64):
        mine = torch.full((2, 3), float(ranks.rank)).to(dtype)
        gathered = ranks.gather(mine)
        assert gathered.dtype == dtype and gathered.shape == (ranks.size, 2, 3)
        assert gathered.float()[:, 1, 2].tolist() == list(range(ranks.size))
    assert ranks.gather(torch.empty(0, 4)).shape == (ranks.size, 0, 4)
    assert gather_text(ranks, "ä" * ranks.rank) == ["ä" * rank for rank in range(ranks.size)]
    return result


def one_fails(ranks: Ranks) -> None:
    """The last rank fails while the others wait for it."""
    if ranks.rank == ranks.size - 1:
        raise ValueError("this one is\nbroken")
    sum_over_ranks(ranks, torch.ones(3))


def one_stops(ranks: Ranks) -> None:
    """The last rank waits on for ever: only the time limit can end the others."""
    if ranks.rank < ranks.size - 1:
        sum_over_ranks(ranks, torch.ones(3))
    else:
        time.sleep(600.0)


def gloo_threads() -> list[str]:
    """Threads of a group that is not gone; a thread that has ended may be listed for a moment."""
    deadline = time.monotonic() + 5.0
    while True:
        names = []
        for thread in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it went away
                names.append(thread.read_text().strip())
        left = [name for name in names if "gloo" in name]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


if __name__ == "__main__":
    name, directory, rank, size = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    with connected(
        "cpu",
        init_method=f"file://{directory}/{name}-of-{size}",
        rank=rank,
        size=size,
        timeout_seconds=2.0 if name == "one_stops" else 60.0,
    ) as this:
        outcome = globals()[name](this)
    outcome["gloo_threads"] = gloo_threads()
    (directory / f"{name}-{rank}-of-{size}.json").write_text(json.dumps(outcome))
