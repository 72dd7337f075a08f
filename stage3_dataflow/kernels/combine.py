"""Merge the partial results of a row's splits, weighted by their lse.

Requests of one split wrote their output themselves and are passed over. Splits are joined in order,
`BLOCK_SPLITS` at a time, so the bits depend on the request's own number of splits only. Its meaning
is `stage2_pv_pipeline.rescaled_pv.merge_partials`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import to_float
from stage3_dataflow.kernels.split_kv_decode import BAD_PAGE, readable_length, split_bounds


@triton.jit(do_not_specialize=["capacity", "min_tokens", "max_splits", "partial_splits"])
def combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    seqlens_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    capacity,
    min_tokens,
    max_splits,
    partial_splits,
    LATENT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SPLIT_GRANULE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge one row. Grid: (rows, requests)."""
    row = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = readable_length(seqlens_ptr, request, capacity)
    _, _, num_splits = split_bounds(length, 0, min_tokens, max_splits, SPLIT_GRANULE)
    if num_splits == 1:
        return

    first = request * partial_splits * num_rows + row
    column = tl.arange(0, LATENT)
    running_max = float("-inf")
    denominator = 0.0
    accumulator = tl.zeros([LATENT], tl.float32)
    met_bad_page = False
    for block in range(0, num_splits, BLOCK_SPLITS):
        split = block + tl.arange(0, BLOCK_SPLITS)
        written = split < num_splits  # what nobody wrote is not read
        place = first + split * num_rows
        lse = tl.load(partial_lse_ptr + place, mask=written, other=float("-inf"))
        met_bad_page = met_bad_page | (tl.max((lse == BAD_PAGE).to(tl.int32), axis=0) > 0)
        block_max = tl.maximum(running_max, tl.max(lse, axis=0))
        shift = tl.where(block_max == float("-inf"), 0.0, block_max)
        weight = tl.exp(lse - shift)  # [BLOCK_SPLITS]; NaN only behind a bad page
        decay = tl.exp(running_max - shift)
        partial = tl.load(
            partial_out_ptr + place[:, None] * LATENT + column[None, :],
            mask=(written & (weight > 0.0))[:, None],
            other=0.0,
        )
        denominator = denominator * decay + tl.sum(weight, axis=0)
        accumulator = accumulator * decay + tl.sum(weight[:, None] * partial, axis=0)
        running_max = block_max

    empty = met_bad_page | (denominator == 0.0)
    denominator = tl.where(empty, 1.0, denominator)
    out = tl.where(empty, 0.0, accumulator / denominator)
    lse = tl.where(empty, float("-inf"), running_max + tl.log(denominator))
    place = request * num_rows + row
    tl.store(lse_ptr + place, lse)
    tl.store(
        out_ptr + place * LATENT + column, to_float(out, out_ptr.dtype.element_ty, INTERPRETED)
    )
