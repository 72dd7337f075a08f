"""A kernel that writes down the splits as the decode kernel computes them."""

import torch
import triton
import triton.language as tl

from stage3_dataflow.kernels.split_kv_decode import split_bounds
from stage3_dataflow.split_plan import SPLIT_GRANULE


@triton.jit(do_not_specialize=["length", "min_tokens", "max_splits"])
def split_bounds_kernel(found_ptr, length, min_tokens, max_splits, GRANULE: tl.constexpr):
    """Write first and last token of split `program_id(0)`, and behind all how many there are."""
    split = tl.program_id(0)
    start, end, num_splits = split_bounds(length, split, min_tokens, max_splits, GRANULE)
    tl.store(found_ptr + 2 * split, start)
    tl.store(found_ptr + 2 * split + 1, end)
    tl.store(found_ptr + 2 * tl.num_programs(0), num_splits)


def bounds_of(length, rule, splits, device):
    """Bounds of the first splits one after the other, then their number."""
    found = torch.full((2 * splits + 1,), -1, dtype=torch.int32, device=device)
    split_bounds_kernel[(splits,)](found, length, *rule, GRANULE=SPLIT_GRANULE)
    return found.tolist()
