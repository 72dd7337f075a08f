"""Merge the partial results of a row's splits, weighted by their lse.

Requests of one split wrote their output themselves and are passed over. A program takes a row's
`BLOCK_WIDTH` channels and its splits `BLOCK_SPLITS` at a time, in order, so the bits depend on the
request's own number of splits only. All lse are read first, `BLOCK_LSES` at a time: the partials
then wait for nothing. Its meaning is `stage2_pv_pipeline.rescaled_pv.merge_partials`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import to_float
from stage3_dataflow.kernels.split_kv_decode import BAD_PAGE, readable_length, split_bounds


@triton.jit(
    do_not_specialize=["num_rows", "capacity", "min_tokens", "max_splits", "partial_splits"]
)
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
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_LSES: tl.constexpr,
    SPLIT_GRANULE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge some channels of one row. Grid: (rows, requests, channel blocks)."""
    row = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = readable_length(seqlens_ptr, request, capacity)
    _, _, num_splits = split_bounds(length, 0, min_tokens, max_splits, SPLIT_GRANULE)
    if num_splits == 1:
        return

    first = request * partial_splits * num_rows + row
    row_max = float("-inf")
    met_bad_page = False
    for block in range(0, num_splits, BLOCK_LSES):
        split = block + tl.arange(0, BLOCK_LSES)
        lse = tl.load(
            partial_lse_ptr + first + split * num_rows,
            mask=split < num_splits,  # what nobody wrote is not read
            other=float("-inf"),
        )
        met_bad_page = met_bad_page | (tl.max((lse == BAD_PAGE).to(tl.int32), axis=0) > 0)
        row_max = tl.maximum(row_max, tl.max(lse, axis=0))

    shift = tl.where(met_bad_page | (row_max == float("-inf")), 0.0, row_max)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    denominator = 0.0
    accumulator = tl.zeros([BLOCK_WIDTH], tl.float32)
    for block in range(0, num_splits, BLOCK_SPLITS):
        split = block + tl.arange(0, BLOCK_SPLITS)
        written = split < num_splits
        place = first + split * num_rows
        partial = tl.load(
            partial_out_ptr + place[:, None] * LATENT + column[None, :],
            mask=written[:, None],
            other=0.0,
        )
        lse = tl.load(partial_lse_ptr + place, mask=written, other=float("-inf"))
        lse = tl.where(met_bad_page, float("-inf"), lse)  # the whole row is empty then
        weight = tl.exp(lse - shift)  # [BLOCK_SPLITS]
        partial = tl.where((lse == float("-inf"))[:, None], 0.0, partial)  # whatever stands there
        denominator += tl.sum(weight, axis=0)
        accumulator += tl.sum(weight[:, None] * partial, axis=0)

    empty = denominator == 0.0
    denominator = tl.where(empty, 1.0, denominator)
    out = tl.where(empty, 0.0, accumulator / denominator)
    place = request * num_rows + row
    tl.store(
        out_ptr + place * LATENT + column, to_float(out, out_ptr.dtype.element_ty, INTERPRETED)
    )
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + place, tl.where(empty, float("-inf"), shift + tl.log(denominator)))
