"""Rotary embedding of a tile of rows, in registers."""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rounding import to_float


@triton.jit
def load_rotated(
    x_ptr,
    row_offsets,
    row_mask,
    cos_ptr,
    sin_ptr,
    angle_offsets,
    ROPE: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Load rows of pairs and rotate them; give first and second elements of all pairs, float32.

    The result is rounded to the input's dtype and widened again, as the unfused decoder does.
    Rows where `row_mask` is false are 0.
    """
    pair = tl.arange(0, ROPE // 2)
    mask = row_mask[:, None]
    dtype = x_ptr.dtype.element_ty
    base = x_ptr + row_offsets[:, None]
    if ROTATE and INTERLEAVED:  # adjacent elements in, halves out
        both = tl.load(base + tl.arange(0, ROPE)[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (row_offsets.shape[0], ROPE // 2, 2)))
    else:
        first = tl.load(base + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(base + (pair + ROPE // 2)[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        angles = angle_offsets[:, None] + pair[None, :]
        cos = tl.load(cos_ptr + angles, mask=mask, other=1.0)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
        turned_first = to_float(first * cos - second * sin, dtype, INTERPRETED)
        turned_second = to_float(second * cos + first * sin, dtype, INTERPRETED)
        first, second = turned_first.to(tl.float32), turned_second.to(tl.float32)
    return first, second
