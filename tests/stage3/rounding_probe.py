"""Kernels that apply the device helpers of `stage3_dataflow.kernels.rounding` to what they get."""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import (
    divide_rows,
    row_amax,
    snap_to_e4m3,
    to_e4m3,
    to_float,
    token_scale,
)


@triton.jit
def round_kernel(
    x_ptr, codes_ptr, snapped_ptr, bf16_ptr, count, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Round float32 to e4m3, to e4m3's values in float32, and to BF16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    tl.store(codes_ptr + at, to_e4m3(x, INTERPRETED), mask=live)
    tl.store(snapped_ptr + at, snap_to_e4m3(x), mask=live)
    tl.store(bf16_ptr + at, to_float(x, tl.bfloat16, INTERPRETED), mask=live)


@triton.jit
def scale_kernel(
    x_ptr,
    amax_ptr,
    scale_ptr,
    quotient_ptr,
    count,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    POW2: tl.constexpr,
):
    """Give each row's largest magnitude, its scale, and the row divided by it."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    live = row < count
    place = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + place, mask=live[:, None], other=0.0)
    amax = row_amax(x)
    scale = token_scale(amax, POW2)
    tl.store(amax_ptr + row, amax, mask=live)
    tl.store(scale_ptr + row, scale, mask=live)
    tl.store(quotient_ptr + place, divide_rows(x, scale, POW2), mask=live[:, None])
