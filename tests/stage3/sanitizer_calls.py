"""Small calls of a decode kernel for compute-sanitizer to watch; a program, and no test.

    compute-sanitizer --tool synccheck python -m tests.stage3.sanitizer_calls [hopper|portable]

(Or `memcheck`.) Every unused slot of the cache holds NaN. What the calls return is compared between
repetitions only: the tests of `test_mla_decode` say whether it is right.
"""

from __future__ import annotations

import sys

import torch

from stage3_dataflow import mla_decode
from stage3_dataflow.decode import Kernel
from tests.stage3.cached_requests import assert_same_bits, batch_of
from tests.stage3.test_mla_decode import EVERY_64, UNSPLIT
from tests.strategies import DecodeCase

ROWS = ((16, 1), (20, 2), (32, 1), (64, 1), (64, 2))
"""Heads and query tokens: each tile of the Hopper kernel, and two tiles."""
FEW = (0, 1, 65, 300)
MANY = ((143, 16, 1), (73, 128, 1), (71, 64, 2))
"""Requests, heads and query tokens: more items than an H200 has multiprocessors."""


def run(
    kernel: Kernel, heads: int, s_q: int, page_size: int, token_counts: tuple[int, ...]
) -> None:
    """Decode with and without splits, twice each: the second call finds what the first left."""
    case = DecodeCase(
        heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=page_size,
        token_counts=token_counts,
        s_q=s_q,
        regime="normal",
        spread=8.0,
        dtype=torch.bfloat16,
        seed=0,
    )
    batch = batch_of(case, torch.device("cuda"))
    for rule in (UNSPLIT, EVERY_64):
        first = mla_decode(*batch, split_rule=rule, kernel=kernel)
        assert bool(first.out.isfinite().all())
        assert_same_bits(mla_decode(*batch, split_rule=rule, kernel=kernel), first)


def main() -> None:
    kernel: Kernel = "portable" if "portable" in sys.argv[1:] else "hopper"
    for page_size in (64, 16):
        for heads, s_q in ROWS:
            run(kernel, heads, s_q, page_size, FEW)
    for requests, heads, s_q in MANY:
        run(kernel, heads, s_q, 64, tuple(7 * request % 150 for request in range(requests)))
    torch.cuda.synchronize()
    print(f"{kernel}: {4 * (2 * len(ROWS) + len(MANY))} calls")


if __name__ == "__main__":
    main()
