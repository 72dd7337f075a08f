"""Merge partial results of disjoint keys, one after the other, weighted by their lse.

A program takes a row. All parts are added in their order, so every rank gets the same bits from the
same gathered bytes. Its meaning is `stage2_pv_pipeline.rescaled_pv.merge_partials`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import to_float


@triton.jit(do_not_specialize=["outs_stride_part", "lses_stride_part"])
def merge_ranks_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    outs_stride_part,
    outs_stride_row,
    lses_stride_part,
    lses_stride_row,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge one row's parts. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    lses_ptr += row * lses_stride_row
    outs_ptr += row * outs_stride_row
    row_max = tl.full([], float("-inf"), tl.float32)
    lse_at = lses_ptr
    for _ in tl.static_range(PARTS):
        row_max = tl.maximum(row_max, tl.load(lse_at))  # drops NaN, which its weight brings back
        lse_at += lses_stride_part  # a step each, as their product may be beyond int32
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)

    denominator = tl.zeros([], tl.float32)
    accumulator = tl.zeros([BLOCK_WIDTH], tl.float32)
    for _ in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses_ptr) - shift)
        partial = tl.load(outs_ptr + column, mask=column < WIDTH, other=0.0)
        lses_ptr += lses_stride_part
        outs_ptr += outs_stride_part
        denominator += weight
        accumulator += tl.where(weight == 0.0, 0.0, weight * partial)  # whatever stands there

    empty = denominator == 0.0
    denominator = tl.where(empty, 1.0, denominator)
    out = tl.where(empty, 0.0, accumulator / denominator)
    tl.store(
        out_ptr + row * WIDTH + column,
        to_float(out, out_ptr.dtype.element_ty, INTERPRETED),
        mask=column < WIDTH,
    )
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), shift + tl.log(denominator)))
