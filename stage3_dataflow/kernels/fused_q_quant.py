"""Fused-Q-Quant: rotate the rotary query, quantise the latent query, align, in one launch.

One program takes `BLOCK_ROWS` rows; a row is one query token's head. Unfused, these are five passes
over the query; here it is read once and written once, 1152 bytes in and 644 out for a BF16 row.
Its meaning is `stage3_dataflow.write_references.fused_q_quant_reference`.
"""

import triton
import triton.language as tl

from stage3_dataflow.kernels.rotary import load_rotated
from stage3_dataflow.kernels.rounding import (
    BF16_MAX,
    LATENT_MAX,
    clamp,
    divide_rows,
    row_amax,
    to_e4m3,
    to_float,
    token_scale,
)


@triton.jit(do_not_specialize=["num_rows", "s_q"])
def fused_q_quant_kernel(
    q_latent_ptr,
    q_rope_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scale_ptr,
    rope_ptr,
    num_rows,
    heads,
    s_q,
    latent_stride_batch,
    latent_stride_query,
    latent_stride_head,
    rope_stride_batch,
    rope_stride_query,
    rope_stride_head,
    angle_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    POW2: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantise rows of [batch, s_q, heads, .]; outputs are contiguous."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    token = row // heads  # in 32 bits: a 64-bit division takes longer than the row's quantisation
    head = (row % heads).to(tl.int64)
    batch, query = (token // s_q).to(tl.int64), (token % s_q).to(tl.int64)
    row, token = row.to(tl.int64), token.to(tl.int64)

    column = tl.arange(0, LATENT)
    offsets = batch * latent_stride_batch + query * latent_stride_query + head * latent_stride_head
    latent = tl.load(
        q_latent_ptr + offsets[:, None] + column[None, :], mask=live[:, None], other=0.0
    ).to(tl.float32)  # [BLOCK_ROWS, LATENT]
    # All loads before what waits for the first.
    if ROPE > 0:
        offsets = batch * rope_stride_batch + query * rope_stride_query + head * rope_stride_head
        first, second = load_rotated(
            q_rope_ptr,
            offsets,
            live,
            cos_ptr,
            sin_ptr,
            token * angle_stride,
            ROPE,
            ROTATE,
            INTERLEAVED,
            INTERPRETED,
        )

    latent = clamp(latent, LATENT_MAX)
    scale = token_scale(row_amax(latent), POW2)  # [BLOCK_ROWS]
    codes = to_e4m3(divide_rows(latent, scale, POW2), INTERPRETED)
    tl.store(codes_ptr + row[:, None] * LATENT + column[None, :], codes, mask=live[:, None])
    tl.store(scale_ptr + row, scale, mask=live)

    if ROPE > 0:
        pair = tl.arange(0, ROPE // 2)
        target = rope_ptr + row[:, None] * ROPE + pair[None, :]
        first = clamp(divide_rows(clamp(first, BF16_MAX), scale, POW2), BF16_MAX)
        second = clamp(divide_rows(clamp(second, BF16_MAX), scale, POW2), BF16_MAX)
        tl.store(target, to_float(first, tl.bfloat16, INTERPRETED), mask=live[:, None])
        tl.store(target + ROPE // 2, to_float(second, tl.bfloat16, INTERPRETED), mask=live[:, None])
